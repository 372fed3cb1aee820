"""The block `layout` of a graph: how branches lie in tensors and in the pools."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from ..yaml.spec import Count, Int, Spec

Order = Literal["fcfs", "longest_first", "shortest_first"]


class LayoutBlock(Spec):
    """What all layouts have."""

    kv_slots: Int = Field(
        4096,
        ge=8,
        le=1 << 24,
        description="slots of each row of the target's pool; only batching has more than one row: "
        "max_num_branches",
    )
    max_num_branches: Count = Field(8, description="branches of all requests decoded at once")
    order: Order = Field(
        "fcfs",
        description="which waiting branch of a request starts next: in reading order, or by the "
        "lengths that the outline expects",
    )


class BlocksLayout(LayoutBlock):
    """What layouts have whose branches share one pool."""

    block_size: Int = Field(
        1,
        ge=1,
        le=1024,
        description="slots of a block of the pools: a segment takes whole blocks, and shares them",
    )


class BimBlock(BlocksLayout):
    """All branches in one sequence, told apart by their branch index (BIM)."""

    kind: Literal["bim"]


class BatchingBlock(LayoutBlock):
    """A row of a batch for each branch, the prefix copied into every row but the first."""

    kind: Literal["batching"]


class PagedBlock(BlocksLayout):
    """A row of a batch for each branch; the prefix lies in the pool once, and all refer to it."""

    kind: Literal["paged"]


AnyLayout = Annotated[BimBlock | BatchingBlock | PagedBlock, Field(discriminator="kind")]
LAYOUTS: Mapping[str, type[Spec]] = {
    "bim": BimBlock,
    "batching": BatchingBlock,
    "paged": PagedBlock,
}
