"""Drafts from the longest earlier occurrences of a branch's last tokens, in any text of an engine
(SuffixDecoding; Oliaro et al., 2024, 2411.04975).

An index has the places of each pair of tokens; how far a place agrees with the branch before the
pair is compared when it is looked up, so matches have any length and the index is small. No
torch."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import log
from operator import itemgetter

from .ngram import Gram, HostTree, best_tree

PAIR = 2  # tokens of the shortest match
FAR = 24  # tokens that are compared at most
PRIOR = 4.0  # imagined trials of every length


@dataclass(frozen=True, slots=True)
class Place:
    """The index of the token after an occurrence in a text, and how many tokens agree before."""

    text: int
    at: int
    length: int


def _trials() -> list[float]:
    return [PRIOR] * (FAR + 1)


def _hits() -> list[float]:
    return [PRIOR * length / (length + 2.0) for length in range(FAR + 1)]


@dataclass(slots=True)
class SuffixTexts:
    """Texts of at most `most` tokens in all, without the oldest; `recent` places of each pair.

    tried, hits: by the length of the longest match, how often some match was followed by the
    branch's next token."""

    most: int
    recent: int = 32
    texts: dict[int, list[int]] = field(default_factory=dict)
    size: int = 0
    places: dict[Gram, deque[tuple[int, int]]] = field(default_factory=dict)
    tried: list[float] = field(default_factory=_trials)
    hits: list[float] = field(default_factory=_hits)
    _number: int = 0

    def open_(self, before: Sequence[int] = ()) -> int:
        """A new text, whose first tokens are another text's: they are compared, but not found."""
        self._number += 1
        self.texts[self._number] = [*before]
        self.size += len(before)
        return self._number

    def append_(self, text: int, tokens: Sequence[int]) -> None:
        """Append to a text; one that was forgotten stays forgotten."""
        ids = self.texts.get(text)
        if ids is None:
            return
        for token in tokens:
            ids.append(token)
            self._enter_(text, len(ids))
        self.size += len(tokens)
        if self.size > self.most:
            self._forget_()

    def _enter_(self, text: int, end: int) -> None:
        pair = tuple(self.texts[text][max(end - PAIR, 0) : end])
        if len(pair) == PAIR:
            self.places.setdefault(pair, deque(maxlen=self.recent)).append((text, end))

    def _forget_(self) -> None:
        """Drop the oldest texts, half of all tokens, and index the others again."""
        while len(self.texts) > 1 and self.size > self.most // 2:
            self.size -= len(self.texts.pop(next(iter(self.texts))))
        self.places = {}
        for text, ids in self.texts.items():
            for end in range(PAIR, len(ids) + 1):
                self._enter_(text, end)

    def matches(self, ids: Sequence[int]) -> list[Place]:
        """The places after earlier occurrences of the last tokens: the longest, and those at least
        half as long; of equals the latest first."""
        found = []
        for text, end in reversed(self.places.get(tuple(ids[-PAIR:]), ())):
            earlier = self.texts[text]
            if end < len(earlier):
                most = min(FAR, len(ids), end)
                length = PAIR
                while length < most and earlier[end - length - 1] == ids[-length - 1]:
                    length += 1
                found.append(Place(text, end, length))
        longest = max((place.length for place in found), default=0)
        near = [place for place in found if 2 * place.length > longest]
        return sorted(near, key=lambda place: -place.length)

    def chance(self, length: int) -> float:
        length = min(length, FAR)
        return self.hits[length] / self.tried[length]

    def expected(self, matches: Sequence[Place], levels: int) -> float:
        """About how many tokens a round with drafts of so many levels gives after these matches: as
        if the longest one continued alone after the first level."""
        if not matches or not levels:
            return 1.0
        place = matches[0]
        token = self.texts[place.text][place.at]
        like = [each.length for each in matches if self.texts[each.text][each.at] == token]
        total = sum([each.length for each in matches])
        tokens = 1.0
        chance = sum(like) / total
        for depth in range(levels):
            chance *= self.chance(place.length + depth)
            tokens += chance
        return tokens + (1 - sum(like) / total) * self.chance(place.length)

    def kept(self, matches: Sequence[Place]) -> list[Place]:
        """Those whose text has not been forgotten since."""
        return [place for place in matches if place.text in self.texts]

    def count_(self, matches: Sequence[Place], token: int) -> None:
        """The branch's next token after matches."""
        if matches:
            length = matches[0].length
            self.tried[length] += 1
            found = [self.texts[place.text][place.at] for place in self.kept(matches)]
            self.hits[length] += token in found


def suffix_tree(
    texts: SuffixTexts,
    matches: Sequence[Place],
    *,
    nodes: int,
    levels: int,
    stop_ids: Collection[int] = (),
) -> HostTree:
    """What followed the matches, as the tree of the `nodes` most probable paths: a token's share of
    its parent's matches, weighted by their lengths, times the chance that one of them is right. No
    stop token, nor anything after one, is drafted."""

    def offers(through: Sequence[Place], depth: int) -> list[tuple[float, int, list[Place]]]:
        following: dict[int, list[Place]] = {}
        for place in through:
            ids = texts.texts[place.text]
            if place.at + depth <= len(ids) and ids[place.at + depth - 1] not in stop_ids:
                following.setdefault(ids[place.at + depth - 1], []).append(place)
        total = sum(place.length for place in through)
        offered = []
        for token, some in following.items():
            chance = texts.chance(some[0].length + depth - 1)
            share = sum(place.length for place in some) / total
            offered.append((-log(chance * share), token, some))
        return sorted(offered, key=itemgetter(0))

    return best_tree([*matches], offers, nodes=nodes, levels=levels)
