"""What a branch sees of the token ids before its answer, where that is not all of them in one row.

A branch that combines parts where they lie (`merge: attend`) stands behind several texts that have
not seen each other. They are listed one after another, each with its position and those before it
that it sees, so that anybody can compute the same with a mask.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...states.request import Branch


@dataclass(frozen=True, slots=True)
class ContextSegment:
    """So many token ids in a row. position: of the first one; sees: the segments before it, by
    their numbers, whose ids it sees beside its own. An answer goes on in the last segment."""

    tokens: int
    position: int
    sees: tuple[int, ...] = ()


Segments = Sequence[ContextSegment]
"""Of a whole context; none where it is one text."""


def context_segments(branch: Branch) -> tuple[ContextSegment, ...]:
    """The prefix, the parts that it reads, its own prompt; nothing where it reads no parts."""
    if not branch.reads:
        return ()
    first = ContextSegment(len(branch.request.context), 0)
    parts = [ContextSegment(one.own, one.start, (0,)) for one in branch.reads]
    own = ContextSegment(len(branch.prompt), branch.start, tuple(range(len(parts) + 1)))
    return first, *parts, own


def segments_from(document: Iterable[Sequence[object]]) -> tuple[ContextSegment, ...]:
    """As `outputs.jsonl` has them: [tokens, position, [sees]]; raises TypeError, ValueError."""
    segments = []
    for at, (tokens, position, sees) in enumerate(document):
        if not (isinstance(tokens, int) and isinstance(position, int) and isinstance(sees, list)):
            raise TypeError("a segment is no [tokens, position, [segments before it]]")
        if tokens < 0 or position < 0 or not all(type(n) is int and 0 <= n < at for n in sees):
            raise ValueError("a segment has a number that cannot be")
        segments.append(ContextSegment(tokens, position, tuple(sees)))
    return tuple(segments)


def visible(segments: Segments, count: int) -> tuple[Tensor, Tensor]:
    """Of `count` ids, the last ones of which go on in the last segment: int64 [Q] their positions,
    and bool [Q, Q], which ones each of them sees."""
    sizes = [one.tokens for one in segments]
    sizes[-1] += count - sum(sizes)
    if sizes[-1] < segments[-1].tokens:
        raise ValueError(f"{count} ids are not those of the segments")
    positions_Q = torch.cat(
        [torch.arange(n) + one.position for n, one in zip(sizes, segments, strict=True)]
    )
    sees_SS = torch.eye(len(segments), dtype=torch.bool)
    for at, one in enumerate(segments):
        sees_SS[at, list(one.sees)] = True
    number_Q = torch.repeat_interleave(torch.tensor(sizes))
    behind_QQ = positions_Q[:, None] >= positions_Q[None]
    return positions_Q, sees_SS[number_Q][:, number_Q] & behind_QQ
