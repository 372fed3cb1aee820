"""The results of a run: answers as a JSON document and as text, the digest, the summary page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from ...states.phases.merge import Answer, Section, answer
from ...states.request import Request
from ...states.text.outline import Outline
from ..events import OUTLINE, finish_of, printable
from .metrics import NS, Marks, Meter

Contexts = Mapping[int, Sequence[int]]
"""The token ids before the answer of each branch, by its index; `OUTLINE` that of the outline."""
Sights = Mapping[int, Sequence[Sequence[Any]] | None]
"""Visible segments of a context, [tokens, position, [sees]] each, if it does not see all of it."""


def answers_of(requests: Sequence[Request], prompts: Any) -> tuple[Answer, ...]:
    """Of all requests so far; prompts: states.text.prompts.PromptBook."""
    return tuple(answer(request, prompts) for request in requests)


def output_digest(answers: Iterable[Answer]) -> str:
    """sha256 over all generated ids in reading order: equal if and only if the tokens of two runs
    are."""
    lines = []
    for item in answers:
        branches = (item.outline_tokens, *(section.tokens for section in _all(item)))
        lines.append(f"{item.key}:{';'.join(' '.join(map(str, ids)) for ids in branches)}")
    return sha256("\n".join(lines).encode()).hexdigest()


def _all(item: Answer) -> tuple[Section, ...]:
    return item.sections if item.combined is None else (*item.sections, item.combined)


def refusals(answers: Iterable[Answer]) -> list[str]:
    return [
        f"request {a.key}{f', part {s.index + 1}' if s.title else ''} {s.finish}: {s.note}"
        for a in answers
        for s in a.sections
        if s.finish in ("refused", "failed")
    ]


def uncombined(answers: Iterable[Answer]) -> list[str]:
    return [
        f"request {a.key}: the parts are not combined: {a.combined.note}"
        for a in answers
        if a.combined is not None and a.combined.finish == "refused"
    ]


def outputs(
    answers: Sequence[Answer],
    meter: Meter,
    contexts: Mapping[str, Contexts],
    sights: Mapping[str, Sights],
) -> list[dict[str, Any]]:
    """The lines of outputs.jsonl; contexts, sights: of every request, by its key."""
    lines = []
    for item in answers:
        ids = contexts.get(item.key, {})
        combined = None
        if item.combined is not None:
            segments = sights.get(item.key, {}).get(item.combined.index)
            combined = {**_section(item.combined, ids), "context_segments": segments}
        marks = asdict(meter.marks.get(item.key, Marks()))
        seconds = {f"to_{k}": None if nanos is None else nanos / NS for k, nanos in marks.items()}
        line = {
            "id": item.key,
            "question": item.question,
            "text": item.text,
            "finish_reason": finish_of(item),
            "outline": None if item.outline is None else _outline(item.outline),
            "outline_finish_reason": item.outline_finish or None,
            "outline_context_ids": list(ids.get(OUTLINE, ())),
            "outline_token_ids": list(item.outline_tokens),
            "parts": [_section(section, ids) for section in item.sections],
            "combined": combined,
            "seconds": seconds,
        }
        lines.append(line)
    return lines


def _outline(outline: Outline) -> dict[str, Any]:
    points = [
        {"id": p.id, "title": p.title, "length": p.length, "tool": p.tool, "depends_on": [*p.deps]}
        for p in outline.points
    ]
    return {
        "mode": outline.mode,
        "status": outline.status,
        "points": points,
        "skipped": list(map(asdict, outline.skipped)),
        "mended": list(map(asdict, outline.mended)),
    }


def _section(section: Section, contexts: Contexts) -> dict[str, Any]:
    return {
        "index": section.index,
        "title": section.title,
        "text": section.text,
        "finish_reason": section.finish,
        "note": section.note,
        "context_ids": list(contexts.get(section.index, ())),
        "token_ids": list(section.tokens),
    }


def answer_text(answers: Sequence[Answer]) -> str:
    if len(answers) == 1:
        return printable(answers[0].text) + "\n"
    return "\n".join(
        f"[{printable(a.key, '')}] {printable(a.question, '')}\n\n{printable(a.text)}\n"
        for a in answers
    )


def closing_lines(answers: Sequence[Answer], metrics: Mapping[str, Any], status: str) -> list[str]:
    """For stderr at the end of a run."""
    parts = sum(len(a.sections) for a in answers)
    kv = metrics["kv"]["target"]
    return [
        f"{status}: {metrics['tokens']} tokens in {parts} parts, "
        f"{metrics['seconds']['total']:.2f} s, {metrics['tokens_per_second']:.0f} tokens/s",
        f"tokens per target forward {metrics['tokens_per_target_forward']:.2f}, "
        f"tau_step {metrics['tau_step']:.2f}, acceptance {100 * metrics['acceptance_rate']:.0f} %, "
        f"KV peak {kv['peak_slots']}/{kv['capacity_slots']} slots, "
        f"moved {sum(kv['moved_bytes'].values())} bytes, "
        f"overhead {100 * metrics['overhead_share']:.1f} %",
    ]


def summary_page(
    title: str, answers: Sequence[Answer], metrics: Mapping[str, Any], facts: Mapping[str, str]
) -> str:
    """summary.md."""
    states = [
        (name, s["visits"], f"{s['milliseconds']:.1f}", f"{s['milliseconds_per_visit']:.2f}")
        for name, s in metrics["states"].items()
    ]
    sections = [(item.key, section) for item in answers for section in _all(item)]
    parts = [(k, s.index + 1, s.title, len(s.tokens), s.finish, s.note) for k, s in sections]
    tables: tuple[tuple[str, Sequence[str], Iterable[Sequence[Any]]], ...] = (
        (f"# {title}", ("", ""), facts.items()),
        ("## Figures", ("metric", "value"), _figures(metrics)),
        ("## States", ("state", "visits", "ms", "ms per visit"), states),
        ("## Parts", ("request", "part", "title", "tokens", "finish", "note"), parts),
    )
    lines: list[str] = []
    for heading, columns, rows in tables:
        lines += [heading, "", _row(columns), "|" + "---|" * len(columns), *map(_row, rows), ""]
    return "\n".join(lines)


def _row(cells: Sequence[Any]) -> str:
    texts = (printable(str(cell), "").replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(texts)} |"


def _figures(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    nested = {
        "": metrics,
        "seconds": metrics["seconds"],
        "host_reads": metrics["host_reads"],
        "blend": metrics["blend"] or {},
    }
    for name, value in (metrics["blend"] or {}).items():
        if isinstance(value, dict):
            nested[f"blend.{name}"] = value
    nested["prefix_cache"] = metrics["prefix_cache"] or {}
    for name, pool in metrics["kv"].items():
        if pool is not None:
            moved = sum(pool["moved_bytes"].values())
            nested[f"kv.{name}"] = {"peak_bytes": pool["peak_bytes"], "moved_bytes": moved}
    for block, values in nested.items():
        for name, value in values.items():
            if isinstance(value, int | float | list):  # a list has a value for every layer
                yield f"{block}.{name}".lstrip("."), _number(value)


def _number(value: float | list[float]) -> str:
    if isinstance(value, list):
        return " ".join(map(_number, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
