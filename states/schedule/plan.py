"""What a step does and for whom: decided once, by the op of the state `schedule`."""

from dataclasses import dataclass
from enum import StrEnum


class Does(StrEnum):
    """The one thing that a step does."""

    PARSE = "parse"  # read outlines that are written
    ANSWER = "answer"  # hand over the answers of requests that have ended
    FOLD = "fold"  # combine the finished parts of requests
    OPEN = "open"  # read the prompts of requests, nobody runs
    FORK = "fork"  # read the prompts of branches in a forward of their own
    ROUND = "round"  # draft and verify for everybody who runs; prompts may ride along
    REST = "rest"  # nobody is there


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step of the run, in host integers and ids; the ways out of `schedule` read nothing else.

    number: of the step, from 1. why: the reason for what it does, in words.
    branches: owners of the branches that start. requests: prefix owners of those that begin.
    chunks: prefix owners of requests whose prompts go on, and by how many tokens.
    running: branches that are drafted for and verified.
    waiting: requests that have not begun. held: why the first of all that could start does not.
    preempted: names of branches, and requests, that make way from this step on.
    """

    number: int
    does: Does
    why: str
    branches: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    running: int = 0
    waiting: int = 0
    held: str = ""
    preempted: tuple[str, ...] = ()

    @property
    def starts(self) -> int:
        """How many branches and requests begin, or are read on."""
        return len(self.branches) + len(self.requests) + len(self.chunks)
