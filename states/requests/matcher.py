"""What holds a branch to a grammar."""

from typing import Protocol


class Matcher(Protocol):
    """A grammar's state in one root branch; `states.grammar` has the real one."""

    def is_legal(self, token: int) -> bool: ...
    def advance(self, token: int) -> None: ...
    def forced(self) -> list[int]: ...
