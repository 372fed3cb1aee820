"""Samples of the corpus as token ids."""

from __future__ import annotations

from collections.abc import Callable

from specsot.engine.train.data import Source, Tokens

from .corpus import Corpus
from .pieces import Pieces, Sample

Encode = Callable[[str], list[int]]


def corpus_source(corpus: Corpus, encode: Encode) -> Source:
    """The samples of a corpus as ids."""

    def sample(index: int) -> Tokens:
        return encode_sample(corpus.sample(index), encode)

    return sample


def encode_sample(sample: Sample, encode: Encode) -> Tokens:
    """The ids of trunk and branches; every branch continues at the trunk's end."""
    out = Tokens([], [], [], [])
    _append(out, sample.trunk, 0, 0, encode)
    end = len(out.ids)
    for segment, pieces in enumerate(sample.branches, 1):
        _append(out, pieces, segment, end, encode)
    return out


def _append(out: Tokens, pieces: Pieces, segment: int, position: int, encode: Encode) -> None:
    first = len(out.ids)
    for piece in pieces:
        ids = encode(piece.text)
        out.ids += ids
        out.weights += [piece.weight] * len(ids)
    added = len(out.ids) - first
    out.segments += [segment] * added
    out.positions += range(position, position + added)
    if added:
        out.weights[first] = 0.0
