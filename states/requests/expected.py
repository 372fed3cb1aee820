"""How long texts get: what admission reserves of the pool for them."""

from .branch import Branch, Finish, Request

BRANCH_PROMPT = 64  # slots of the prompt of a request's first branch, before any is known
AT_FIRST = 2  # half the budget is expected before any text has ended
MEMORY = 8  # texts that the mean remembers


class Expected:
    """Under reserved admission every text may need its whole budget. Under optimistic admission a
    part is expected to be as long as its outline says, other texts, and the prompts of parts that
    no outline names yet, as long as those before them; whoever has been preempted reserves
    everything, so that it is not soon again.
    """

    def __init__(self, *, optimistic: bool) -> None:
        self.optimistic = optimistic
        self._mean: dict[str, float] = {}  # of outlines, of answers, of prompts of parts

    def of(self, branch: Branch) -> int:
        """Tokens that are reserved for a branch: what it has written at least."""
        if not self.optimistic or branch.preempted:
            return branch.budget
        if branch.point is not None:
            return min(branch.budget, max(branch.point.length, len(branch.tokens)))
        guess = self._guess(branch.budget, _kind(branch))
        return min(branch.budget, max(guess, len(branch.tokens)))

    def of_new(self, request: Request) -> tuple[int, int]:
        """The same of a request that has no branch yet: for its outline, and its first branch."""
        if not self.optimistic:
            return request.outline_budget, request.budget
        outline = self._guess(request.outline_budget, "outline")
        return outline, self._guess(request.budget, "answer")

    def of_first(self, request: Request) -> int:
        """Tokens that are reserved for a request's first part, its prompt with them, before an
        outline names it."""
        prompt = self._mean.get("prompt", BRANCH_PROMPT) if self.optimistic else BRANCH_PROMPT
        return self.of_new(request)[1] + round(prompt)

    def _guess(self, budget: int, kind: str) -> int:
        mean = self._mean.get(kind)
        return min(budget, -(-budget // AT_FIRST) if mean is None else round(mean) + 1)

    def learn(self, branch: Branch) -> None:
        """A branch that has just ended, or goes on."""
        if branch.finish in (Finish.STOP, Finish.LENGTH):
            self._take(_kind(branch), len(branch.tokens))
            if branch.point is not None:
                self._take("prompt", len(branch.prompt))

    def _take(self, kind: str, length: int) -> None:
        before = self._mean.get(kind, length)
        self._mean[kind] = before + (length - before) / MEMORY


def _kind(branch: Branch) -> str:
    return "outline" if branch.is_root else "answer"
