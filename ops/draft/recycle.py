"""Drafts from the target's own earlier candidates, without a model (Token Recycling; Luo et al.,
ACL 2025, 2408.08696).

A table has the best tokens that the target gave after a context when a forward last had a row of
it, whether that row was accepted or not. A context is the last two tokens of a text, or the last
one where these two are new. The chance of a candidate is learned from the probability that it
had. No torch."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from .ngram import Gram, HostTree, best_tree
from .reliability import STEP, Reliability

CONTEXT = 2  # tokens of the longest context
READ = 1  # the bucket of a token that follows in a text that the target did not write

Known = tuple[tuple[int, ...], tuple[int, ...]]
"""Candidates, best first, and the bucket of each one's log-probability, see `Reliability`."""


def _reliabilities() -> tuple[Reliability, ...]:
    return tuple(Reliability() for _ in range(CONTEXT))


@dataclass(slots=True)
class RecycleTable:
    """The candidates of at most `most` contexts, those that were written last. reliabilities: of
    contexts of one token, and of two."""

    most: int
    known: dict[Gram, Known] = field(default_factory=dict)
    reliabilities: tuple[Reliability, ...] = field(default_factory=_reliabilities)

    def find(self, context: Gram) -> tuple[int, Known]:
        """The tokens of the longest known context, and its candidates; 0 and none if none is."""
        for size in range(len(context), 0, -1):
            found = self.known.get(context[-size:])
            if found is not None:
                return size, found
        return 0, ((), ())

    def put_(self, context: Gram, known: Known, *, accepted: bool = True) -> None:
        """Replace the candidates after a context of CONTEXT tokens, and after its last token; a
        rejected row does not replace those of a longer context."""
        for size in range(1, len(context) + 1):
            gram = context[-size:]
            if accepted or size == 1 or gram not in self.known:
                self.known.pop(gram, None)  # the last one of the dictionary is new
                self.known[gram] = known
        while len(self.known) > self.most:
            del self.known[next(iter(self.known))]

    def read_(self, ids: Sequence[int], width: int) -> None:
        """A text that the target did not write: each token becomes the first candidate."""
        for end in range(1, len(ids)):
            context = tuple(ids[max(end - CONTEXT, 0) : end])
            tokens, buckets = self.find(context)[1]
            kept = [at for at, token in enumerate(tokens) if token != ids[end]][: width - 1]
            known = (ids[end], *(tokens[at] for at in kept)), (READ, *(buckets[at] for at in kept))
            self.put_(context, known)

    def count_(self, context: Gram, token: int) -> None:
        """The target's token after a context, before its candidates are replaced."""
        size, (tokens, buckets) = self.find(context)
        for candidate, bucket in zip(tokens, buckets, strict=True):
            self.reliabilities[size - 1].count_(-STEP * (bucket + 0.5), candidate == token)


def recycled_tree(
    table: RecycleTable,
    context: Gram,
    *,
    nodes: int,
    levels: int,
    stop_ids: Collection[int] = (),
) -> HostTree:
    """The `nodes` most probable continuations of a context, of equals the first; no stop token, nor
    anything after one, is drafted."""
    losses = [reliability.losses for reliability in table.reliabilities]

    def offers(context: Gram, depth: int) -> Iterator[tuple[float, int, Gram]]:
        size, (tokens, buckets) = table.find(context)
        for token, bucket in zip(tokens, buckets, strict=True):
            if token not in stop_ids:
                yield losses[size - 1][bucket], token, (*context, token)[-CONTEXT:]

    return best_tree(context, offers, nodes=nodes, levels=levels)
