"""What one request asks for instead of what the graph says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...ops.sampling.settings import SamplingRules
from ...states.migrated_request import MigratedRequest


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Settings of one request; the defaults leave everything to the graph.

    Attributes:
        sampling: how its tokens are drawn.
        token_ids: the whole prompt; nothing is put around it, and there is no outline.
        skeleton: False for one plain answer, whatever the graph does.
        stop_ids: more ids that end an answer. ignore_eos: none ends it but these;
            an outline ends all the same.
        schema: a JSON schema, as JSON, that a plain answer is held to.
        contexts: whoever follows it is told what each branch stands behind.
        handed: the part of it that is done here, if others do the rest.
        begun: what is written of it elsewhere: tokens of branches by index, the outline's at -1.
    """

    sampling: SamplingRules | None = None
    token_ids: tuple[int, ...] = ()
    skeleton: bool = True
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    schema: str | None = None
    contexts: bool = False
    handed: MigratedRequest | None = None
    begun: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether there is no outline in any case."""
        return bool(self.token_ids) or not self.skeleton or self.schema is not None


@dataclass(frozen=True, slots=True)
class Fit:
    """A prompt's tokens, how many a plain answer behind it may have at most, and why prompt and
    budget can never fit; nothing if they can."""

    prompt: int
    room: int
    why: str


AS_THE_GRAPH = RequestSettings()
