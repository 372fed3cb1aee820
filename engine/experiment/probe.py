"""How far blended prefills are from full ones, in a pass of its own: no clock runs meanwhile."""

from collections.abc import Sequence
from statistics import mean

from ..bench.sides import Side
from ..prepare.inputs import Prompt
from ..run.blend_probe import probe_blends
from ..run.runner import StopSignal, drive, recorded


def probe_all(
    sides: Sequence[Side], prompts: Sequence[Prompt], halt: StopSignal
) -> dict[str, float]:
    """KL(full || blended) of first tokens, in nats, by the letters of the sides that blend."""
    found = {side.letter: _divergences(side, prompts, halt) for side in sides if _blends(side)}
    return {letter: mean(own) for letter, own in found.items() if own}


def _blends(side: Side) -> bool:
    return side.peer is None and side.job.program.graph.blend is not None


def _divergences(side: Side, prompts: Sequence[Prompt], halt: StopSignal) -> list[float]:
    found: list[float] = []
    for prompt in prompts:
        if halt.status is not None:
            return []
        run, recorder = recorded(side.session, [prompt], None)
        probed = probe_blends(run)
        drive(run, recorder, max_rounds=side.job.program.graph.limits.max_rounds, stop=halt)
        found += probed.kl
        run.close()
    return found
