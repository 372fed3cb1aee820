"""`--step`: halt before each transition and show where the run is and what it holds."""

from collections.abc import Callable, Iterator
from typing import TextIO

from ...ops.kv.pool import KVCache
from ...states.graph.program import Program
from ...states.machine import START, Run
from ...states.manager.manager import BranchStateManager
from ...states.requests.branch import Stage
from ...states.trace import describe

HELP = "[Enter] one step, [c] to the end, [q] quit > "


def open_ways(program: Program, run: Run) -> Iterator[tuple[str, str, bool]]:
    """(target, guard or '', whether it is open now) of every transition out of the current state.

    The first open one is the one that `advance` takes.
    """
    if run.state == START:
        yield program.graph.initial, "", True
    for edge in program.graph.edges_from(run.state):
        guard = program.guards[edge.when] if edge.when is not None else None
        is_open = guard is None or bool(guard.load()(*[run.board[key] for key in guard.reads]))
        yield edge.to, edge.when or "", is_open


def picture(program: Program, run: Run) -> str:
    """The state, the ways out of it, the blackboard's keys and shapes."""
    lines = [f"step {run.steps}  state {run.state}"]
    arrow = "=>"  # of the first open way, which will be taken
    for target, guard, is_open in open_ways(program, run):
        mark = arrow if is_open else " x"
        arrow = " >" if is_open else arrow
        lines.append(f"  {mark} {target}{f'  when {guard}' if guard else ''}")
    width = max(map(len, run.board))
    lines += [f"     {key.ljust(width)}  {_short(value)}" for key, value in run.board.items()]
    return "\n".join(lines)


def _short(value: object, longest: int = 160) -> str:
    """One line about a value; the book and the pools say how full they are."""
    if isinstance(value, BranchStateManager):
        waiting = sum(b.stage is Stage.WAITING for r in value.requests for b in r.branches)
        text = f"{len(value.requests)} requests, {len(value.active)} active, {waiting} waiting"
    elif isinstance(value, KVCache):
        text = f"{describe(value.data)}, {value.current_length}/{value.capacity} slots in use"
    else:
        text = describe(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


class Stepper:
    """The pause of a stepped run; a line of `source` is one answer, its end means go on."""

    def __init__(self, program: Program, source: TextIO, out: Callable[[str], None]) -> None:
        self.program, self.source, self.out = program, source, out
        self.free = False

    def __call__(self, run: Run) -> bool:
        """Whether the run goes on."""
        if self.free:
            return True
        self.out(picture(self.program, run) + "\n")
        while True:
            self.out(HELP)
            line = self.source.readline()
            answer = line.strip().lower()
            if not line or answer == "c":
                self.free = True
                return True
            if answer in ("", "q"):
                return answer == ""
