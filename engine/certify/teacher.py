"""Teacher forcing: one forward of transformers over context and answer says what must stand there.

If the best token behind every beginning of the answer is the answer's next one, then decoding
token by token writes this answer: by induction, the same as running it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache

from torch import Tensor

from ...states.requests.branch import Branch, Finish, Request
from ...states.requests.samplers import rules_of
from ..bench.equal import END, TIE
from ..bench.sides import Side
from ..run.contexts import contexts, order_of
from .reference import Transformers
from .workbench import Bench

SHOWN = 5  # differences that are shown

Repeat = Callable[[], bool]
"""Whether all is as it must be when the same is done in float64."""


def number_of(number: int, one: str, more: str) -> str:
    """A number with its word."""
    return f"{number} {one if number == 1 else more}"


@dataclass(slots=True)
class TeacherTally:
    """What was held to transformers.

    refused: branches. wrong: a line for each that differs or never ended.
    """

    prompts: int = 0
    branches: int = 0
    tokens: int = 0
    ties: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, float]:
        figures = asdict(self)
        wrong = figures.pop("wrong")
        return {**figures, "differences": len(wrong)}

    @property
    def words(self) -> str:
        text = f"{self.tokens} tokens in {number_of(self.branches, 'branch', 'branches')}"
        text += f" of {number_of(self.prompts, 'request', 'requests')}"
        text += f", {number_of(self.ties, 'numeric tie', 'numeric ties')}" if self.ties else ""
        text += f", {number_of(self.refused, 'refusal', 'refusals')}" if self.refused else ""
        return "; ".join([text, *self.wrong[:SHOWN]])

    @property
    def good(self) -> bool:
        """Everything fits, and there was something that could have failed to."""
        return not self.wrong and self.tokens > 0


@dataclass(frozen=True, slots=True)
class TeacherForcing:
    """Holds answers to transformers' reading of the target, in one dtype."""

    reference: Transformers
    dtype: str

    def hold(
        self, side: Side, request: Request, tally: TeacherTally, repeat: Repeat | None
    ) -> None:
        """Every branch that was decoded, the outline's first.

        Args:
            repeat: called at a numeric tie; None where there can be none.
        """
        tally.prompts += 1
        for branch in request.all_branches():
            if branch.finish in (None, Finish.CANCELLED):
                tally.wrong.append(f"{branch.name} never ended")
            tally.refused += branch.finish is Finish.REFUSED
        for branch, context in contexts(request, side.session.prompts):
            if branch.finish in (Finish.STOP, Finish.LENGTH):
                self.hold_branch(branch, context, tally, repeat)

    def hold_branch(
        self, branch: Branch, context: Sequence[int], tally: TeacherTally, repeat: Repeat | None
    ) -> None:
        """One answer; a numeric tie is counted, anything else that differs is a fault."""
        tally.branches += 1
        tally.tokens += len(branch.tokens)
        fault = self.first_wrong(branch, context)
        if fault is None:
            return
        text, margin = fault
        if repeat is not None and margin is not None and margin < TIE and repeat():
            tally.ties += 1
        else:
            shown = "" if margin is None else f" (margin {margin:.1e})"
            tally.wrong.append(f"{branch.name}: {text}{shown}")

    def first_wrong(
        self, branch: Branch, context: Sequence[int]
    ) -> tuple[str, float | None] | None:
        """What is wrong first, and by how much the target prefers another token."""
        answer = [*branch.tokens, *([END] if branch.finish is Finish.STOP else [])]
        stops = sorted(branch.request.stop_ids)
        for place, token in enumerate(branch.tokens):
            if token in branch.request.stop_ids:
                return f"the stop token {token} stands inside the answer at {place + 1}", None
        if branch.finish is Finish.LENGTH and len(answer) != branch.budget:
            return f"{len(answer)} tokens, the budget is {branch.budget}", None
        ids = [*context, *branch.tokens]
        logits_QV = self.reference.logits(ids, self.dtype)[len(context) - 1 :]
        # An answer that left its grammar has fewer places than tokens.
        for place, (token, (own, order_V)) in enumerate(
            zip(answer, own_tokens(branch, context, logits_QV), strict=False), 1
        ):
            if token != (END if own in branch.request.stop_ids else own):
                name = "the end" if token == END else str(token)
                score = order_V[stops].max() if token == END else order_V[token]
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
        teacher, tally = TeacherForcing(bench.reference, "float64"), TeacherTally()
        for side, request in rerun():
            teacher.hold(side, request, tally, None)
        return tally.good

    return None if bench.dtype == "float64" else repeat


def own_tokens(
    branch: Branch, context: Sequence[int], logits_QV: Tensor
) -> list[tuple[int, Tensor]]:
    """For each place of an answer: the token that the target says there, and what decides on it.

    Under a grammar it is the best legal one. Ends where the answer leaves the grammar.

    Args:
        logits_QV: behind the context and each token of the answer.
    """
    if branch.matcher is None and rules_of(branch).plain:
        return list(zip(logits_QV.argmax(-1).tolist(), logits_QV, strict=True))
    make = branch.request.new_matcher
    matcher = make() if make is not None and branch.matcher is not None else None
    tokens: list[tuple[int, Tensor]] = []
    for place, logits_V in enumerate(logits_QV):
        order_V = order_of(logits_V, branch, context, place)
        own = int(order_V.argmax())
        if matcher is not None:
            order = order_V.argsort(descending=True, stable=True).tolist()
            own = next(token for token in order if matcher.is_legal(token))
        tokens.append((own, order_V))
        if place == len(branch.tokens):
            break
        if matcher is not None:
            if not matcher.is_legal(branch.tokens[place]):
                break
            matcher.advance(branch.tokens[place])
    return tokens
