"""Question sets of papers (`--set-of`): the fields of their published files, the columns of their
tables, what an answer shows by itself, and what the papers report. Nothing here imports torch."""

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from ...states.text.tokens import check_question
from ...states.yaml.spec import Int, Spec, Text
from ..errors import UsageError
from ..prepare.files import SHIPPED
from ..prepare.inputs import Prompt, Prompts, is_jsonl, read_file
from ..prepare.options import SetName

HUB = ("hf:", "datasets")  # the parts of hf://datasets/OWNER/NAME/FILE before the owner's
ALL = ""  # the category of a set without categories
NUMBER = re.compile(r"(?<!\d)-?(?:\d[\d,]*(?:\.\d+)?|(?<!\.)\.\d+)")
SOLUTION = re.compile(r"####\s*-?\$?\d[\d,]*(\.\d+)?\s*$")
FENCED = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
PUBLISHED = SHIPPED / "published" / "tables.yaml"


class Question(Spec):
    """One line of a file."""

    @property
    def later(self) -> tuple[str, ...]:
        """The user's turns after the first, each of which follows an answer."""
        return ()

    def scores(self, answer: str) -> dict[str, float]:
        """1.0 or 0.0 by figure; empty for questions without a known answer."""
        return {}


class TurnsQuestion(Question):
    """Of MT-bench, Spec-Bench and Vicuna-bench. reference: of some; it is not used."""

    question_id: Int
    category: Text
    turns: Annotated[tuple[Text, ...], Field(min_length=1)]
    reference: Any = None

    @property
    def later(self) -> tuple[str, ...]:
        return self.turns[1:]


def _solution(text: str) -> str:
    if not SOLUTION.search(text):
        raise PydanticCustomError("solution", "must end with `#### NUMBER`")
    return text


class NumberQuestion(Question):
    """Of GSM8K; the solution ends with `#### NUMBER`."""

    question: Text
    answer: Annotated[str, AfterValidator(_solution)]

    def scores(self, answer: str) -> dict[str, float]:
        return {"correct": float(last_number(answer) == last_number(self.answer))}


class FunctionQuestion(Question):
    """Of HumanEval; its solution and its test are not used, because no code is run."""

    task_id: Text
    prompt: Text
    entry_point: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
    canonical_solution: str
    test: str

    def scores(self, answer: str) -> dict[str, float]:
        texts = [answer, *FENCED.findall(answer)]
        # A text may continue the prompt; answers have lost their first indentation.
        texts += [f"{self.prompt}    {text.strip()}" for text in texts]
        return {"parsable": float(any(defines(text, self.entry_point) for text in texts))}


def last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def defines(code: str, name: str) -> bool:
    """Whether a text is Python with this function, whose body is more than a docstring."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of strings in what a model wrote
        try:
            tree = ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return any(
        isinstance(node, ast.FunctionDef) and node.name == name and not all(map(_empty, node.body))
        for node in tree.body
    )


def _empty(statement: ast.stmt) -> bool:
    text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return text or isinstance(statement, ast.Pass)


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """columns: of the papers' tables, by category."""

    title: str
    question: type[Question]
    columns: Mapping[str, str]


MT_BENCH = "writing roleplay reasoning math coding extraction stem humanities"
VICUNA = "generic knowledge roleplay common-sense fermi counterfactual coding math writing"
TASKS = dict.fromkeys(MT_BENCH.split(), "multi-turn") | {
    "translation": "translation",
    "summarization": "summarization",
    "qa": "QA",
    "math_reasoning": "math reasoning",
    "rag": "RAG",
}
SETS: Mapping[SetName, QuestionSet] = {
    "mt-bench": QuestionSet("MT-bench", TurnsQuestion, {c: c for c in MT_BENCH.split()}),
    "spec-bench": QuestionSet("Spec-Bench", TurnsQuestion, TASKS),
    "vicuna": QuestionSet("Vicuna-bench", TurnsQuestion, {c: c for c in VICUNA.split()}),
    "gsm8k": QuestionSet("GSM8K", NumberQuestion, {ALL: "GSM8K"}),
    "humaneval": QuestionSet("HumanEval", FunctionQuestion, {ALL: "HumanEval"}),
}


def read_questions(
    name: SetName, file: Path, count: int | None = None
) -> tuple[Prompts, dict[str, Question]]:
    """Prompts in the file's order, the first `count` of each column, and their questions by key;
    raises UsageError, PromptError: with the line that is not of this set."""
    file = _local(file)
    if not is_jsonl(file):
        raise UsageError(f"{file}: --set-of {name} reads .jsonl or .jsonl.gz, as published")
    published = SETS[name]
    found: list[tuple[Question, str]] = []
    prompts = read_file(file, lambda fields: found.append(_question(published, fields)))
    asked = Counter[str]()
    kept: dict[str, Question] = {}
    items: list[Prompt] = []
    for prompt, (question, column) in zip(prompts.items, found, strict=True):
        asked[column] += 1
        if count is None or asked[column] <= count:
            items.append(replace(prompt, category=column))
            kept[prompt.key] = question
    return Prompts(tuple(items)), kept


def _question(published: QuestionSet, fields: Mapping[str, Any]) -> tuple[Question, str]:
    """A checked line, and its column."""
    what = f"not a line of {published.title}"
    try:
        question = published.question.model_validate(fields)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        raise UsageError(f"{what}: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
    category = getattr(question, "category", ALL)
    if category not in published.columns:
        there = ", ".join(published.columns)
        raise UsageError(f"{what}: category: {category!r} is none of {there}")
    for turn in question.later:
        check_question(turn)
    return question, published.columns[category]


def _local(file: Path) -> Path:
    """The file, or the cached copy of one on the Hub."""
    owner, name = file.parts[2:4], file.parts[4:]
    if file.parts[:2] != HUB or not name:
        return file
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download("/".join(owner), "/".join(name), repo_type="dataset"))
    except Exception as error:  # the Hub client raises a dozen unrelated kinds
        place = "/".join(("hf:/", *file.parts[1:]))
        raise UsageError(f"{place}: {error}".splitlines()[0]) from None


def published_rows(name: str | None, sampled: bool) -> Iterator[dict[str, Any]]:
    """What papers report for a set at a temperature of 0, or of 1; None is not reported."""
    tables = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8")) if name else ()
    for table in (table for table in tables if name in table["columns"]):
        at = 3 + 2 * table["columns"].index(name)
        for row in (row for row in table["rows"] if bool(row[2]) == sampled):
            facts = dict(zip(("method", "model", "temperature"), row[:3], strict=True))
            figures = {"speedup": row[at], "tau": row[at + 1]}
            yield facts | figures | {key: table[key] for key in ("hardware", "source")}
