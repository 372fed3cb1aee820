"""What the checks of a certificate share: a graph with other settings, its models, transformers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.files import ModelError
from ...models.load.reference import as_reference
from ...ops.registry import OpTable
from ...states.graph.graph import Graph
from ...states.graph.load import load_program, op_table
from ...states.request import Branch, Finish, Request
from ...states.sampling import rules_of
from ...states.yaml.source import number_of
from ..bench.sides import END, TIE, ComparedPrompt, SharedModels, Side, answer_all
from ..errors import first_line
from ..prepare.inputs import Prompt
from ..prepare.job import Job
from ..run.core import StopSignal
from ..run.scoring import Segments, context_segments, contexts, match_scores, visible

SHOWN = 5  # differences that are shown


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    figures: Mapping[str, float]
    text: str


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is checked; None for all prompts, and for the graph's tokens of each branch.
    generated: prompts whose answers `generate` writes too. drawn_*, seeds: of every setting that is
    drawn with. answers: drawn through whole runs. gate_tokens: of each branch in a gate."""

    prompts: int | None
    tokens: int | None
    generated: int
    drawn_prompts: int
    seeds: int
    drawn_tokens: int
    answers: int
    gate_tokens: int


FULL = Extent(None, None, 3, 5, seeds=3, drawn_tokens=48, answers=2000, gate_tokens=24)
QUICK = Extent(3, 48, 1, 2, seeds=2, drawn_tokens=24, answers=1000, gate_tokens=16)


@dataclass(frozen=True, slots=True)
class Transformers:
    """A checkpoint in transformers, loaded once for each dtype, quantised as the target."""

    folder: Path
    device: str
    weights: str = "full"
    _loaded: dict[str, Any] = field(default_factory=dict)

    def model(self, dtype: str) -> Any:
        """Raises ModelError: transformers cannot load it."""
        if dtype not in self._loaded:
            try:
                model = as_reference(self.folder, getattr(torch, dtype), self.weights)
            except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
                reason = "transformers cannot load it, so there is no reference: "
                raise ModelError(self.folder, reason + first_line(error)) from None
            self._loaded[dtype] = model.to(self.device)
        return self._loaded[dtype]

    def logits(self, ids: Sequence[int], dtype: str, segments: Segments = ()) -> Tensor:
        """Logits [Q, V] after each of these ids, from one forward; causal without segments."""
        model = self.model(dtype)
        ids_1Q = torch.tensor([list(ids)], device=self.device)
        options = _options(model, segments, len(ids)) if segments else {}
        with torch.inference_mode():
            logits: Tensor = model(ids_1Q, use_cache=False, **options).logits[0]
        return logits

    def generate(
        self, branch: Branch, context: Sequence[int], dtype: str, **beams: Any
    ) -> tuple[list[int], float | None]:
        """What `generate` writes under a branch's grammar, stop token included; a beam's score."""
        ids_1Q = torch.tensor([list(context)], device=self.device)
        grammar = _grammar_of(branch)

        def legal_only(written_1Q: Tensor, scores_1V: Tensor) -> Tensor:
            for token in written_1Q[0, len(context) + grammar.consumed :].tolist():
                grammar.advance(token)
            legal_V = torch.from_numpy(grammar.legal_mask()).to(scores_1V.device)
            return scores_1V.masked_fill(~legal_V, -torch.inf)

        with torch.inference_mode():
            output = self.model(dtype).generate(
                ids_1Q,
                attention_mask=torch.ones_like(ids_1Q),
                do_sample=False,
                max_new_tokens=branch.budget,
                eos_token_id=sorted(branch.request.stop_ids) or None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
                logits_processor=[] if grammar is None else [legal_only],
                **beams,
            )
        scores = getattr(output, "sequences_scores", None)
        tokens = output.sequences[0, len(context) :].tolist()
        return tokens, None if scores is None else float(scores[0])


