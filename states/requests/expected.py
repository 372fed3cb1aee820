"""How long texts get: what admission reserves of the pool for them."""

from .branch import Branch, Finish, Request

AT_FIRST = 2  # half the budget is expected before any text has ended
MEMORY = 8  # texts that the mean remembers


class Expected:
    """Under reserved admission every text may need its whole budget. Under optimistic admission a
    part is expected to be as long as its outline says, other texts as long as those before them;
    whoever has been preempted reserves everything, so that it is not soon again.
    """

    def __init__(self, *, optimistic: bool) -> None:
        self.optimistic = optimistic
        self._mean: dict[bool, float] = {}  # of outlines, of answers

    def of(self, branch: Branch) -> int:
        """Tokens that are reserved for a branch: what it has written at least."""
        if not self.optimistic or branch.preempted:
            return branch.budget
        if branch.point is not None:
            return min(branch.budget, max(branch.point.length, len(branch.tokens)))
        guess = self._guess(branch.budget, outline=branch.is_root)
        return min(branch.budget, max(guess, len(branch.tokens)))

    def of_new(self, request: Request) -> tuple[int, int]:
        """The same of a request that has no branch yet: for its outline, and its first branch."""
        if not self.optimistic:
            return request.outline_budget, request.budget
        outline = self._guess(request.outline_budget, outline=True)
        return outline, self._guess(request.budget, outline=False)

    def _guess(self, budget: int, *, outline: bool) -> int:
        mean = self._mean.get(outline)
        return min(budget, -(-budget // AT_FIRST) if mean is None else round(mean) + 1)

    def learn(self, branch: Branch) -> None:
        """A branch that has just ended, or goes on."""
        if branch.finish in (Finish.STOP, Finish.LENGTH):
            length, before = len(branch.tokens), self._mean.get(branch.is_root)
            mean = length if before is None else before + (length - before) / MEMORY
            self._mean[branch.is_root] = mean
