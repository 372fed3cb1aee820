"""The results of a run: answers as a JSON document and as text, the digest, the summary page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from ...states.phases.merge import Answer, Section, answer
from ...states.request import Request
from ...states.text.outline import Outline, Point
from ..text_stream import printable
from .metrics import NS, Marks, Meter

Contexts = Mapping[int, Sequence[int]]
"""The token ids before the answer of each branch, by its index; `OUTLINE` that of the outline."""
Sights = Mapping[int, Sequence[Sequence[Any]]]
"""Visible segments of a context, [tokens, position, [sees]] each, if it does not see all of it."""
OUTLINE = -1


def answers_of(requests: Sequence[Request], prompts: Any) -> tuple[Answer, ...]:
    """The answers of all requests so far; prompts: states.text.prompts.PromptBook."""
    return tuple(answer(request, prompts) for request in requests)


def output_digest(answers: Iterable[Answer]) -> str:
    """sha256 over all generated ids in reading order: the outline's, then each branch's.

    Equal if and only if the tokens of two runs are.
    """
    lines = []
    for item in answers:
        branches = (item.outline_tokens, *(section.tokens for section in _all(item)))
        lines.append(f"{item.key}:{';'.join(' '.join(map(str, ids)) for ids in branches)}")
    return sha256("\n".join(lines).encode()).hexdigest()


def _all(item: Answer) -> tuple[Section, ...]:
    """The sections, and the answer that combines them, if there is one."""
    return item.sections if item.combined is None else (*item.sections, item.combined)


def refusals(answers: Iterable[Answer]) -> list[str]:
    """One line for each branch that was refused or failed."""
    return [
        f"request {a.key}{f', part {s.index + 1}' if s.title else ''} {s.finish}: {s.note}"
        for a in answers
        for s in a.sections
        if s.finish in ("refused", "failed")
    ]


def uncombined(answers: Iterable[Answer]) -> list[str]:
    """One line for each request whose parts could not be combined."""
    return [
        f"request {a.key}: the parts are not combined: {a.combined.note}"
        for a in answers
        if a.combined is not None and a.combined.finish == "refused"
    ]


def outline_document(outline: Outline) -> dict[str, Any]:
    """The outline as JSON values."""
    return {
        "mode": outline.mode,
        "status": outline.status,
        "points": [_point_document(point) for point in outline.points],
        "skipped": list(map(asdict, outline.skipped)),
        "mended": list(map(asdict, outline.mended)),
    }


def _point_document(point: Point) -> dict[str, Any]:
    same = {name: getattr(point, name) for name in ("id", "title", "length", "tool")}
    return {**same, "depends_on": list(point.deps)}


def answer_document(
    item: Answer, marks: Marks | None, contexts: Contexts, sights: Sights
) -> dict[str, Any]:
    """One request: text, outline, parts with finish reasons, times; contexts: of its branches."""
    combined = None
    if item.combined is not None:
        combined = _section_document(item.combined, contexts)
        combined["context_segments"] = sights.get(item.combined.index)
    return {
        "id": item.key,
        "question": item.question,
        "text": item.text,
        "finish_reason": finish_of(item),
        "outline": None if item.outline is None else outline_document(item.outline),
        "outline_finish_reason": item.outline_finish or None,
        "outline_context_ids": list(contexts.get(OUTLINE, ())),
        "outline_token_ids": list(item.outline_tokens),
        "parts": [_section_document(s, contexts) for s in item.sections],
        "combined": combined,
        "seconds": {
            f"to_{name}": None if nanos is None else nanos / NS
            for name, nanos in asdict(marks or Marks()).items()
        },
    }


def _section_document(section: Section, contexts: Contexts) -> dict[str, Any]:
    return {
        "index": section.index,
        "title": section.title,
        "text": section.text,
        "finish_reason": section.finish,
        "note": section.note,
        "context_ids": list(contexts.get(section.index, ())),
        "token_ids": list(section.tokens),
    }


def finish_of(item: Answer) -> str:
    """The worst of the parts' finish reasons; parts that are not combined are an answer as well."""
    combined = item.combined
    sections = item.sections if combined is None or combined.finish == "refused" else _all(item)
    reasons = {section.finish for section in sections}
    worst_first = ("failed", "timeout", "refused", "cancelled", "length", "stop")
    return next((reason for reason in worst_first if reason in reasons), "cancelled")


