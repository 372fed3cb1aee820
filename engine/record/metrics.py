"""The figures of a run, counted from its events. Names and definitions: docs/metrics.md."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from ...ops.layer_plan import blend_flops, prefill_flops
from ...states.blend import BlendState
from ...states.graph.drafter_settings import DrafterSettings
from ...states.machine import Moved, OpRan
from ...states.round import BlendSummary, RoundSummary
from ..chunks.store import ChunkLibrary

NS = 1e9
SCHEMA = 1


@dataclass(slots=True)
class ProbeFigures:
    """A run's probe so far; errors: [L, 2] ||blended - full|| / ||full|| of K and V of every
    prompt, or part of one, with cached rows. kl: KL(full || blended) in nats of the tokens after
    them."""

    rows: int = 0
    errors: list[Tensor] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Means over prompts; None and empty lists if nothing was blended."""
        error_2L = torch.stack(self.errors).mean(0).T.tolist() if self.errors else ([], [])
        return {
            "rows": self.rows,
            "prompts": len(self.errors),
            "draws": len(self.kl),
            "kl": mean(self.kl) if self.kl else None,
            "error_k": error_2L[0],
            "error_v": error_2L[1],
        }


def blend_figures(meter: "Meter", board: Mapping[str, Any]) -> dict[str, Any] | None:
    """The part `blend` of metrics.json, if the graph blends; operations of each part alone."""
    blending: BlendState | None = board["branches"].blend
    if blending is None:
        return None
    forwards = meter.blends
    library = blending.library
    assert isinstance(library, ChunkLibrary)
    shape = board["target"].config
    layers = board["target"].num_layers
    parts = [part for forward in forwards for part in forward.parts]
    flops = sum(blend_flops(shape, layers, blending.settings, *part) for part in parts)
    full = sum(prefill_flops(shape, layers, sum(part)) for part in parts)
    collected = library.made_sizes
    return {
        "plan": list(map(int, forwards[0].plan)) if forwards else None,
        "forwards": len(forwards),
        "reused_rows": sum(forward.reused for forward in forwards),
        "picked_rows": sum(forward.picked[0] for forward in forwards if forward.picked),
        "protected_rows": sum(forward.protected for forward in forwards),
        "suffix_rows": sum(forward.suffix for forward in forwards),
        "flops": flops,
        "flops_full": full,
        "saved_share": 1 - flops / full if full else 0.0,
        "chunks": {
            "hits": library.hits,
            "missed": library.missed,
            "collected": len(collected),
            "collected_rows": sum(collected),
            "collected_flops": sum(prefill_flops(shape, layers, size) for size in collected),
            "collected_milliseconds": library.made_nanos / 1e6,
        },
        **({} if meter.probed is None else {"probe": meter.probed.figures()}),
    }


@dataclass(slots=True)
class Marks:
    """Nanoseconds from the start of the run; None before the event."""

    first_token: int | None = None
    outline: int | None = None
    last_token: int | None = None


