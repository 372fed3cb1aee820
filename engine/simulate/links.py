"""What the links between workers cost: seconds of collectives, as NCCL's own model counts them.

A collective takes a constant, a delay for each of its steps round the ring, and its bytes over the
bandwidth. Where the numbers come from stands in docs/cluster_simulated.md.
"""

import re
from dataclasses import dataclass

from ...models.config import DecoderConfig
from ..errors import UsageError
from .costs import StepCost


@dataclass(frozen=True, slots=True)
class Link:
    """base: seconds of any collective; hop: of each step; bandwidth: bytes a second, one way."""

    name: str
    base: float
    hop: float
    bandwidth: float

    def all_reduce(self, size: int, ranks: int) -> float:
        """Seconds to add up so many bytes of each rank."""
        if ranks == 1:
            return 0.0
        share = 2 * (ranks - 1)
        return self.base + share * self.hop + share / ranks * size / self.bandwidth

    def all_gather(self, size: int, ranks: int) -> float:
        """Seconds until every rank has the parts of all, so many bytes together."""
        if ranks == 1:
            return 0.0
        return self.base + (ranks - 1) * (self.hop + size / ranks / self.bandwidth)

    def send(self, size: int) -> float:
        """Seconds of so many bytes from one worker to another."""
        return self.base + self.hop + size / self.bandwidth


LINKS = {
    link.name: link
    for link in (
        Link("loopback", 0.0, 0.9e-3, 0.32e9),
        Link("10gbe", 0.0, 25e-6, 1.25e9),
        Link("100gbe", 3.6e-6, 2.7e-6, 12.5e9),
        Link("nvlink", 3.6e-6, 0.47e-6, 450e9),
    )
}


def link_of(text: str) -> Link:
    """`loopback`, `10gbe`, `100gbe`, `nvlink`, or microseconds a step and GB/s, as in `25:1.25`.

    Raises:
        UsageError: it is none of these.
    """
    if text in LINKS:
        return LINKS[text]
    numbers = re.fullmatch(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", text)
    if numbers is None or float(numbers[2]) == 0:
        raise UsageError(f"--link {text}: {', '.join(LINKS)}, or MICROSECONDS:GB_PER_SECOND")
    return Link(text, 0.0, float(numbers[1]) / 1e6, float(numbers[2]) * 1e9)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a target is moved: numbers of a row between two layers, bytes of a token's keys and
    values, rows of the head, bytes of a number."""

    layers: int
    hidden: int
    kv_bytes: int
    vocabulary: int
    itemsize: int = 4

    @classmethod
    def of(cls, config: DecoderConfig, itemsize: int) -> "ModelShape":
        """That of a checkpoint."""
        kv_bytes = 2 * config.num_layers * config.kv_heads * config.head_dim * itemsize
        sizes = (config.num_layers, config.hidden_size, kv_bytes, config.vocab_size)
        return cls(*sizes, itemsize)


SHAPES = {
    "llama-8b": ModelShape(32, 4096, 2 * 32 * 8 * 128 * 2, 128256, 2),
    "llama-70b": ModelShape(80, 8192, 2 * 80 * 8 * 128 * 2, 128256, 2),
}


@dataclass(frozen=True, slots=True)
class GroupCost(StepCost):
    """Steps of a tensor-parallel group: a rank has its part of a forward, two sums a layer and one
    gather of the logits come on top. What a drafter takes every rank does for itself."""

    ranks: int = 1
    link: Link = LINKS["nvlink"]
    shape: ModelShape = SHAPES["llama-8b"]
    tree: int = 1

    @classmethod
    def of_steps(
        cls, cost: StepCost, ranks: int, link: Link, shape: ModelShape, tree: int
    ) -> "GroupCost":
        """Those of steps that one worker would take so long for.

        Args:
            tree: rows of a branch in a round, all of which have logits.
        """
        own = (cost.step, cost.forward, cost.row, cost.branch, cost.slot, cost.tokens)
        return cls(*own, cost.error, cost.steps, ranks, link, shape, tree)

    def seconds(self, rows: int, branches: int, slots: int) -> float:
        if not rows:
            return self.step / 1e3
        work = (self.forward + self.row * rows + self.slot * slots) / self.ranks
        talk = self.talk(rows, max(branches * self.tree, 1))
        return (self.step + work + self.branch * branches) / 1e3 + talk

    def talk(self, rows: int, drawn: int) -> float:
        """Seconds of a forward's collectives; `drawn` of its rows have logits."""
        shape = self.shape
        size = self.shape.itemsize
        layer = self.link.all_reduce(rows * shape.hidden * size, self.ranks)
        logits = self.link.all_gather(drawn * shape.vocabulary * size, self.ranks)
        return 2 * shape.layers * layer + logits