def outputs(
    answers: Sequence[Answer],
    meter: Meter,
    contexts: Mapping[str, Contexts],
    sights: Mapping[str, Sights],
) -> list[dict[str, Any]]:
    """The lines of outputs.jsonl; contexts, sights: of every request, by its key."""
    return [
        answer_document(
            item, meter.marks.get(item.key), contexts.get(item.key, {}), sights.get(item.key, {})
        )
        for item in answers
    ]


def answer_text(answers: Sequence[Answer]) -> str:
    """The answer, or each answer under its question, as text."""
    if len(answers) == 1:
        return printable(answers[0].text) + "\n"
    blocks = [
        f"[{printable(a.key, '')}] {printable(a.question, '')}\n\n{printable(a.text)}\n"
        for a in answers
    ]
    return "\n".join(blocks)


def closing_lines(answers: Sequence[Answer], metrics: Mapping[str, Any], status: str) -> list[str]:
    """Two lines for stderr at the end of a run."""
    parts = sum(len(a.sections) for a in answers)
    seconds = metrics["seconds"]["total"]
    kv = metrics["kv"]["target"]
    return [
        f"{status}: {metrics['tokens']} tokens in {parts} parts, {seconds:.2f} s, "
        f"{metrics['tokens_per_second']:.0f} tokens/s",
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
    plain = [(name, value) for name, value in metrics.items() if isinstance(value, int | float)]
    figures = [(name, _number(value)) for name, value in (*plain, *_nested(metrics))]
    states = [
        (name, s["visits"], f"{s['milliseconds']:.1f}", f"{s['milliseconds_per_visit']:.2f}")
        for name, s in metrics["states"].items()
    ]
    parts = [
        (item.key, s.index + 1, s.title, len(s.tokens), s.finish, s.note)
        for item in answers
        for s in _all(item)
    ]
    tables = (
        (f"# {title}", ("", ""), facts.items()),
        ("## Figures", ("metric", "value"), figures),
        ("## States", ("state", "visits", "ms", "ms per visit"), states),
        ("## Parts", ("request", "part", "title", "tokens", "finish", "note"), parts),
    )
    return "\n".join("\n".join(_table(*table)) for table in tables)


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """A heading with a table under it, in Markdown."""
    yield from (title, "", _row(headings), "|" + "---|" * len(headings))
    yield from map(_row, rows)
    yield ""


def _row(cells: Sequence[Any]) -> str:
    texts = (printable(str(cell), "").replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(texts)} |"


def _nested(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"seconds.{k}", v) for k, v in metrics["seconds"].items() if v is not None)
    yield from ((f"host_reads.{k}", v) for k, v in metrics["host_reads"].items())
    for name, value in (metrics["blend"] or {}).items():
        nested = value.items() if isinstance(value, dict) else [("", value)]
        for key, figure in nested:
            if isinstance(figure, int | float | list):
                yield f"blend.{name}.{key}".rstrip("."), figure
    for name, value in (metrics["prefix_cache"] or {}).items():
        yield f"prefix_cache.{name}", value
    for name, pool in metrics["kv"].items():
        if pool is not None:
            yield f"kv.{name}.peak_bytes", pool["peak_bytes"]
            yield f"kv.{name}.moved_bytes", sum(pool["moved_bytes"].values())


def _number(value: float | list[float]) -> str:
    if isinstance(value, list):  # of every layer
        return " ".join(map(_number, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