@dataclass(slots=True)
class Meter:
    """Counters of a run; host integers only.

    tokens: of all branches and outlines, without stop tokens. in_ops: nanoseconds inside ops;
    in_run: from the first transition to the last; last_move: to it from the start; open_ops: in ops
    after it. lengths: histogram of the tokens that a branch committed in a round; requests: by
    request. chosen: histogram of tree sizes, or chain lengths, that a drafter chose; kinds: rounds
    of each drafter where several take turns."""

    forwards: int = 0
    rounds: int = 0
    rows: int = 0
    padding: int = 0
    draft_forwards: int = 0
    draft_rows: int = 0
    draft_padding: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    most_active: int = 0
    preempted: int = 0
    in_ops: int = 0
    in_run: int = 0
    open_ops: int = 0
    last_move: int = 0
    visits: Counter[str] = field(default_factory=Counter)
    nanos: Counter[str] = field(default_factory=Counter)
    op_nanos: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    chosen: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    requests: dict[str, Counter[int]] = field(default_factory=dict)
    marks: dict[str, Marks] = field(default_factory=dict)
    blends: list[BlendSummary] = field(default_factory=list)
    probed: ProbeFigures | None = None

    @property
    def counts(self) -> dict[str, Any]:
        """What adds up over runs: numbers, and numbers by name."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: n for name, n in values.items() if isinstance(n, int | Counter)}

    @classmethod
    def of(cls, counts: Mapping[str, Any]) -> "Meter":
        """The meter of `counts`, with requests or without, from JSON, whose keys are strings."""
        meter = cls()
        for name in meter.counts.keys() & counts.keys():
            number = counts[name]
            if name in ("lengths", "chosen"):
                number = {int(length): count for length, count in number.items()}
            setattr(meter, name, Counter(number) if isinstance(number, Mapping) else number)
        for key, lengths in counts.get("requests", {}).items():
            meter.requests[key] = Counter({int(length): n for length, n in lengths.items()})
        return meter

    def add(self, other: "Meter") -> None:
        """Add the counters of another run, without its requests and marks."""
        for name, more in other.counts.items():
            if isinstance(more, Counter):
                getattr(self, name).update(more)
            else:
                setattr(self, name, getattr(self, name) + more)

    def op_ran(self, event: OpRan) -> None:
        self.in_ops += event.nanos
        self.open_ops += event.nanos
        self.op_nanos[event.op] += event.nanos

    def moved(self, event: Moved, at: int = 0) -> None:
        self.visits[event.target] += 1
        self.nanos[event.source] += event.nanos
        self.in_run += event.nanos
        self.open_ops = 0
        self.last_move = at

    def forward_done(self, summary: RoundSummary, at: int) -> None:
        """A target forward; at: nanoseconds since the start."""
        self.forwards += 1
        self.rounds += any(count >= 0 for count in summary.accepted)
        self.rows += summary.rows
        self.padding += summary.padding
        self.draft_forwards += summary.work.forwards
        self.draft_rows += summary.work.rows
        self.draft_padding += summary.work.padding
        self.blends += [summary.blend] if summary.blend is not None else []
        for choice in summary.choices if summary.trees else ():
            if choice.kind:
                self.kinds[choice.kind] += 1
            else:
                self.chosen[choice.size] += 1
        self.drafted += summary.drafted
        self.most_active = max(self.most_active, len(summary.branches))
        for name, committed, accepted in zip(
            summary.branches, summary.committed, summary.accepted, strict=True
        ):
            key = name.rpartition("/")[0]
            self.tokens += committed
            marks = self.marks.setdefault(key, Marks())
            if committed:
                marks.last_token = at
                marks.first_token = at if marks.first_token is None else marks.first_token
            if accepted >= 0:
                self.accepted += accepted
                self.lengths[committed] += 1
                self.requests.setdefault(key, Counter())[committed] += 1

    @property
    def tau_step(self) -> float:
        return _mean_length(self.lengths)

    @property
    def acceptance_rate(self) -> float:
        return ratio(self.accepted, self.drafted)

    @property
    def per_forward(self) -> float:
        return ratio(self.tokens, self.forwards)

    @property
    def seconds(self) -> float:
        return (self.in_run + self.open_ops) / NS

    @property
    def overhead_share(self) -> float:
        whole = self.in_run + self.open_ops
        return ratio(whole - self.in_ops, whole)


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _mean_length(lengths: Counter[int]) -> float:
    return ratio(sum(length * count for length, count in lengths.items()), lengths.total())


def counted_figures(meter: Meter) -> dict[str, Any]:
    """The figures of metrics.json that follow from events alone."""
    total = (max(meter.last_move, meter.in_run) + meter.open_ops) / NS
    seconds: dict[str, float | None] = {"total": total}
    for mark in fields(Marks):  # means over the requests that reached a mark
        moments = [getattr(marks, mark.name) for marks in meter.marks.values()]
        reached = [nanos / NS for nanos in moments if nanos is not None]
        seconds[f"to_{mark.name}"] = mean(reached) if reached else None
    by_request = meter.requests.values()
    return {
        "schema_version": SCHEMA,
        "tau_step": meter.tau_step,
        "tau_request": mean(map(_mean_length, by_request)) if by_request else 0.0,
        "acceptance_rate": meter.acceptance_rate,
        "tokens_per_target_forward": meter.per_forward,
        "tokens_per_second": ratio(meter.tokens, meter.seconds),
        "overhead_share": meter.overhead_share,
        "padding_waste": ratio(meter.padding, meter.rows),
        "tokens": meter.tokens,
        "target_forwards": meter.forwards,
        "target_rows": meter.rows,
        "target_rows_empty": meter.padding,
        "drafter_forwards": meter.draft_forwards,
        "drafter_rows": meter.draft_rows,
        "drafter_rows_empty": meter.draft_padding,
        "rounds": meter.rounds,
        "branch_rounds": meter.lengths.total(),
        "drafted": meter.drafted,
        "accepted": meter.accepted,
        "accepted_lengths": {str(k): n for k, n in sorted(meter.lengths.items())},
        "chosen_sizes": {str(k): n for k, n in sorted(meter.chosen.items())},
        **({"chosen_kinds": dict(meter.kinds.most_common())} if meter.kinds else {}),
        "most_active_branches": meter.most_active,
        "preemptions": meter.preempted,
        "seconds": seconds,
        "states": state_figures(meter),
        "ops": {name: nanos / 1e6 for name, nanos in sorted(meter.op_nanos.items())},
    }


def state_figures(meter: Meter) -> dict[str, dict[str, float]]:
    return {
        state: {
            "visits": visits,
            "milliseconds": meter.nanos[state] / 1e6,
            "milliseconds_per_visit": ratio(meter.nanos[state] / 1e6, visits),
        }
        for state, visits in meter.visits.items()
    }


def held_figures(meter: Meter, board: Mapping[str, Any]) -> dict[str, Any]:
    """The other figures of metrics.json: of a run's pools and of its reads of the device."""
    host = board["host"]
    per_round = ratio(host.reads, meter.forwards)
    reuse = None
    if (cache := board["branches"].prefixes) is not None:
        hit_rate = ratio(cache.figures.reused, cache.figures.asked)
        rows = cache.idle + cache.pinned
        reuse = {**asdict(cache.figures), "hit_rate": hit_rate, "kept_rows": rows}
    return {
        "host_reads": {"total": host.reads, "full": host.full_reads, "per_round": per_round},
        "kv": {
            name: None if board[key] is None else _pool_figures(board[key])
            for name, key in (("target", "kv"), ("drafter", "kv_draft"))
        },
        "prefix_cache": reuse,
        "blend": blend_figures(meter, board),
    }


