"""The settings of one request, as a client or another engine sets them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..ops.sampling.settings import SamplingRules
from ..states.request import MigratedRequest


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Settings of one request; the defaults leave everything to the graph.

    token_ids: the whole prompt, without a template or an outline.
    skeleton: False for one plain answer, whatever the graph does.
    stop_ids: more ids that end an answer. ignore_eos: none ends it but these;
        an outline ends all the same.
    schema: a JSON schema, as JSON, that constrains a plain answer.
    contexts: events report the context of each branch.
    handed: the part of a migrated request that this engine decodes.
    resumed: tokens that another engine wrote, by branch index; -1 is the outline."""

    sampling: SamplingRules | None = None
    token_ids: tuple[int, ...] = ()
    skeleton: bool = True
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    schema: str | None = None
    contexts: bool = False
    handed: MigratedRequest | None = None
    resumed: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether the request never has an outline."""
        return bool(self.token_ids) or not self.skeleton or self.schema is not None


AS_THE_GRAPH = RequestSettings()
