"""A comparison for people: tables that fit into 100 columns."""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..record.metrics import ratio
from ..record.text_stream import printable
from ..terminal import usable
from .cost import Cost, PoolUse, total
from .equal import CUT, END, TIE, BranchAnswer, BranchComparison, Difference, GraphPair, counts
from .report import Comparison, PromptComparison, compared_words
from .sides import ComparedPrompt, Side

WIDTH = 100
QUESTION = 20  # characters of a question beside its figures
STATES = 9  # states side by side; a graph with more gets another table
MOST = 20  # differences that are printed; --json has all
MB = 1e6


def render(found: Comparison, stream: TextIO, environ: dict[str, str]) -> str:
    """All tables as text for this stream: as wide as its terminal, or WIDTH columns."""
    there, out = Console(file=stream), io.StringIO()
    width = there.width if there.is_terminal else WIDTH
    console = Console(file=out, width=width, force_terminal=usable(there, environ), highlight=False)
    lines = box.SIMPLE_HEAD if "utf" in (stream.encoding or "utf-8").lower() else box.ASCII
    console.print(Group(*_parts(found, lines)))
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def _parts(found: Comparison, lines: box.Box) -> Iterator[RenderableType]:
    yield _graphs(found, lines)
    if found.asked:
        yield _figures(found, lines)
        states = list(dict.fromkeys(s for side in found.sides for s in _states(side)))
        for start in range(0, len(states), STATES):
            yield _milliseconds(found, states[start : start + STATES], lines)
        yield from map(Text, _moves(found))
    yield Text("\nEquality", style="bold")
    yield from (Text(f"  {line}") for line in _equality(found))
    yield from (Text(line) for line in _differences(found))


def _table(title: str, lines: box.Box) -> Table:
    return Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=lines,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _graphs(found: Comparison, lines: box.Box) -> Table:
    table = _table("Graphs", lines)
    for name in ("", "graph", "file", "layout", "drafter", "model", "budget"):
        table.add_column(name, overflow="fold")
    for side in found.sides:
        graph = side.job.program.graph
        names = (side.letter, graph.name, side.job.options.graph)
        kinds = (graph.layout.kind, graph.drafter.kind)
        cells = (*names, *kinds, side.job.options.model, str(side.session.budget))
        table.add_row(*(Text(printable(cell, "")) for cell in cells))
    return table


def _figures(found: Comparison, lines: box.Box) -> Table:
    title = (
        "Per prompt and in total (equal: branches; KV: MB in the target's and the drafter's pool)"
    )
    table = _table(title, lines)
    table.add_column("prompt", max_width=QUESTION)  # the one that gives way
    table.add_column("", no_wrap=True)
    numbers = ("equal", "tau", "forwards", "tokens", "ms", "KV peak", "KV moved", "padding")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    for asked in found.asked:
        for number, side in enumerate(found.sides):
            name = "" if number else _cut(f"{asked.prompt.key}. {asked.prompt.text}")
            cost = asked.ran[number].cost
            equal = _equal(side, [held for held in found.held if held.asked is asked])
            table.add_row(name, side.letter, equal, *_numbers(cost))
    table.add_section()
    for number, side in enumerate(found.sides):
        which = "" if number else f"total of {len(found.asked)}"
        equal = _equal(side, found.held)
        table.add_row(which, side.letter, equal, *_numbers(total(found.costs(side))))
    return table


def _cut(text: str) -> Text:
    """One line of what somebody wrote."""
    line = printable(text.replace("\n", " "), "")
    short = line if len(line) <= QUESTION else f"{line[: QUESTION - 3]}..."
    return Text(short, no_wrap=True, overflow="crop")


def _equal(side: Side, held: Sequence[PromptComparison]) -> str:
    """How many branches are those of which reference; a reference itself has none."""
    mine = [one for one in held if one.pair.other is side]
    if not mine:
        return "-"
    number = counts([verdict for one in mine for verdict in one.verdicts])
    bad = "!" if number[BranchAnswer.DIFFERENT] else ""
    return f"{bad}{number['equal']}/{number['branches']} ={mine[0].pair.reference.letter}"


def _numbers(cost: Cost) -> tuple[str, ...]:
    return (
        f"{cost.tau_step:.2f}",
        str(cost.target_forwards),
        str(cost.tokens),
        f"{1000 * cost.seconds:.0f}",
        _both(cost, "peak_bytes"),
        _both(cost, "moved"),
        f"{100 * cost.padding_waste:.1f} %",
    )


