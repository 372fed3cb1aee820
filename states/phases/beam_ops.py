"""The ops of a beam search that know the book: its beams as rows, who sees what, what is kept."""

from torch import Tensor

from ...ops.attention.masks import build
from ...ops.beam import Chosen, Searches, reveal_
from ...ops.host import HostReader
from ...ops.kv.pool import KVCache
from ...ops.registry import op
from ...ops.types import Proposal, Rows, Visibility
from ..requests.beam import BeamManager
from ..requests.branch import RoundSummary


@op("beam.expand", writes="proposal", needs="beam")
def expand(branches: BeamManager) -> Proposal:
    """The last token of every live beam, as the rows of the next forward."""
    return branches.offer()


@op("beam.mask", writes="visible", drops="proposal", needs="beam")
def mask(branches: BeamManager, rows: Rows, kv: KVCache) -> Visibility:
    """As `mask.build`; and every beam sees the rows of its own hypothesis, no other one's."""
    visible = build(rows, kv)
    if rows.trees:
        reveal_(visible, rows, kv.capacity, branches.lineage())
    return visible


@op("beam.gather", writes="searches", needs="beam")
def gather(branches: BeamManager, rows: Rows) -> Searches:
    """What is known of every search in these rows; those that begin have one beam."""
    return branches.known()


@op(
    "beam.commit_",
    writes="committed",
    drops="rows logits features blended searches chosen",
    commits=True,
    needs="beam",
)
def commit_(
    branches: BeamManager,
    host: HostReader,
    rows: Rows,
    logits: Tensor,
    features: Tensor | None,
    searches: Searches,
    chosen: Chosen,
) -> RoundSummary:
    """The step's one host read: beams that live on keep their rows, searches that are over end."""
    return branches.commit_beams_(host, chosen)
