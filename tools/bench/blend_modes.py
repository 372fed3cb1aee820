"""What `bench_blend.py` compares: the ways of one prefill, as sessions of the shipped graph."""

from dataclasses import dataclass
from typing import Any

from specsot.engine.chunks.store import ChunkStore
from specsot.engine.models import Models
from specsot.engine.prepare.files import open_graph
from specsot.engine.run.session import Session
from specsot.ops.layer_plan import BlendSettings
from specsot.states.machine import Run

GRAPH = "blend_eagle"
FULL = "1"


@dataclass(frozen=True, slots=True)
class Mode:
    """`reuse`, or a ratio of the plan `blend`; ratio 1 is a full prefill, as in any run."""

    name: str

    @property
    def settings(self) -> BlendSettings:
        """As the graph's block has them, with no smallest number of rows."""
        if self.name == "reuse":
            return BlendSettings(plan="reuse", min_tokens=0)
        return BlendSettings(plan="blend", ratios=(float(self.name),), min_tokens=0)

    @property
    def sets(self) -> tuple[str, ...]:
        """The same as `--set` of `specsot run` takes them."""
        settings = self.settings
        plan = (f"blend.plan={settings.plan}", "blend.min_tokens=0")
        return (*plan, f"blend.ratios=[{settings.ratios[0]}]") if self.name != "reuse" else plan


def modes_of(ratios: list[float]) -> tuple[Mode, ...]:
    """Reuse, the ratios increasing, and 1, which all others are compared with."""
    inner = sorted({ratio for ratio in ratios if 0 <= ratio < 1})
    return (Mode("reuse"), *(Mode(f"{ratio:g}") for ratio in inner), Mode(FULL))


def session_of(
    mode: Mode,
    models: Models,
    chunks: ChunkStore,
    *sets: str,
    prompts: Any = None,
) -> Session:
    """A session that finds its chunks in this store, and keeps there those that it does not."""
    program = open_graph(GRAPH, (*mode.sets, *sets))
    return Session(program, models, prompts=prompts, chunks=chunks)


def collected(run: Run) -> int:
    """How many chunks a run had to read alone."""
    return len(run.board["branches"].blend.library.made_sizes)