def _both(cost: Cost, name: str) -> str:
    """A figure of both pools in MB."""
    pools = [pool for pool in (cost.target, cost.drafter) if pool is not None]
    return "+".join(_short(getattr(pool, name) / MB) for pool in pools)


def _short(value: float) -> str:
    """At most four characters for what is below 10000."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _states(side: Side) -> list[str]:
    """States in which something happens, in file order."""
    return [name for name, state in side.job.program.graph.states.items() if state.ops]


def _milliseconds(found: Comparison, states: Sequence[str], lines: box.Box) -> Table:
    table = _table("Milliseconds per state", lines)
    table.add_column("prompt", max_width=QUESTION)
    table.add_column("", no_wrap=True)
    for state in states:
        table.add_column(state.replace("_", "\n"), justify="right", overflow="fold")
    for asked in found.asked:
        for number, side in enumerate(found.sides):
            name = "" if number else _cut(asked.prompt.key)
            table.add_row(name, side.letter, *_spent(asked.ran[number].cost.milliseconds, states))
    table.add_section()
    for number, side in enumerate(found.sides):
        cost = total(found.costs(side))
        table.add_row("" if number else "total", side.letter, *_spent(cost.milliseconds, states))
    table.add_section()
    for number, side in enumerate(found.sides):
        cost = total(found.costs(side))
        each = {s: ratio(ms, cost.visits[s]) for s, ms in cost.milliseconds.items()}
        table.add_row("" if number else "per visit", side.letter, *_spent(each, states, 2))
    return table


def _spent(spent: Mapping[str, float], states: Sequence[str], digits: int = 1) -> Iterator[str]:
    return (f"{spent[s]:.{digits}f}" if s in spent else "" for s in states)


def _moves(found: Comparison) -> Iterator[str]:
    """Where bytes were moved: by what."""
    for side in found.sides:
        cost = total(found.costs(side))
        for name, pool in (("target", cost.target), ("drafter", cost.drafter)):
            if pool is not None and pool.moved:
                yield f"KV moved by {side.letter} in the {name}'s pool: {_causes(pool)}"


def _causes(pool: PoolUse) -> str:
    return ", ".join(
        f"{cause} {size:,} bytes in {pool.moves[cause]} moves"
        for cause, size in pool.moved_bytes.items()
    )


def _equality(found: Comparison) -> Iterator[str]:
    for pair in found.pairs:
        names = f"{pair.other.letter} and {pair.reference.letter}"
        if pair.why_not:
            yield printable(f"{names}: not compared; {pair.why_not}", "")
            continue
        all_of = found.of(pair)
        tokens = counts(all_of)["equal_tokens"]
        note = "" if pair.promised else f" (not promised in {pair.other.job.options.dtype})"
        yield f"{names}: {compared_words(all_of)} ({tokens:,} tokens){note}"


def _differences(found: Comparison) -> Iterator[str]:
    every = found.differences
    for held, verdict in every[:MOST]:
        yield ""
        yield from _difference(held.pair, held.asked, verdict)
    if len(every) > MOST:
        yield f"\n{len(every) - MOST} more; --json has all"


def _difference(pair: GraphPair, asked: ComparedPrompt, verdict: BranchComparison) -> Iterator[str]:
    names = f"{pair.other.letter} and {pair.reference.letter}"
    where = printable(f"{names}, prompt {asked.prompt.key}, branch {verdict.branch}", "")
    found = verdict.difference
    if found is None:
        yield f"{where}: another prompt, though nothing before it differs"
        return
    kind = "numeric tie" if verdict.result is BranchAnswer.TIE else "DIFFERENT"
    yield f"{where}: {kind} at token {found.position + 1}"
    yield f"  behind     ...{_quoted(found.before)}"
    yield f"  {pair.reference.letter} writes   {_token(pair.reference, found.reference)}"
    yield f"  {pair.other.letter} writes   {_token(pair.reference, found.other)}"
    yield f"  {_margin(found)}"


def _quoted(text: str) -> str:
    return '"' + printable(text.replace("\n", "\\n"), "")[-70:] + '"'


def _token(side: Side, token: int) -> str:
    if token in (END, CUT):
        return "nothing: it stopped" if token == END else "nothing: its budget was used up"
    return f"{_quoted(side.session.prompts.decode([token]))} (id {token})"


def _margin(found: Difference) -> str:
    if found.margin is None:
        return "no margin: one answer has no token there"
    how = "below" if found.margin < TIE else "not below"
    return f"margin     {found.margin:.3g} by the target alone, {how} {TIE:g}"
