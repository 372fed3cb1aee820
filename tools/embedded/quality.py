"""Quality of an embedded target without any grammar: outlines, titles, parts and recall.

python -m tools.embedded.quality --target out/target"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from .almanac import Subject, load_almanac
from .heldout import Probe, probes
from .pieces import Pieces, branch_turn, gold

LINE = re.compile(
    r"(?P<id>[1-9])\|(?P<length>[1-9]\d?0)\|(?:-|Search)"
    r"\|(?P<needs>-|\d(?:,\d)*)\|(?P<title>[^\W_][^|\n]{0,59})"
)
Generate = Callable[[list[Pieces], int], list[str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A probe, the text written for it, and whether each check holds."""

    probe: Probe
    text: str
    checks: dict[str, bool]


def outline_titles(text: str) -> list[str] | None:
    """The titles of a valid outline, [] for DIRECT, None if the text is not valid."""
    if text == "DIRECT":
        return []
    rows = text.split("\n")
    if len(rows) not in range(4, 9) or rows[0] != "PLAN" or rows[-1] != "END":
        return None
    found = [LINE.fullmatch(row) for row in rows[1:-1]]
    for number, match in enumerate(found, 1):
        if match is None or int(match["id"]) != number:
            return None
        if match["needs"] != "-" and max(map(int, match["needs"].split(","))) >= number:
            return None
    return [match["title"] for match in found if match]


def generator(folder: Path, batch: int = 16) -> Generate:
    """Greedy generation in batches with the saved model; the end mark is cut off."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def encode(pieces: Pieces) -> list[int]:
        return [i for p in pieces for i in tokenizer.encode(p.text, add_special_tokens=False)]

    @torch.inference_mode()
    def generate(prompts: list[Pieces], limit: int) -> list[str]:
        texts: list[str] = []
        for start in range(0, len(prompts), batch):
            rows = [encode(p) for p in prompts[start : start + batch]]
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
            out = model.generate(ids, attention_mask=mask, max_new_tokens=limit, do_sample=False)
            decoded = tokenizer.batch_decode(out[:, width:])
            texts += [re.split(r"<\|(?:im_end|endoftext)\|>", text)[0] for text in decoded]
        return texts

    return generate


def outlines(generate: Generate, kind: str, limit: int) -> list[Outcome]:
    """Outlines for held-out broad questions: valid, complete, about the subject, no repeats."""
    asked = probes(kind, limit)
    texts = generate([p.pieces for p in asked], 130)
    return [Outcome(p, t, _outline_checks(p, t)) for p, t in zip(asked, texts, strict=True)]


def _outline_checks(probe: Probe, text: str) -> dict[str, bool]:
    titles = outline_titles(text)
    checks = {"valid": titles is not None, "plan": bool(titles)}
    checks["distinct"] = bool(titles) and len(set(titles or ())) == len(titles or ())
    if probe.titles:
        checks["on_subject"] = bool(titles) and set(titles or ()) <= set(probe.titles)
    return checks


def reading(generate: Generate, kind: str, limit: int) -> list[Outcome]:
    """Answers from held-out documents: word for word, and whether the value is right."""
    asked = probes(kind, limit)
    texts = generate([p.pieces for p in asked], 64)
    found = []
    for probe, text in zip(asked, texts, strict=True):
        value = re.search(rf"\b{re.escape(probe.value)}\b", text.split(". ")[-1]) is not None
        found.append(Outcome(probe, text, {"exact": text == probe.answer, "value": value}))
    return found


def parts(generate: Generate, limit: int) -> list[Outcome]:
    """Bodies written after the model's own outlines, compared with the almanac's bodies."""
    subjects = {s.name: s for s in load_almanac()}
    jobs = list(_part_jobs(outlines(generate, "outline", limit), subjects))
    texts = generate([pieces for _, pieces, _ in jobs], 200)
    return [
        Outcome(probe, text, {"word_for_word": text == body})
        for (probe, _, body), text in zip(jobs, texts, strict=True)
    ]


def _part_jobs(
    written: list[Outcome], subjects: dict[str, Subject]
) -> Iterator[tuple[Probe, Pieces, str]]:
    for outcome in written:
        bodies = {a.title: a.body for a in subjects[outcome.probe.subject].aspects}
        for number, title in enumerate(outline_titles(outcome.text) or (), 1):
            if title in bodies:
                start = outcome.probe.pieces + gold(outcome.text)
                yield outcome.probe, start + branch_turn(number, title), bodies[title]


def rates(outcomes: list[Outcome]) -> dict[str, float]:
    """Share of outcomes that pass each check."""
    names = sorted({name for o in outcomes for name in o.checks})
    return {n: sum(o.checks.get(n, False) for o in outcomes) / len(outcomes) for n in names}


def evaluate(folder: Path, limit: int = 100) -> dict[str, list[Outcome]]:
    """All checks of a saved target with ``limit`` prompts of each kind."""
    generate = generator(folder)
    return {
        "outline": outlines(generate, "outline", limit),
        "unseen": outlines(generate, "unseen", limit),
        "unknown": outlines(generate, "unknown", max(4, limit // 2)),
        "one_hop": reading(generate, "one_hop", limit),
        "two_hop": reading(generate, "two_hop", limit),
        "parts": parts(generate, max(4, limit // 5)),
    }


def table(results: dict[str, list[Outcome]]) -> str:
    """One line per kind of check with its rates."""
    return "\n".join(
        f"{kind} n={len(found)} "
        + " ".join(f"{name} {rate:.1%}" for name, rate in rates(found).items())
        for kind, found in results.items()
        if found
    )


def examples(results: dict[str, list[Outcome]], number: int = 3) -> str:
    """The first texts of each kind, to be read by eye."""
    blocks = []
    for kind, found in results.items():
        for outcome in found[:number]:
            blocks.append(f"[{kind}] {outcome.probe.question}\n{outcome.text}\n{outcome.checks}")
    return "\n\n".join(blocks)


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target.")],
    limit: Annotated[int, typer.Option(min=4, help="Prompts of each kind.")] = 100,
    shown: Annotated[int, typer.Option("--examples", min=0, help="Texts of each kind.")] = 2,
) -> None:
    """Measure a target on held-out prompts, without a grammar."""
    results = evaluate(target, limit)
    if shown:
        typer.echo(examples(results, shown) + "\n")
    typer.echo(table(results))


if __name__ == "__main__":
    typer.run(main)
