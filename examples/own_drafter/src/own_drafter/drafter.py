"""The block `drafter: {kind: echo}`. `specsot check` imports this module: it needs no torch."""

from typing import Literal

from pydantic import Field

from specsot.states.graph.drafter_spec import Drafter
from specsot.states.yaml.spec import Int


class EchoDrafter(Drafter):
    """Its keys are settings of the ops, by name."""

    kind: Literal["echo"]
    nodes: Int = Field(default=4, ge=1, le=64, description="drafted tokens of a chain")

    @property
    def offered(self) -> int:
        return self.nodes

    @property
    def is_chain(self) -> bool:
        return True
