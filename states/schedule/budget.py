"""`scheduler.max_tokens`: which prompts a forward has rows for, and how far a long one is read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..requests.admission import Intake
from ..requests.branch import Branch, Request, Stage

LEAST = 8  # tokens that are read in a step at least, however many rows the trees take


@dataclass(slots=True)
class Portion:
    """Who starts within the budget, and which prompts go on; what does not fit waits."""

    branches: list[Branch] = field(default_factory=list)
    opened: list[Request] = field(default_factory=list)
    chunks: list[tuple[Request, int]] = field(default_factory=list)

    def add(self, item: Branch | Request) -> None:
        """Somebody starts."""
        if isinstance(item, Branch):
            self.branches.append(item)
        else:
            self.opened.append(item)


def portion(intake: Intake, reading: Sequence[Request], rows: int, most: int | None) -> Portion:
    """Of all that could start, what has rows in the next forward.

    Prompts that are half read come first, then branches, then new requests. One that fits into what
    is left is read to its end, the next one as far as it goes. One that cannot be cut (documents
    that are reused stand in it) is read alone.

    Args:
        reading: open requests whose prompts are half read. rows: of the trees in that forward.
        most: rows of a forward; None for no limit.
    """
    if most is None:
        return Portion(intake.branches, intake.opened)
    found = Portion()
    left = max(most - rows, LEAST)
    known = {id(request) for request in reading}
    first = [one for one in intake.opened if id(one) in known]
    for request in (one for one in reading if one not in first):  # no place for its branch yet
        if (count := min(_cut(request), left)) > 0:
            found.chunks.append((request, count))
            left -= count
    later = [one for one in intake.opened if id(one) not in known]
    items: list[Branch | Request] = [*first, *intake.branches, *later]
    for item in items:
        if left <= 0:
            break
        cost = _cost(item)
        most_cut = _cut(item)
        if cost <= left or (not most_cut and not (found.branches or found.opened or found.chunks)):
            found.add(item)
        elif isinstance(item, Request) and most_cut:
            found.chunks.append((item, min(left, most_cut)))
            cost = left
        else:
            break
        left -= cost
    return found


def _cost(item: Branch | Request) -> int:
    """Rows of a prompt."""
    if isinstance(item, Request):
        return item.unread
    return len(item.rows) + len(item.request.hoist)


def _cut(item: Branch | Request) -> int:
    """Tokens of a prompt that can be read before its first branch begins; 0: all or nothing."""
    if isinstance(item, Branch) or item.body.chunks or item.tail.chunks:
        return 0
    if item.first is not None:
        return item.body_size - item.prefix_length
    if item.given is not None:
        return len(item.prefix) - item.prefix_length
    return max(item.prompt_size - 1 - item.prefix_length, 0)


def half_read(requests: Sequence[Request]) -> list[Request]:
    """Open requests whose prompts are read in chunks."""
    return [one for one in requests if one.stage is Stage.PREFILL]
