"""Writes prompts with documents and known answers, for tests and measurements.

    python -m tools.embedded.document_sets --out set --prompts 40 --reuse 0.5
    python -m tools.embedded.document_sets --out long --tokens 2048 --kinds joint,search

Of the kind that the embedded target was trained to read; none of these people occurs in its
training. OUT/prompts.jsonl is for `specsot run --prompts`, OUT/documents.jsonl (every document
once) for `specsot cache add`. A line of prompts.jsonl has, beside `id`, `prompt` and `documents`:
`kind`, `hops` (people that an answer is about), `answers` (whole sentences), `values` (the words in
them that are in question) and `reused` (how many of its documents an earlier prompt had). Where a
prompt has no new document and nobody in it knows anybody, a two-hop question cannot be put, and its
`kind` is `one_hop`. The embedded target answers nearly all up to 300 tokens of documents, most at
500 and few at 1000."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from specsot.engine.cli.options import JSON
from specsot.engine.errors import UsageError
from specsot.engine.prepare.job import model_folder
from specsot.engine.record.run_folder import COMPACT, write_whole
from specsot.engine.shell import user_errors
from specsot.models.files import ModelError
from specsot.states.yaml.source import hint

from .reading_prompts import KINDS, SetSettings, reading_prompts

PROMPTS_FILE, DOCUMENTS_FILE = "prompts.jsonl", "documents.jsonl"


def main(
    out: Annotated[Path, typer.Option("--out", help="Folder for the two files.")],
    prompts: Annotated[int, typer.Option(min=1, help="How many.")] = 20,
    number: Annotated[
        int, typer.Option("--documents", min=1, max=1000, help="Documents of each prompt.")
    ] = 6,
    reuse: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of documents that an earlier prompt had."),
    ] = 0.5,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 17,
            show_default=False,
            help="Tokens of a prompt's documents together, about [one person per document].",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Whose tokens --tokens counts: folder or Hub id.")
    ] = "embedded",
    kinds: Annotated[
        str,
        typer.Option(
            help="The prompts' kinds in turn. one_hop: one fact; two_hop: a fact about somebody's"
            " employer, friend or teacher; joint: two to four facts in one question; search: the"
            " same, to be looked up with the tool Search."
        ),
    ] = "one_hop,two_hop",
    records: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of documents that are lists of fields.")
    ] = 0.4,
    seed: Annotated[int, typer.Option(help="Another seed, other people.")] = 0,
    as_json: bool = JSON,
) -> None:
    """Write prompts about invented people, the documents that answer them, and the answers.

    OUT/prompts.jsonl is for `specsot run --prompts`, OUT/documents.jsonl for `specsot cache add`.
    """
    with user_errors():
        count = _counter(model)
        settings = SetSettings(prompts, number, reuse, records, tokens, _kinds(kinds), seed)
        made = list(reading_prompts(settings, count))
        distinct = tuple(dict.fromkeys(d for prompt in made for d in prompt.documents))
        _write(out, PROMPTS_FILE, [one.line(n) for n, one in enumerate(made, 1)])
        _write(out, DOCUMENTS_FILE, [{"title": d.title, "text": d.text} for d in distinct])
        lengths = [sum(count(d.text) for d in prompt.documents) for prompt in made]
    report = {
        "folder": str(out),
        "prompts": len(made),
        "kinds": dict(Counter(prompt.kind for prompt in made)),
        "documents": len(distinct),
        "reuse": 1 - len(distinct) / (len(made) * number),
        "tokens_per_prompt": sum(lengths) / len(lengths),
    }
    print(json.dumps({"schema_version": 1, **report}, indent=2) if as_json else _words(report))


def _kinds(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(","))
    for kind in found:
        if kind not in KINDS:
            raise UsageError(f"--kinds: no kind {kind!r}{hint(kind, KINDS)}; {', '.join(KINDS)}")
    return found


def _counter(model: str) -> Callable[[str], int]:
    """How many tokens of this model a text has."""
    from tokenizers import Tokenizer

    file = model_folder(model, "target") / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the tokenizers library raises nothing more special
        raise ModelError(file, f"cannot be read: {error}") from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _write(folder: Path, name: str, lines: list[dict[str, Any]]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, "".join(COMPACT.encode(line) + "\n" for line in lines))
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{folder / name}: cannot be written: {reason}") from None


def _words(report: dict[str, Any]) -> str:
    kinds = ", ".join(f"{number} {kind}" for kind, number in report["kinds"].items())
    return (
        f"{report['folder']}: {report['prompts']} prompts ({kinds}), {report['documents']} "
        f"documents, {report['reuse']:.1%} of their places taken by one that came before, "
        f"{report['tokens_per_prompt']:.0f} tokens of documents per prompt"
    )


if __name__ == "__main__":
    typer.run(main)