def _pool_figures(pool: Any) -> dict[str, Any]:
    table = pool.blocks
    blocks = {"size": table.size, "count": len(table.references), "peak": table.high_water}
    return {
        "capacity_slots": pool.slots,
        "rows": pool.rows,
        "peak_slots": pool.peak_length,
        "slot_bytes": pool.slot_bytes,
        "peak_bytes": pool.peak_length * pool.slot_bytes,
        "blocks": {**blocks, "peak_wasted_slots": pool.blocks.most_wasted},
        "moved_bytes": dict(pool.ledger.bytes),
        "moves": dict(pool.ledger.moves),
    }


MIN_BRANCH_ROUNDS = 24  # fewer rounds do not allow a conclusion
MIN_TAU = 1.1  # tau_step below which drafts do not help
DRAFT_STATES = ("expand_root", "grow_tree")
VERIFY_STATES = ("verify", "continuous_decode")
SIZES = ("num_draft_tokens", "gamma")  # settings of a drafter that limit its drafts
MODEL_CAUSES = (
    "likely it was trained for another model or on other texts, or its rope base, a norm or its "
    "tokenizer is not the one it was trained with"
)


def drafter_warnings(metrics: Mapping[str, Any], drafter: DrafterSettings) -> list[str]:
    """If the drafter does not help; none without drafts, with few rounds, or if several take turns.
    A plain round costs at most as much as one that verifies a tree, so a run is
    slower than its own plain rounds at least if drafting costs more than the saved tokens."""
    rounds = metrics["branch_rounds"]
    tau = metrics["tau_step"]
    if not metrics["drafted"] or rounds < MIN_BRANCH_ROUNDS or "chosen_kinds" in metrics:
        return []
    if tau < MIN_TAU:
        causes = MODEL_CAUSES if drafter.has_model else "likely the text repeats too little"
        return [f"the drafter does not help: tau_step {tau:.2f} in {rounds} rounds; {causes}"]
    draft, verify = (
        sum(metrics["states"].get(name, {}).get("milliseconds", 0.0) for name in names)
        for names in (DRAFT_STATES, VERIFY_STATES)
    )
    if draft <= (tau - 1) * verify:
        return []
    size = next((name for name in SIZES if hasattr(drafter, name)), None)
    fewer = f"draft fewer tokens (--set drafter.{size}=N) or " if size else ""
    return [
        f"drafting costs more than it saves: {draft:.0f} ms of drafting, {verify:.0f} ms of "
        f"verifying at tau_step {tau:.2f}; "
        f"{fewer}omit the drafter (--set drafter.kind=none)"
    ]
