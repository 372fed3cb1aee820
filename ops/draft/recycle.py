"""Drafts from the target's own earlier candidates, without a model (Token Recycling; Luo et al.,
ACL 2025, 2408.08696).

A table has the best tokens that the target gave after a context, over the rows of all forwards,
whether they were accepted or not. A context is the last two tokens of a text, the last one, or
none: what is common in any place. Half of the mass of a context is that of its last row, a quarter
that of the row before. The mass that no row has taken yet is that of the shorter context. No
torch."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from operator import itemgetter

from .ngram import Gram, HostTree, best_tree

SHARES = 0.01, 0.5, 0.5  # of its mass that a new row takes, by the length of the context
CONTEXT = len(SHARES) - 1  # tokens of the longest context
COMMON = 64  # tokens that are kept for the context of no token
LEAST = 0.002  # a path of a lower chance is not drafted

Path = tuple[float, Gram]
"""Its chance, and the context after it."""


def best(chances: Mapping[int, float], most: int | None = None) -> dict[int, float]:
    """The tokens by falling chance, all or the first `most`."""
    return dict(sorted(chances.items(), key=itemgetter(1), reverse=True)[:most])


@dataclass(slots=True)
class Known:
    """The chances of the tokens that may follow a context, best first. rest: the mass that no row
    has taken."""

    chances: dict[int, float] = field(default_factory=dict)
    rest: float = 1.0

    def mix_(self, chances: Mapping[int, float], share: float, most: int) -> None:
        """A new row, best first, takes a share of the mass; the best `most` tokens are kept."""
        kept = 1.0 - share
        mixed = {token: share * chance for token, chance in chances.items()}
        if self.chances:
            for token, chance in self.chances.items():
                mixed[token] = mixed.get(token, 0.0) + kept * chance
            mixed = best(mixed, most)
        self.chances = mixed
        self.rest *= kept


@dataclass(slots=True)
class RecycleTable:
    """`width` candidates of each of at most `most` contexts, those that were written last."""

    most: int
    width: int
    known: dict[Gram, Known] = field(default_factory=dict)

    def put_(self, context: Gram, chances: Mapping[int, float], *, accepted: bool = True) -> None:
        """A row of at most `width` tokens, best first, after a context of up to CONTEXT tokens, and
        so after its last ones. A rejected row does not count for the context of no token."""
        for size in range(0 if accepted else 1, len(context) + 1):
            gram = context[len(context) - size :]
            known = self.known.pop(gram, None) or Known()
            known.mix_(chances, SHARES[size], self.width if size else COMMON)
            self.known[gram] = known  # the last one of the dictionary is new
        while len(self.known) > self.most:
            del self.known[next(iter(self.known))]

    def guess_(self, context: Gram, rows: Sequence[tuple[float, Mapping[int, float]]]) -> None:
        """A new context of CONTEXT tokens has the mean of the rows after other tokens in its place;
        each row with its weight."""
        if context not in self.known and rows:
            total = sum(weight for weight, _ in rows)
            mean: dict[int, float] = {}
            for weight, chances in rows:
                for token, chance in chances.items():
                    mean[token] = mean.get(token, 0.0) + weight / total * chance
            self.known[context] = Known()
            self.known[context].mix_(best(mean, self.width), SHARES[CONTEXT], self.width)

    def read_(self, ids: Sequence[int]) -> None:
        """A text that the target did not write: each of its tokens is the one candidate."""
        for end in range(1, len(ids)):
            self.put_(tuple(ids[max(end - CONTEXT, 0) : end]), {ids[end]: 1.0})

    def following(self, context: Gram, chance: float) -> dict[int, float]:
        """The tokens after a context of a chance, with theirs, best first; none below LEAST."""
        found: dict[int, float] = {}
        for size in range(len(context), -1, -1):
            known = self.known.get(context[len(context) - size :])
            if known is not None and chance >= LEAST:
                for token, share in known.chances.items():
                    if chance * share < LEAST:
                        break
                    found[token] = found.get(token, 0.0) + chance * share
                chance *= known.rest
        return best(found)


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

    def offers(path: Path, depth: int) -> Iterator[tuple[float, int, Path]]:
        above, context = path
        for token, chance in table.following(context, above).items():
            if token not in stop_ids:
                after = (*context, token)[-CONTEXT:]
                yield log(above / chance), token, (chance, after)

    return best_tree((1.0, context), offers, nodes=nodes, levels=levels)