def _options(model: Any, segments: Segments, count: int) -> dict[str, Any]:
    """Positions, and a mask [1, 1, Q, Q] added to scores; one for each kind of layer."""
    positions_Q, mask_QQ = (tensor.to(model.device) for tensor in visible(segments, count))
    window = getattr(model.config, "sliding_window", None) or count + int(positions_Q.max())
    near_QQ = mask_QQ & (positions_Q[:, None] - positions_Q[None] < window)

    def added(seen_QQ: Tensor) -> Tensor:
        none_QQ = torch.zeros(seen_QQ.shape, dtype=model.dtype, device=model.device)
        return none_QQ.masked_fill(~seen_QQ, torch.finfo(model.dtype).min)[None, None]

    types = getattr(model.config, "layer_types", None)
    mask: Any = added(near_QQ if types is None else mask_QQ)  # without types all layers are alike
    if types is not None and "sliding_attention" in types:
        mask = {"full_attention": added(mask_QQ), "sliding_attention": added(near_QQ)}
    return {"position_ids": positions_Q[None], "attention_mask": mask}


def _grammar_of(branch: Branch) -> Any:
    """What an answer was written under (an OutlineMatcher), at its beginning, or None."""
    new = branch.request.new_matcher
    return new() if new is not None and branch.matcher is not None else None


@dataclass(frozen=True, slots=True)
class Bench:
    """One graph under test, its target in transformers, the folder of its drafter."""

    job: Job
    reference: Transformers
    drafter: Path | None
    extent: Extent
    tell: Callable[[str], None]
    shelf: SharedModels = field(default_factory=SharedModels)
    table: OpTable = field(default_factory=op_table)

    @property
    def dtype(self) -> str:
        return self.job.options.dtype

    @property
    def graph(self) -> Graph:
        return self.job.program.graph

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return self.job.prompts[: self.extent.prompts]

    @property
    def drawn_prompts(self) -> tuple[Prompt, ...]:
        return self.prompts[: self.extent.drawn_prompts]

    def changed(self, *sets: str, tokens: int | None = None, **others: Any) -> Job:
        """The graph with other settings, at most these tokens of each branch, and other options of
        `specsot run`; raises GraphError. Finished parts that it combines are computed anew."""
        options = self.job.options
        # A blended fold is an approximation: transformers has nothing to hold it to.
        if self.graph.skeleton is not None and self.graph.skeleton.merge == "blend":
            sets = ("skeleton.merge=plain", *sets)
        program = load_program(deepcopy(self.job.program.source), self.table, sets=sets)
        budget = options.max_new_tokens or program.graph.limits.max_new_tokens
        most = budget if tokens is None else min(budget, tokens)
        options = replace(options, max_new_tokens=most, **others)
        return replace(self.job, program=program, options=options)

    def side(self, job: Job, letter: str = "A") -> Side:
        """A job with its models, loaded when first needed; raises ModelError."""
        drafter = self.drafter if job.program.graph.drafter.has_model else None
        return self.shelf.side(letter, job, self.reference.folder, drafter)

    def answers(self, sides: Sequence[Side], prompts: Sequence[Prompt]) -> Iterator[ComparedPrompt]:
        numbered = dict(enumerate(prompts))
        return answer_all(sides, numbered, StopSignal(), lambda text, share: self.tell(text))

    def tally(self) -> "TeacherTally":
        return TeacherTally(self.reference, self.dtype)

    def repeat(self, side: Side, rerun: Callable[[], Iterable[Request]]) -> "Repeat":
        """Whether a rerun in float64, once, at the first numeric tie, equals transformers."""

        @cache
        def repeat() -> bool:
            tally = TeacherTally(self.reference, "float64")
            for request in rerun():
                tally.hold(side, request, repeat)
            return tally.good

        return repeat

    def repeated(self, side: Side, prompt: Prompt) -> "Repeat":
        def rerun() -> Iterator[Request]:
            exact = replace(side.job, options=replace(side.job.options, dtype="float64"))
            for answer in self.answers([self.side(exact)], [prompt]):
                yield answer.runs["A"].requests[0]

        return self.repeat(side, rerun)


Repeat = Callable[[], bool]  # whether the same run in float64 is as it must be
Fault = tuple[str, float | None]  # what is wrong, and the margin of the target's token


def judged(name: str, text: str, figures: Mapping[str, float], wrong: Sequence[str]) -> Check:
    """A check that passes if nothing is wrong."""
    return Check(name, not wrong, figures, "; ".join([text, *wrong[:SHOWN]]))


