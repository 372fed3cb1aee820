"""The graph on workers of a cluster: what they write together is held to transformers, too."""

from collections.abc import Iterator, Sequence
from typing import Any

from ...states.request import Request
from ..bench.sides import Side
from ..cluster.on_workers import on_workers
from ..prepare.inputs import Prompt
from ..workers.start import divided
from .teacher import TeacherTally, number_of
from .texts import FIRST_SEED, GREEDY, MATCH, repeated
from .workbench import Bench, Check


def worker_checks(bench: Bench) -> Iterator[Check]:
    """Greedy, and sampled with one seed; all prompts at once.

    Raises:
        ClusterError: the workers cannot begin, or are lost.
    """
    heat = bench.job.program.graph.sampling.temperature or 1.0
    sampled = (*MATCH, f"sampling.temperature={heat}")
    extent = bench.extent
    prompts = [*bench.prompts[: bench.extent.drawn_prompts]]
    # One whose prefix is long enough to be brought to others instead of being read by each.
    prompts.append(Prompt("long", " ".join(one.text for one in bench.prompts)))
    for name, sets in {"greedy": (GREEDY,), f"temperature {heat:g}": sampled}.items():
        bench.tell(f"on workers, {name} ...")
        job = bench.changed(*sets, tokens=extent.drawn_tokens, seed=FIRST_SEED)
        side = bench.side(job)
        tally = TeacherTally(bench.reference, bench.dtype)
        requests, figures = _answered(side, prompts)
        for prompt, request in zip(prompts, requests, strict=True):
            tally.hold(side, request, repeated(bench, side, prompt))
        title = f"{name}, transformers, token by token"
        moved = figures["regroup"]["bytes"]
        lost = figures["lost"]
        more = f"; {moved} bytes of prefixes brought, {number_of(lost, 'worker')} lost"
        counted = {"workers": len(figures["workers"]), "regroup_bytes": moved, "lost": lost}
        yield tally.check(f"workers/{name}", title, more, **counted)


def _answered(side: Side, prompts: Sequence[Prompt]) -> tuple[list[Request], dict[str, Any]]:
    """What workers have written, and `cluster` of its metrics."""
    with on_workers(divided(side.job)) as (session, directed):
        run, recorder = directed(session, prompts, None)
        while run.step():
            pass
        return run.board["branches"].requests, recorder.figures(run.board)["cluster"]
