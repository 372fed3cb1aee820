"""What a peer has written as a request of ours, and what it took as our figures."""

from collections import Counter
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from ...states.request import Branch, Finish, Request, move
from ..bench.costs import Cost, Moments
from ..record.metrics import Marks, Meter


@dataclass
class Steps:
    """A streamer of transformers: when tokens came, and how many at once."""

    began: int = field(default_factory=perf_counter_ns)
    times: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    _prompt: bool = True

    def put(self, value: Any) -> None:
        if self._prompt:
            self._prompt = False
            return
        self.times.append(perf_counter_ns() - self.began)
        self.counts.append(value.numel())

    def end(self) -> None:
        """Nothing is left over."""


def answered(request: Request, written: list[int], most: int) -> None:
    """Make it a request that one branch has answered."""
    stopped = bool(written) and written[-1] in request.stop_ids
    branch = Branch(request, 0, 0, most, prompt=request.tail)
    branch.tokens = written[:-1] if stopped else written
    branch.end(Finish.STOP if stopped else Finish.LENGTH)
    request.branches = [branch]
    move(request, "run")
    move(request, "finish")


def cost_of(steps: Steps, whole: int, request: Request, drafts: bool) -> Cost:
    """Its figures under our names; the stop token is not counted."""
    (branch,) = request.branches
    counts = [*steps.counts]
    times = steps.times
    counts[-1] -= branch.finish is Finish.STOP
    lengths = Counter(counts if drafts else counts[1:])
    meter = Meter(forwards=len(counts), rounds=lengths.total(), tokens=sum(counts), lengths=lengths)
    meter.in_run = meter.in_ops = whole
    meter.marks[request.key] = Marks(times[0], None, times[-1])
    return Cost(meter, {}, Moments(times[0], times[-1], sum(counts[1:])))
