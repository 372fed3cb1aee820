"""Teacher forcing: one forward of transformers over context and answer says what must stand there.

If the best token behind every beginning of the answer is the answer's next one, then decoding
token by token writes this answer: by induction, the same as running it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from torch import Tensor

from ...states.request import Branch, Finish, Request
from ...states.sampling import rules_of
from ..bench.equal import END, TIE
from ..bench.sides import Side
from ..run.scoring import context_segments, contexts, match_scores
from .workbench import SHOWN, Bench, Check, Transformers, grammar_of

Repeat = Callable[[], bool]
"""Whether all is as it must be when the same is done in float64."""


def number_of(number: int, word: str, ending: str = "s") -> str:
    """A number with its word."""
    return f"{number} {word}{'' if number == 1 else ending}"


@dataclass(slots=True)
class TeacherTally:
    """Holds answers to transformers' reading of the target in one dtype, and counts them.

    refused: branches. wrong: a line for each that differs or never ended.
    """

    reference: Transformers
    dtype: str
    prompts: int = 0
    branches: int = 0
    tokens: int = 0
    ties: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, float]:
        names = ("prompts", "branches", "tokens", "ties", "refused")
        return {**{name: getattr(self, name) for name in names}, "differences": len(self.wrong)}

    @property
    def words(self) -> str:
        text = f"{self.tokens} tokens in {number_of(self.branches, 'branch', 'es')}"
        text += f" of {number_of(self.prompts, 'request')}"
        text += f", {number_of(self.ties, 'numeric tie')}" if self.ties else ""
        text += f", {number_of(self.refused, 'refusal')}" if self.refused else ""
        return "; ".join([text, *self.wrong[:SHOWN]])

    @property
    def good(self) -> bool:
        """Everything fits, and there was something that could have failed to."""
        return not self.wrong and self.tokens > 0

    def check(self, name: str, title: str, more: str = "", **figures: float) -> Check:
        """What came of it; more: words at its end."""
        return Check(name, self.good, {**self.figures, **figures}, f"{title}: {self.words}{more}")

    def hold(self, side: Side, request: Request, repeat: Repeat | None) -> None:
        """Every branch that was decoded, the outline's first.

        Args:
            repeat: called at a numeric tie; None where there can be none.
        """
        self.prompts += 1
        for branch in request.all_branches():
            if branch.finish in (None, Finish.CANCELLED):
                self.wrong.append(f"{branch.name} never ended")
            self.refused += branch.finish is Finish.REFUSED
        for branch, context in contexts(request, side.session.prompts):
            if branch.finish in (Finish.STOP, Finish.LENGTH):
                self.hold_branch(branch, context, repeat)

    def hold_branch(self, branch: Branch, context: Sequence[int], repeat: Repeat | None) -> None:
        """One answer; a numeric tie is counted, anything else that differs is a fault."""
        self.branches += 1
        self.tokens += len(branch.tokens)
        fault = self.first_wrong(branch, context)
        if fault is None:
            return
        text, margin = fault
        if repeat is not None and margin is not None and margin < TIE and repeat():
            self.ties += 1
        else:
            shown = "" if margin is None else f" (margin {margin:.1e})"
            self.wrong.append(f"{branch.name}: {text}{shown}")

    def first_wrong(
        self, branch: Branch, context: Sequence[int]
    ) -> tuple[str, float | None] | None:
        """What is wrong first, and by how much the target prefers another token."""
        stops = branch.request.stop_ids
        for place, token in enumerate(branch.tokens, 1):
            if token in stops:
                return f"the stop token {token} stands inside the answer at {place}", None
        answer = [*branch.tokens, *([END] if branch.finish is Finish.STOP else [])]
        if branch.finish is Finish.LENGTH and len(answer) != branch.budget:
            return f"{len(answer)} tokens, the budget is {branch.budget}", None
        ids = [*context, *branch.tokens]
        logits_QV = self.reference.logits(ids, self.dtype, context_segments(branch))
        logits_QV = logits_QV[len(context) - 1 :]
        # An answer that left its grammar has fewer places than tokens.
        places = zip(answer, _own_tokens(branch, context, logits_QV), strict=False)
        for place, (token, (own, order_V)) in enumerate(places, 1):
            if token != (END if own in stops else own):
                name = "the end" if token == END else str(token)
                score = order_V[sorted(stops)].max() if token == END else order_V[token]
                text = f"token {place} is {name}, the target says {own}"
                return text, float(order_V[own] - score)
        return None


def repeat_in_float64(
    bench: Bench, rerun: Callable[[], Iterable[tuple[Side, Request]]]
) -> Repeat | None:
    """What a numeric tie needs: the same run in float64 holds to transformers in float64.

    Args:
        rerun: runs it, at the first tie, once. None in float64, where nothing may differ.
    """

    @cache
    def repeat() -> bool:
        tally = TeacherTally(bench.reference, "float64")
        for side, request in rerun():
            tally.hold(side, request, None)
        return tally.good

    return None if bench.dtype == "float64" else repeat


def _own_tokens(
    branch: Branch, context: Sequence[int], logits_QV: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """For each place of an answer: the token that the target says there, and what decides on it.

    Under a grammar it is the best legal one. Ends where the answer leaves the grammar.

    Args:
        logits_QV: behind the context and each token of the answer.
    """
    if branch.matcher is None and rules_of(branch).plain:
        yield from zip(logits_QV.argmax(-1).tolist(), logits_QV, strict=True)
        return
    matcher = grammar_of(branch)
    for place, logits_V in enumerate(logits_QV):
        order_V = match_scores(logits_V, branch, context, place)
        own = int(order_V.argmax())
        if matcher is not None:
            order = order_V.argsort(descending=True, stable=True).tolist()
            own = next(token for token in order if matcher.is_legal(token))
        yield own, order_V
        if matcher is not None and place < len(branch.tokens):
            if not matcher.is_legal(branch.tokens[place]):
                return
            matcher.advance(branch.tokens[place])
