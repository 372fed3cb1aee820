"""The drafter `echo`: it drafts what followed the last token before. Its file needs no torch."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from specsot.states.drafter import Drafter
from specsot.states.graph.drafter_settings import DrafterSettings
from specsot.states.yaml.spec import Int

if TYPE_CHECKING:
    from specsot.ops.types import Proposal
    from specsot.states.request import Branch


class EchoSettings(DrafterSettings):
    """The block `drafter: {kind: echo}` of a graph."""

    kind: Literal["echo"]
    num_draft_tokens: Int = Field(default=4, ge=1, le=64, description="drafted tokens of a chain")

    @property
    def is_chain(self) -> bool:
        return True


class EchoDrafter(Drafter):
    """Needs no model and no KV pool: a frontier is the active branches."""

    Settings = EchoSettings
    settings: EchoSettings

    def grow(self, frontier: "tuple[Branch, ...]") -> "Proposal":
        """Per branch, what followed its last token when it was written or read before."""
        from specsot.ops.draft.proposals import HostTree, pack

        trees = []
        for branch in frontier:
            tokens = tuple(continuation(branch.context(), self.settings.num_draft_tokens))
            depths = tuple(range(1, len(tokens) + 1))
            parents = tuple(depth - 2 for depth in depths)
            trees.append(HostTree(tokens, parents, depths, (0.0,) * len(tokens)))
        return pack(trees, self.context.layout.device)


def continuation(ids: list[int], count: int) -> list[int]:
    """At most `count` tokens behind the last earlier occurrence of the last token."""
    places = [place for place, token in enumerate(ids[:-1]) if token == ids[-1]]
    return ids[places[-1] + 1 :][:count] if places else []
