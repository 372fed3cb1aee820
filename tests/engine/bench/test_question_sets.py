"""Published question sets: their formats, what answers show by themselves, and the papers' rows."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from helpers.commands import bench_command
from transformers import AutoTokenizer

from specsot.engine.bench.comparison import compare_jobs, document_of
from specsot.engine.bench.experiment import experiment_of_sides, prepare_experiment
from specsot.engine.bench.quality import scores_of
from specsot.engine.bench.question_sets import (
    PUBLISHED,
    SETS,
    FunctionQuestion,
    defines,
    last_number,
    published_rows,
    read_questions,
)
from specsot.engine.errors import Code, UsageError
from specsot.engine.prepare.options import BenchOptions, RunOptions, SetName
from specsot.states.phases.merge import Answer, Section
from specsot.states.text.outline import Outline
from specsot.states.text.tokens import PromptError

Patch = pytest.MonkeyPatch
Output = pytest.CaptureFixture[str]


def turns(number: int, category: str, *texts: str, **more: Any) -> dict[str, Any]:
    return {"question_id": number, "category": category, "turns": texts, **more}


def function(number: int, name: str, doc: str) -> dict[str, Any]:
    code = {"prompt": f'def {name}(n):\n    """{doc}"""\n', "canonical_solution": "    return n\n"}
    test = f"def check(candidate):\n    assert candidate(1) == {number}\n"
    return {"task_id": f"HumanEval/{number}", **code, "test": test, "entry_point": name}


LINES: dict[SetName, list[dict[str, Any]]] = {
    "mt-bench": [
        turns(81, "writing", "Describe a quiet harbour.", "Now in one sentence."),
        turns(101, "reasoning", "Which is heavier, snow or ice?", "Why?", reference=["ice", "x"]),
        turns(82, "writing", "Write a note to a baker.", "Make it shorter."),
    ],
    "spec-bench": [
        turns(81, "writing", "Describe a quiet harbour.", "Now in one sentence."),
        turns(161, "translation", "Translate: Der Zug kommt.", reference=["The train comes."]),
        turns(481, "rag", "Answer from this: lakes freeze. Do lakes freeze?"),
    ],
    "vicuna": [
        turns(1, "generic", "How do I rest well?"),
        turns(11, "knowledge", "What moves the tides?"),
        turns(31, "common-sense", "When is a shop busy?"),
    ],
    "gsm8k": [
        {"question": "Two carts have 3 wheels each. How many?", "answer": "2*3=<<2*3=6>>6\n#### 6"},
        {"question": "A farm of 1,200 hens sells 200.", "answer": "They keep\n#### 1,000"},
        {"question": "It is 4 below zero. Degrees?", "answer": "#### -4"},
    ],
    "humaneval": [
        function(0, "twice", "Return two times n."),
        function(1, "half", "Return half of n."),
        function(2, "even", "Say whether n is even."),
    ],
}


def written(lines: list[dict[str, Any]], name: str = "q.jsonl") -> Path:
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    file = Path(name)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)


# -- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", get_args(SetName))
def test_every_format_is_read(name: SetName) -> None:
    lines = LINES[name]
    prompts, questions = read_questions(name, written(lines))
    texts = [line.get("prompt", line.get("question", line.get("turns", [""])[0])) for line in lines]
    assert [prompt.text for prompt in prompts.items] == texts and SETS.keys() == LINES.keys()
    keys = [str(line.get("question_id", line.get("task_id", n))) for n, line in enumerate(lines, 1)]
    assert [prompt.key for prompt in prompts.items] == list(questions) == keys
    later = [tuple(line.get("turns", [""])[1:]) for line in lines]
    assert [question.later for question in questions.values()] == later and not prompts.notes
    packed = read_questions(name, written(lines, "q.jsonl.gz"))
    assert packed[0].items == prompts.items and packed[1] == questions


def test_columns_are_those_of_the_papers_and_a_count_is_of_each() -> None:
    file = written(LINES["mt-bench"])
    columns = [one.category for one in read_questions("mt-bench", file)[0].items]
    assert columns == ["writing", "reasoning", "writing"]
    prompts, questions = read_questions("mt-bench", file, 1)
    assert [one.key for one in prompts.items] == ["81", "101"] == list(questions)
    columns = [
        one.category for one in read_questions("spec-bench", written(LINES["spec-bench"]))[0].items
    ]
    assert columns == ["multi-turn", "translation", "RAG"]
    assert len(set(SETS["spec-bench"].columns.values())) == 6
    (column,) = {one.category for one in read_questions("gsm8k", written(LINES["gsm8k"]))[0].items}
    assert column == "GSM8K"


@pytest.mark.parametrize(
    "name, change, says",
    [
        ("mt-bench", {"turns": None}, "needs one of prompt, question, turns, task; it has none"),
        ("mt-bench", {"turns": []}, "not a line of MT-bench: turns: "),
        ("mt-bench", {"question_id": "x"}, "not a line of MT-bench: question_id: "),
        (
            "mt-bench",
            {"category": "rag"},
            "not a line of MT-bench: category: 'rag' is none of writing, roleplay",
        ),
        ("vicuna", {"answer": "#### 5"}, "not a line of Vicuna-bench: answer: Extra inputs"),
        (
            "gsm8k",
            {"answer": "It is 6."},
            "not a line of GSM8K: answer: must end with `#### NUMBER`",
        ),
        ("humaneval", {"entry_point": None}, "not a line of HumanEval: entry_point: "),
        ("humaneval", {"task_id": "HumanEval/0"}, "id 'HumanEval/0' is that of line 1 too"),
    ],
)
def test_a_line_of_another_format_is_refused_with_its_place(
    name: SetName, change: dict[str, Any], says: str
) -> None:
    first, second, third = LINES[name]
    file = written([first, {**second, **change}, third])
    with pytest.raises(UsageError) as refused:
        read_questions(name, file)
    assert str(refused.value).startswith(f"q.jsonl:2: {says}"), refused.value
    assert "\n" not in str(refused.value)


def test_other_files_are_refused() -> None:
    Path("q.txt").write_text("How do I rest well?\n")
    with pytest.raises(UsageError, match=r"q.txt: --set-of vicuna reads .jsonl or .jsonl.gz"):
        read_questions("vicuna", Path("q.txt"))
    packed = written(LINES["gsm8k"], "q.jsonl.gz")
    for data in (packed.read_bytes()[:-9], b"no archive"):
        packed.write_bytes(data)
        with pytest.raises(UsageError, match=r"^q.jsonl.gz: cannot be read: "):
            read_questions("gsm8k", packed)


def test_a_file_of_the_hub_is_read_from_its_cache(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached = tmp_path / "hub/datasets--someone--questions"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0" * 40)
    folder = cached / "snapshots" / ("0" * 40) / "data"
    folder.mkdir(parents=True)
    written(LINES["vicuna"]).rename(folder / "q.jsonl")
    prompts, _ = read_questions("vicuna", Path("hf://datasets/someone/questions/data/q.jsonl"))
    assert [one.key for one in prompts.items] == ["1", "11", "31"]
    with pytest.raises(UsageError, match=r"^hf://datasets/someone/questions/other.jsonl: "):
        read_questions("vicuna", Path("hf://datasets/someone/questions/other.jsonl"))


# -- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, number",
    [
        ("First 12, then 7 are left.", 7),
        ("So it costs $1,250.50.", 1250.5),
        ("5-3", 3),
        ("It falls to -4 degrees", -4),
        ("only .5 of it", 0.5),
        ("So it is...5", 5),
        ("1, 2, 3,", 3),
        ("none at all", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_an_answer_with_the_number_of_the_file_is_correct(tmp_path: Path) -> None:
    questions = read_questions("gsm8k", written(LINES["gsm8k"]))[1]
    assert questions["2"].scores("From 1200 they keep 1000.") == {"correct": 1}
    assert questions["2"].scores("They keep 1000 of 1200.") == {"correct": 0}
    assert questions["3"].scores("I do not know.") == {"correct": 0}


@pytest.mark.parametrize(
    "answer, found",
    [
        ("return 2 * n", True),  # continues the prompt
        ("m = n\n    return m + n", True),
        ("Here:\n```python\ndef twice(n):\n    return 2 * n\n```\nIt works.", True),
        ("```\nimport math\n\ndef twice(n):\n    return 2 * n", True),  # cut
        ("def twice(n):\n    return 2", True),
        ("Here:\n```python\ndef thrice(n):\n    return 3 * n\n```", False),
        ("```python\ndef twice(n:\n    return\n```", False),
        ("To double a number, add it to itself.", False),
        ("def twice(n):\n    '''Later.'''\n    pass", False),
        ("", False),
        ("x = '\0'", False),
    ],
)
def test_a_function_of_the_asked_name_is_found(answer: str, found: bool) -> None:
    question = FunctionQuestion.model_validate(LINES["humaneval"][0])
    assert question.scores(answer) == {"parsable": found}


def test_no_code_is_run() -> None:
    assert defines("open('made', 'w')\ndef twice(n):\n    return n", "twice")
    assert not Path("made").exists()


def answer_of(*parts: tuple[str, str], outline: bool = True, combined: str = "") -> Answer:
    sections = [
        Section(index=n, title=title, text=text, tokens=(), finish="stop")
        for n, (title, text) in enumerate(parts)
    ]
    whole = replace(sections[0], text=combined) if combined else None
    return Answer(
        key="1",
        question="?",
        outline=Outline("plan", (), (), "ok") if outline else None,
        outline_tokens=(),
        sections=tuple(sections),
        text="",
        combined=whole,
    )


def test_parts_that_say_the_same_repeat_it_and_are_similar() -> None:
    text = "Pack a warm tent for the night."
    same = scores_of(answer_of(("The tent", text), ("Warm clothes", text)))
    # 7 words twice: 11 groups of four, 4 of them again.
    assert same["repetition"] == pytest.approx(4 / 11) and same["part_similarity"] == 1
    assert same["coverage"] == 1  # `warm` is one of two long words
    other = scores_of(answer_of(("The tent", text), ("Food", "Cook rice over a fire.")))
    assert other["repetition"] == 0 and other["coverage"] == 0.5
    assert other["part_similarity"] == pytest.approx(1 / 11)  # `a`
    combined = scores_of(
        answer_of(("The tent", text), ("Warm clothes", text), combined="In short.")
    )
    assert combined == {"coverage": 1, "part_similarity": 1}


def test_plain_answers_have_no_parts() -> None:
    plain = answer_of(("", "one two three four one two three four"), outline=False)
    assert scores_of(plain) == {"repetition": pytest.approx(1 / 5)}
    assert scores_of(answer_of(("", ""), outline=False)) == {}
    several = answer_of(("1", "one two three four"), ("2", "one two three four"), outline=False)
    assert scores_of(several) == {"repetition": 0}  # answers, not parts
    direct = answer_of(("", "one two three four five"))  # an outline that asks for one answer
    assert scores_of(direct) == {"repetition": 0}


# -- tables -------------------------------------------------------------------------------------


def test_published_rows_have_a_speed_up_and_a_source() -> None:
    for table in yaml.safe_load(PUBLISHED.read_text()):
        assert set(table["columns"]) <= SETS.keys() and table["source"] and table["hardware"]
        assert {len(row) for row in table["rows"]} == {3 + 2 * len(table["columns"])}
    for name in SETS:
        rows = [*published_rows(name, False), *published_rows(name, True)]
        assert rows and all(row["speedup"] > 1 for row in rows)
        assert all(row["tau"] is None or row["tau"] > row["speedup"] * 0.9 for row in rows)
    (dflash,) = [
        row
        for row in published_rows("mt-bench", True)
        if (row["method"], row["model"]) == ("DFlash (16)", "Qwen3 8B")
    ]
    assert (dflash["speedup"], dflash["tau"], dflash["hardware"]) == (2.47, 3.80, "H200")
    assert [*published_rows(None, False)] == []


def test_a_set_is_measured_as_in_the_papers(quick: RunOptions, capsys: Output) -> None:
    embedded = replace(quick, model=None, drafter_model=None, max_new_tokens=24)
    options = replace(embedded, prompts=written(LINES["mt-bench"]))
    asked = BenchOptions(("eagle", "bim_eagle"), set_of="mt-bench", repeats=1, out=Path("kept"))
    assert bench_command(asked, options) == Code.OK
    out, _ = capsys.readouterr()
    result = json.loads(Path("kept/result.json").read_text())
    assert result["experiment"]["set_of"] == "mt-bench" == result["experiment"]["name"]
    plain, eagle, outlined = result["rows"].values()
    assert plain["side"] == "autoregressive" and plain["figures"]["speedup_decode"][0] == 1
    assert list(eagle["categories"]) == ["writing", "reasoning"]
    assert eagle["categories"]["writing"].keys() >= {"speedup_decode", "tau_step", "speedup_ttlt"}
    assert "coverage" in outlined["figures"] and "coverage" not in plain["figures"]
    assert "part_similarity" in outlined["figures"] and "correct" not in plain["figures"]
    # The papers' rows are with the result, and in no row of it.
    assert result["published"] == [*published_rows("mt-bench", False)]
    for text in (out, Path("kept/table.md").read_text()):
        table = text[text.index("speedup decode / tau step by category:") :].splitlines()[2:]
        heads, *lines = [line for line in table if "---" not in line][:4]
        assert heads.replace("|", " ").split() == ["writing", "reasoning", "overall"]
        speedup, tau = (eagle["figures"][name][0] for name in ("speedup_decode", "tau_step"))
        assert f"{speedup:.2f}/{tau:.2f}" in lines[1] and "B eagle" in lines[1]
        assert "published by papers, not measured here:" in text
        assert "DFlash (arXiv 2602.06036), table 1" in text and "ms to last token" in text
        assert "answers, without a judge:" in text
    # The questions of another set are others.
    again = replace(asked, set_of="spec-bench")
    assert bench_command(again, options) == Code.USAGE
    assert "holds a comparison with other" in capsys.readouterr().err


def test_later_turns_follow_the_own_answer_in_reading_order(quick: RunOptions) -> None:
    options = replace(quick, model=None, drafter_model=None, max_new_tokens=8)
    sides = ["autoregressive", "eagle", "bim_plain", "bim_eagle"]
    experiment = experiment_of_sides("turns", sides, set_of="mt-bench", repeats=1)
    prompts = written(LINES["mt-bench"][:2])
    prepared = prepare_experiment(experiment, replace(options, prompts=prompts))
    found = compare_jobs(prepared)
    for one, line in zip(found.rounds, LINES["mt-bench"], strict=False):
        for side in found.sides:
            run, book = one.runs[side.letter], side.session.prompts
            first, second = run.requests
            assert (first.question, second.question) == line["turns"]
            branches = [*first.all_branches(), *second.all_branches()]
            assert run.meter.tokens == sum(len(branch.tokens) for branch in branches)
            assert run.last_token > run.meter.seconds * 0.5e9 and run.kv["held"] > 0
            texts = [book.decode(branch.tokens).strip() for branch in first.branches]
            before = book.decode([*second.prefix, *second.tail])
            places = [before.index(text) for text in (line["turns"][0], *texts, second.question)]
            assert places == sorted(places) and second.question not in book.decode(first.tail)
            if side.title in sides[:2]:  # as the model wrote it, not encoded again
                ids, answer = [*second.prefix, *second.tail], first.branches[0].tokens
                assert any(ids[n : n + len(answer)] == answer for n in range(len(ids)))
        names = [branch.branch for branch in one.results["D"]]
        assert names[0] == "outline" and "outline of turn 2" in names and "1 of turn 2" in names
        assert {str(b.result) for results in one.results.values() for b in results} == {"equal"}
    assert [b.branch for b in found.rounds[0].results["B"]] == ["1", "1 of turn 2"]
    (plain, eagle, *_) = document_of(found, prepared)["rows"].values()
    assert plain["figures"]["tokens"] == eagle["figures"]["tokens"]
    # The first turns alone are another measurement.
    alone = written([{**line, "turns": line["turns"][:1]} for line in LINES["mt-bench"][:2]])
    other = prepare_experiment(experiment, replace(options, prompts=alone))
    assert compare_jobs(other).setup["prompts"] != found.setup["prompts"]
    with pytest.raises(PromptError, match=r"q.jsonl:1: the prompt is blank"):
        read_questions("mt-bench", written([turns(81, "writing", "Describe a harbour.", " ")]))


@pytest.mark.parametrize(
    "name, figure, text, share",
    [("gsm8k", "correct", "Then 6 of", 1 / 3), ("humaneval", "parsable", "return n", 1)],
)
def test_known_answers_are_scored(
    name: SetName, figure: str, text: str, share: float, quick: RunOptions, capsys: Output
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quick.model)
    ids = tokenizer.encode(text, add_special_tokens=False)
    saying = f"autoregressive@sampling.forced={json.dumps(ids)}"
    options = replace(quick, prompts=written(LINES[name]), as_json=True, max_new_tokens=len(ids))
    assert bench_command(BenchOptions((saying,), set_of=name, repeats=1), options) == Code.OK
    plain, told = json.loads(capsys.readouterr().out)["rows"].values()
    assert plain["figures"][figure][0] == 0 and list(plain["categories"]) == [SETS[name].title]
    assert told["figures"][figure][0] == pytest.approx(share, abs=1e-5)
    assert told["categories"][SETS[name].title][figure] == told["figures"][figure][0]


def test_a_file_of_an_experiment_names_a_set(quick: RunOptions, capsys: Output) -> None:
    written(LINES["gsm8k"], "sums.jsonl")
    keys = "sides: [autoregressive]\nset_of: gsm8k\nprompts: sums.jsonl\nfigures: [tokens]\n"
    Path("mine.yaml").write_text(f"name: mine\ndoc: Mine.\n{keys}")
    asked = BenchOptions(("mine.yaml",), repeats=1, count=1)
    assert bench_command(asked, replace(quick, prompts=None, as_json=True)) == Code.OK
    result = json.loads(capsys.readouterr().out)
    figures = result["rows"]["autoregressive"]["categories"]["GSM8K"]
    assert figures.keys() >= {"tokens", "speedup_decode", "tau_step", "correct"}
    assert result["rounds"] == 1 and result["published"]


def test_a_set_needs_its_file(quick: RunOptions, capsys: Output) -> None:
    asked = BenchOptions(("eagle",), set_of="gsm8k")
    assert bench_command(asked, replace(quick, prompts=None)) == Code.USAGE
    assert "--set-of gsm8k reads a file that you have: --prompts FILE" in capsys.readouterr().err
