"""What is looked at after every phase of a run: its pools, and whether its drafter knows the text.

A stale or misplaced row in the drafter's pool changes no token, it only makes drafts worse, so no
comparison of answers can find it. Here a branch's rows are computed again, by target and drafter
over the branch's ids alone, and held against what the pool has.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...ops.kv.pool import KVCache
from ...states.drafter import Drafter
from ...states.machine import Run
from ...states.request import Branch, Request, Stage
from ..bench.sides import Side
from ..models import Models
from ..pools import new_pool
from ..run.scoring import contexts, full_prefill
from .workbench import SHOWN, Bench, Check

ROWS_OFF = {"float32": 1e-3, "float64": 1e-9}
"""How far a drafter's row may be from the same row computed again."""


@dataclass(slots=True)
class Watch:
    """What was seen of all runs of a certificate, phase by phase.

    wrong: a line for every kind of fault, the first time. worst: of the drafter's rows, how far
    they are off, as a share of the largest number in them.
    """

    runs: int = 0
    phases: int = 0
    forwards: int = 0
    reads: int = 0
    forked: int = 0
    joined: int = 0
    compared: int = 0
    worst: float = 0.0
    wrong: dict[str, str] = field(default_factory=dict)

    def look(self, run: Run) -> None:
        """Pools are consistent, and hold what their branches need: nothing else, nothing less."""
        self.phases += 1
        self.joined += run.state == "continuous_decode"
        book = run.board["branches"]
        target = run.board["kv"]
        for pool in run.board["branches"].pools:
            try:
                pool.check_integrity()
            except AssertionError as error:
                self.wrong.setdefault("integrity", f"{run.state}: {error}")
        if book.beams is not None:
            return  # a search's rows are a tree, which its own tests look at
        expected = sum(_rows(book, one) for one in book.requests) + book.kv_cache.num_cached_rows
        used = target.current_length
        if used != expected:
            self.wrong.setdefault("rows", f"{run.state}: {used} slots in use for {expected} rows")
        for branch in book.active:
            positions = target.position[_slots(book, target, branch)].tolist()
            if sorted(positions) != _positions(branch):
                self.wrong.setdefault("gap", f"{run.state}: {branch.name} has a gap among its rows")


def _rows(book: Any, request: Request) -> int:
    """Rows of the target's pool that a request must have."""
    there = [b for b in request.branches if b.stage is Stage.RUNNING or b.retained]
    own = 0 if request.finished else sum(b.row_count for b in there)
    if request.stage in (Stage.PREFILL, Stage.OUTLINE, Stage.RUNNING, Stage.MERGING):
        own += request.prefix_length * len(book.layout.rows_of(request.prefix_owner))
        own -= request.shared
    if request.stage is Stage.OUTLINE and request.root is not None:
        own += request.root.row_count
    return int(own)


def _positions(branch: Branch) -> list[int]:
    """Of the rows that a branch must see: its prefix's, those of parts that it reads, its own."""
    own = [range(one.start, one.length) for one in (*branch.reads, branch)]
    return sorted(at for some in (range(branch.request.prefix_length), *own) for at in some)


def _slots(book: Any, pool: KVCache, branch: Branch) -> list[int]:
    """Of the committed rows that a branch sees, the prefix's first."""
    (row,) = book.layout.rows_of(branch.owner)
    path = reversed(book.table.segments.lineage(branch.owner))
    return [slot for owner in path for slot in pool.slots_of(owner, row).tolist()]


def pooled_drafters(run: Run) -> list[Drafter]:
    """The drafters of a run that keep rows."""
    return [drafter for drafter in run.board["drafter"].parts if drafter.kv is not None]


def off_by(side: Side, run: Run, drafter: Drafter, branch: Branch) -> float:
    """The largest difference of any number in a branch's rows of a drafter's pool, as a share of
    the largest number; inf if rows are missing or too many.

    Valid right after that drafter read what was committed.
    """
    pool = drafter.kv
    book = run.board["branches"]
    models = side.session.models
    context = dict(contexts(branch.request, side.session.prompts))[branch]
    rows = branch.length + drafter.reads_root
    slots = _slots(book, pool, branch)
    if pool.position[slots].tolist() != list(range(rows)):
        return float("inf")
    with torch.inference_mode():
        fresh = _fresh_rows(models, drafter, [*context, *branch.tokens], rows)
    off = (pool.data[:, :, :, slots] - fresh).abs().max() / fresh.abs().max()
    return float(off.nan_to_num(nan=torch.inf))


def _fresh_rows(models: Models, drafter: Drafter, ids: list[int], rows: int) -> Tensor:
    """[layers, 2, kv_heads, rows, head_dim]: what a drafter keeps of the first rows of a text."""
    kv = new_pool(drafter.model, rows, 1, models)
    taps = getattr(drafter.model, "tap_ids", ())
    features_QF = None
    if taps:
        output, _ = full_prefill(models.target, ids[:rows], models.dtype, models.device, taps)
        features_QF = output.taps_QF
    ids_1Q = torch.tensor([ids[: rows + 1]], device=models.device)
    drafter.write_rows_(ids_1Q, rows, features_QF, kv)
    return kv.data[:, :, :, :rows]


def memory_checks(bench: Bench, watch: Watch) -> Iterator[Check]:
    """What was seen of the pools, phase by phase, in all runs of the gates."""
    wrong = list(watch.wrong.values())
    figures = {"runs": watch.runs, "phases": watch.phases, "faults": len(wrong)}
    text = f"pools and book agree after each of {watch.phases} phases of {watch.runs} runs"
    text += ", and pools are empty at the end"
    yield Check("memory/integrity", not wrong, figures, "; ".join([text, *wrong[:SHOWN]]))
    reads = {"reads": watch.reads, "forwards": watch.forwards}
    text = f"{watch.reads} host reads for {watch.forwards} forwards of the target"
    yield Check("memory/one host read per forward", watch.reads <= watch.forwards, reads, text)
    copied = bench.job.program.graph.layout.kind == "batching" or watch.forked == 0
    text = f"{watch.forked} bytes copied by forks"
    yield Check("memory/forks", copied, {"bytes": watch.forked}, text)
    if watch.compared:
        limit = ROWS_OFF[bench.dtype]
        rows = {"branches": watch.compared, "worst": watch.worst, "tolerance": limit}
        text = f"the drafter's rows of {watch.compared} branches in mid-run, newcomers among them,"
        text += f" are those of their text computed again: at most {watch.worst:.1e} apart"
        yield Check("memory/the drafter's rows", watch.worst <= limit, rows, text)
