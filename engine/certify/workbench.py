"""What the checks of a certificate share: the graph with other settings, its models, transformers.

Everything that is certified runs through the ops that the graph resolves to, on the models it was
given; only settings are changed, as `--set` changes them.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...ops.registry import OpTable
from ...states.graph.load import load_program, op_table
from ..bench.sides import SharedModels, Side
from ..prepare.inputs import Prompt
from ..prepare.job import Job
from .reference import Transformers

SHOWN = 5  # differences that are shown


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; figures: what was measured and what it was measured against, by name."""

    name: str
    passed: bool
    figures: Mapping[str, float]
    text: str


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is looked at.

    prompts, tokens: of the greedy runs, and tokens of each branch at most; None for all and for
        what the graph says. generated: prompts whose answers `generate` writes too.
    drawn_prompts, seeds, drawn_tokens: of every setting that is drawn with.
    answers: that are drawn through whole runs. gate_tokens: of each branch in a gate.
    """

    prompts: int | None
    tokens: int | None
    generated: int
    drawn_prompts: int
    seeds: int
    drawn_tokens: int
    answers: int
    gate_tokens: int


FULL = Extent(None, None, 3, 5, 3, 48, 2000, 24)
QUICK = Extent(3, 48, 1, 2, 2, 24, 1000, 16)


@dataclass(frozen=True, slots=True)
class Bench:
    """One graph under test.

    job: the graph as it was given; target, drafter: folders of its models.
    shelf: its models, by dtype. tell: shows what goes on.
    """

    job: Job
    target: Path
    drafter: Path | None
    extent: Extent
    reference: Transformers
    tell: Callable[[str], None]
    shelf: SharedModels = field(default_factory=SharedModels)
    table: OpTable = field(default_factory=op_table)

    @property
    def dtype(self) -> str:
        return self.job.options.dtype

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return self.job.prompts[: self.extent.prompts]

    def changed(self, *sets: str, tokens: int | None = None, **others: Any) -> Job:
        """The graph with other settings. Finished parts that it combines are computed anew.

        Args:
            tokens: the most of each branch; fewer if the graph or the command line says so.
            others: options of `specsot run`.

        Raises:
            GraphError: the graph cannot be so.
        """
        source = deepcopy(self.job.program.source)
        skeleton, options = self.job.program.graph.skeleton, self.job.options
        # A blended fold is an approximation: transformers has nothing to hold it to.
        if skeleton is not None and skeleton.merge == "blend":
            sets = ("skeleton.merge=plain", *sets)
        program = load_program(source, self.table, sets=sets)
        own = options.max_new_tokens or program.graph.limits.max_new_tokens
        most = own if tokens is None else min(own, tokens)
        options = replace(options, max_new_tokens=most, **others)
        return replace(self.job, program=program, options=options)

    def side(self, job: Job, letter: str = "A") -> Side:
        """A job with its models, loaded when they are first asked for; raises ModelError."""
        drafter = self.drafter if job.program.graph.drafter.has_model else None
        return self.shelf.side(letter, job, self.target, drafter)
