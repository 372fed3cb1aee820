"""Small ops and guards without torch: a counter that drafts, verifies and ends."""

from specsot.ops.registry import guard, op


@op("toy.open", writes="rows")
def open_(counter: dict[str, int]) -> list[int]:
    return [counter["n"]]


@op("toy.draft", writes="proposal")
def draft(rows: list[int], *, top_k: int, levels: int, extra: int = 0) -> list[int]:
    """A chain of `levels`."""
    return list(range(levels + extra))


@op("toy.verify_", writes="accepted committed", drops="proposal", commits=True)
def verify_(counter: dict[str, int], proposal: list[int]) -> tuple[int, int]:
    counter["n"] += 1
    return len(proposal), counter["n"]


@op("toy.peek", writes="seen")
def peek(rows: list[int]) -> int:
    return len(rows)


@op("toy.cut", writes="proposal")
def cut(proposal: list[int]) -> list[int]:
    """An update: the proposal without its last token."""
    return proposal[:-1]


@op("toy.place_", writes="batch rows")
def place_(counter: dict[str, int]) -> tuple[int, list[int]]:
    return counter["n"], [counter["n"]]


@op("toy.look", writes="seen")
def look(batch: int) -> int:
    return batch


@op("toy.commit_", drops="batch", commits=True)
def commit_(counter: dict[str, int], batch: int) -> None: ...


@op("toy.say", writes="said")
def say(counter: dict[str, int], *, word: str = "", times: int | None = None) -> str:
    return word * (times or 1)


@op("toy.attend")
def attend(counter: dict[str, int], *, attention: str, name: str = "") -> None: ...


@op("toy.fail")
def fail(counter: dict[str, int]) -> None:
    raise ValueError("toy failure")


@op("toy.two", writes="a b")
def two(counter: dict[str, int]) -> tuple[int, int, int]:
    """Wrong on purpose: three results for two keys."""
    return 1, 2, 3


@op("toy.loud")
def loud(counter: dict[str, int]) -> int:
    """Wrong on purpose: a result that nobody asked for."""
    return 1


@op("toy.outline", needs="skeleton")
def outline(counter: dict[str, int], *, max_branches: int) -> None: ...


@guard("toy_done")
def toy_done(counter: dict[str, int]) -> bool:
    return counter["n"] >= 3


@guard("toy_any")
def toy_any(counter: dict[str, int]) -> list[int]:  # truthy, but not a bool
    return [0] * counter["n"]


@guard("toy_accepted")
def toy_accepted(accepted: int) -> bool:
    return accepted > 99


@guard("toy_never")
def toy_never(counter: dict[str, int]) -> bool:
    return False


@guard("toy_breaks")
def toy_breaks(counter: dict[str, int]) -> bool:
    return counter["missing"] > 0