@dataclass(slots=True)
class TeacherTally:
    """Compares answers with transformers' logits in one dtype; refused: branches; wrong: lines."""

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
        text = f"{number_of(self.tokens, 'token')} in {number_of(self.branches, 'branch', 'es')}"
        text += f" of {number_of(self.prompts, 'request')}"
        text += f", {number_of(self.ties, 'numeric tie')}" if self.ties else ""
        text += f", {number_of(self.refused, 'refusal')}" if self.refused else ""
        return "; ".join([text, *self.wrong[:SHOWN]])

    @property
    def good(self) -> bool:
        """Nothing is wrong, and there was something to compare."""
        return not self.wrong and self.tokens > 0

    def check(self, name: str, title: str, more: str = "", **figures: float) -> Check:
        return Check(name, self.good, {**self.figures, **figures}, f"{title}: {self.words}{more}")

    def hold(self, side: Side, request: Request, repeat: Repeat) -> None:
        """Every branch that was decoded, the outline's first; repeat: called at a numeric tie."""
        self.prompts += 1
        for branch in request.all_branches():
            if branch.finish in (None, Finish.CANCELLED):
                self.wrong.append(f"{branch.name} never ended")
            self.refused += branch.finish is Finish.REFUSED
        for branch, context in contexts(request, side.session.prompts):
            if branch.finish in (Finish.STOP, Finish.LENGTH):
                self.hold_branch(branch, context, repeat)

    def hold_branch(self, branch: Branch, context: Sequence[int], repeat: Repeat) -> None:
        """One answer; a numeric tie (none in float64) is counted, other differences are faults."""
        self.branches += 1
        self.tokens += len(branch.tokens)
        if (fault := self.first_wrong(branch, context)) is None:
            return
        text, margin = fault
        if margin is not None and margin < TIE and self.dtype != "float64" and repeat():
            self.ties += 1
        else:
            shown = "" if margin is None else f" (margin {margin:.1e})"
            self.wrong.append(f"{branch.name}: {text}{shown}")

    def first_wrong(self, branch: Branch, context: Sequence[int]) -> Fault | None:
        """What is wrong first, and the margin of the target's own token."""
        stops = branch.request.stop_ids
        for place, token in enumerate(branch.tokens, 1):
            if token in stops:
                return f"the stop token {token} is inside the answer at {place}", None
        answer = [*branch.tokens, *([END] if branch.finish is Finish.STOP else [])]
        if branch.finish is Finish.LENGTH and len(answer) != branch.budget:
            return f"{number_of(len(answer), 'token')}, the budget is {branch.budget}", None
        ids = [*context, *branch.tokens]
        logits_QV = self.reference.logits(ids, self.dtype, context_segments(branch))
        own_tokens = _own_tokens(branch, context, logits_QV[len(context) - 1 :])
        # An answer that left its grammar has fewer places than tokens.
        for place, (token, (best, order_V)) in enumerate(zip(answer, own_tokens, strict=False), 1):
            if token != (END if best in stops else best):
                name = "the end" if token == END else str(token)
                score = order_V[sorted(stops)].max() if token == END else order_V[token]
                text = f"token {place} is {name}, the target says {best}"
                return text, float(order_V[best] - score)
        return None


def _own_tokens(
    branch: Branch, context: Sequence[int], logits_QV: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """The target's token at each place of an answer, under a grammar the best legal one, with all
    scores, until the answer leaves the grammar. logits_QV: behind the context and each token."""
    if branch.matcher is None and rules_of(branch).plain:
        yield from zip(logits_QV.argmax(-1).tolist(), logits_QV, strict=True)
        return
    matcher = _grammar_of(branch)
    for place, logits_V in enumerate(logits_QV):
        order_V = match_scores(logits_V, branch, context, place)
        best = int(order_V.argmax())
        if matcher is not None:
            order = order_V.argsort(descending=True, stable=True).tolist()
            best = next(token for token in order if matcher.is_legal(token))
        yield best, order_V
        if matcher is not None and place < len(branch.tokens):
            if not matcher.is_legal(branch.tokens[place]):
                return
            matcher.advance(branch.tokens[place])
