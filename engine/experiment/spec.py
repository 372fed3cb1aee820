"""What an experiment's file may say: sides, what varies, prompts, repeats, figures."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ...states.yaml.spec import Count, Int, Name, Spec, Text
from ..prepare.options import Budget, Device, Dtype, Kept, Seed, Threads

Repeats = Annotated[Int, Field(ge=1, le=1000)]
PARTS = "parts"  # a path that no graph has: so many parts of a given outline
DEFAULT = ("speedup_decode", "speedup_ttlt", "tokens", "tau_step", "kv_held_mb")


class Reported(Spec):
    """What somebody else measured. source: the paper or the code, with table or section."""

    source: Text
    says: Text


class Plot(Spec):
    """One picture. x: a path of `vary`; without it a bar for each side."""

    y: Text
    x: Text | None = None


class ExperimentOptions(Spec):
    """Options of `specsot run`, for all sides; those of the command line win."""

    profile: Text | None = None
    model: Text | None = None
    drafter_model: Text | None = None
    seed: Seed | None = None
    device: Device | None = None
    dtype: Dtype | None = None
    weights: Kept | None = None
    threads: Threads | None = None
    max_new_tokens: Budget | None = None


class Experiment(Spec):
    """An experiment.

    Every side runs at every point of `vary`; those of `against` run once, as they are. Ratios are
    taken to the first of `against`, without one to the first side: at its first point, or
    (`pairing: point`) where the same values stand.
    """

    version: Literal[1] = 1
    name: Name
    doc: Text = Field(description="what it shows, in a line")
    reproduces: Text = Field("", description="what of the papers or seeds")
    reported: tuple[Reported, ...] = Field((), description="what the original says, and where")
    sides: tuple[Text, ...] = Field(
        min_length=1, description="graphs, GRAPH@PATH=VALUE,..., or hf, hf-assisted, hf-lookup"
    )
    against: tuple[Text, ...] = Field((), description="more of them, which do not vary")
    vary: dict[Text, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(
        default_factory=dict, description="values by setting; `parts`: parts of a given outline"
    )
    pairing: Literal["first", "point"] = Field(
        "first", description="whether ratios are to one row, or to the first side at each point"
    )
    set: Mapping[Text, Any] = Field(default_factory=dict, description="settings of all graphs")
    options: ExperimentOptions = ExperimentOptions()
    prompts: Text = Field("ten", description="ten, hard, documents, or a file beside this one")
    count: Count | None = Field(None, description="only so many of the prompts")
    repeats: Repeats = Field(3, description="of every prompt")
    figures: tuple[Text, ...] = Field(DEFAULT, description="those that tables show")
    plots: tuple[Plot, ...] = ()
    probe: bool = Field(False, description="also compare what is blended with full prefills")
