"""Forwards outside a run, in pools of their own: scores of token ids, durations, full prefills."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from time import perf_counter
from timeit import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...models.files import ModelError
from ...ops.attention.backends import AttentionPlan
from ...ops.blend import RowRole
from ...ops.draft.sizes import Curve, RoundCosts
from ...ops.forward import HostReader, TargetOutput
from ...ops.kv.pool import Ints, KVCache
from ...ops.layer_plan import LayerStatus
from ...ops.sampling.coins import branch_key, perturbed, token_keys
from ...ops.sampling.processors import Sampler, columns, process, take_in_
from ...ops.types import Rows
from ...states.drafter import TextRows
from ...states.graph.drafter_settings import DrafterSettings
from ...states.graph.plugins import drafter_class
from ...states.machine import Event, OpRan
from ...states.request import Branch, Finish, Request
from ...states.sampling import rules_of
from ...states.text.prompts import PromptBook
from ..models import Models, new_pool
from ..record.metrics import ProbeFigures
from ..record.recorder import Recorder
from .core import EngineCore

MAX_SCORED_ROWS = 256  # rows whose logits exist at once


def contexts(request: Request, prompts: PromptBook) -> Iterator[tuple[Branch, list[int]]]:
    """Every branch that started, the root branch first, with the token ids before its answer, from
    prompts and answers alone. `context_segments` says what a branch sees of its context."""
    question = [*request.prefix, *request.tail]
    root = request.root
    # Without those that were refused, or whose dependencies are not finished.
    started = [b for b in request.branches if len(b.prompt) and b.finish is not Finish.REFUSED]
    if request.outline_budget == 0:
        yield from ((branch, question) for branch in started)
        return
    if root is None:
        return
    if request.given_outline is None:
        yield root, question
    if request.outline is None:
        return
    outlined = [*question, *(request.given_ids or root.tokens)]
    shared = outlined if prompts.share == "outline" else [*request.prefix, *request.opening]
    tokens = {b.point.id: b.tokens for b in request.branches if b.point is not None}
    for branch in started:
        point = branch.point
        # Only the prompt book knows a branch's documents and the parts that it combines.
        if request.documents or branch.combines:
            yield branch, branch.before
        elif point is None:
            yield branch, [*shared, *prompts.direct()]
        else:
            quoted = [(dep, tokens[dep]) for dep in point.deps]
            plan, prompt = prompts.branch(point, request.outline, quoted)
            yield branch, [*shared, *plan, *prompt]


class ContextSegment(NamedTuple):
    """Consecutive token ids of the context of a branch that combines parts in place: parts do not
    see each other. position: of the first id; sees: numbers of the earlier segments that its ids
    see besides their own. The answer continues the last segment."""

    tokens: int
    position: int
    sees: tuple[int, ...] = ()


Segments = Sequence[ContextSegment]  # of a whole context; empty where it is one text


def context_segments(branch: Branch) -> tuple[ContextSegment, ...]:
    """The prefix, the parts that the branch reads, its own prompt; empty if it reads no parts."""
    if not branch.reads:
        return ()
    prefix = ContextSegment(len(branch.request.context), 0)
    parts = [ContextSegment(part.num_tokens, part.start, (0,)) for part in branch.reads]
    sees = tuple(range(len(parts) + 1))
    return prefix, *parts, ContextSegment(len(branch.prompt), branch.start, sees)


def segments_from(document: Iterable[Sequence[object]]) -> tuple[ContextSegment, ...]:
    """Segments of outputs.jsonl: [tokens, position, [sees]]; raises TypeError, ValueError."""
    segments = []
    for at, (tokens, position, sees) in enumerate(document):
        if not (isinstance(tokens, int) and isinstance(position, int) and isinstance(sees, list)):
            raise TypeError("a segment is not [tokens, position, [earlier segments]]")
        if tokens < 0 or position < 0 or not all(type(n) is int and 0 <= n < at for n in sees):
            raise ValueError("a segment has an invalid number")
        segments.append(ContextSegment(tokens, position, tuple(sees)))
    return tuple(segments)


def visible(segments: Segments, count: int) -> tuple[Tensor, Tensor]:
    """Positions int64 [Q] and visibility bool [Q, Q] of `count` ids, the last of which continue the
    last segment; raises ValueError if there are fewer ids than the segments have."""
    sizes = [segment.tokens for segment in segments]
    sizes[-1] += count - sum(sizes)
    if sizes[-1] < segments[-1].tokens:
        raise ValueError(f"{count} ids are fewer than the segments have")
    positions_Q = torch.cat(
        [torch.arange(n) + segment.position for n, segment in zip(sizes, segments, strict=True)]
    )
    sees_SS = torch.eye(len(segments), dtype=torch.bool)
    for at, segment in enumerate(segments):
        sees_SS[at, list(segment.sees)] = True
    segment_Q = torch.repeat_interleave(torch.tensor(sizes))
    causal_QQ = positions_Q[:, None] >= positions_Q[None]
    return positions_Q, sees_SS[segment_Q][:, segment_Q] & causal_QQ


def prefill(
    target: Any,
    ids: Sequence[int],
    kv: KVCache,
    *,
    start: int = 0,
    first_logits: int = 0,
    taps: Sequence[int] = (),
    segments: Segments = (),
) -> TargetOutput:
    """One forward of the target over the next ids of a sequence in slots 0, 1, 2 … of a pool.
    start: number of ids of the sequence that the pool holds already. first_logits: logits are
    computed from this row of `ids` on. taps: as for the target's `forward`. segments: visibility of
    a whole context (`start` is 0); by default causal."""
    device = kv.data.device
    slots_1Q = positions_1Q = torch.arange(start, start + len(ids), device=device)[None]
    attention = AttentionPlan.causal(len(ids), device, start)
    if segments:
        positions_Q, mask_QQ = visible(segments, start + len(ids))
        positions_1Q = positions_Q.to(device)[None]
        attention = AttentionPlan.dense(mask_QQ.to(device)[None], positions_1Q)
    with torch.inference_mode():
        output: TargetOutput = target.forward(
            torch.tensor([list(ids)], device=device),
            positions_1Q,
            slots_1Q,
            attention,
            kv=kv,
            plan=(LayerStatus.FULL,) * target.num_layers,
            logit_rows_R=torch.arange(first_logits, len(ids), device=device),
            taps=tuple(taps),
        )
    return output


def full_prefill(
    target: Any,
    ids: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    taps: Sequence[int] = (),
) -> tuple[TargetOutput, KVCache]:
    """The output after these ids (logits_RV has one row), and the fresh pool that holds them."""
    shape = (target.num_layers, target.kv_heads, target.head_dim, len(ids))
    kv = KVCache(*shape, dtype=dtype, device=device)
    return prefill(target, ids, kv, first_logits=len(ids) - 1, taps=taps), kv


def next_scores(models: Models, branch: Branch, context: Sequence[int], place: int) -> Tensor:
    """[V] `match_scores` from the target's logits."""
    ids = [*context, *branch.tokens[:place]]
    kv = new_pool(models.target, len(ids), 1, models)
    segments = context_segments(branch)
    output = prefill(models.target, ids, kv, first_logits=len(ids) - 1, segments=segments)
    return match_scores(output.logits_RV[0], branch, context, place)


def match_scores(logits_V: Tensor, branch: Branch, context: Sequence[int], place: int) -> Tensor:
    """[V] the scores whose argmax is token number `place` of an answer after `context` under
    ``accept: match``, as plain decoding has them: processed, plus Gumbel coins if it is sampled."""
    rules = rules_of(branch)
    first = branch.start + len(branch.prompt) if branch.reads else len(context)
    logits_1V = logits_V[None]
    size = logits_1V.shape[1]
    device = logits_1V.device
    row_1 = torch.zeros(1, dtype=torch.int64, device=device)
    in_context_1V = torch.zeros(1, size, dtype=torch.bool, device=device)
    in_context_1V[0, torch.tensor([*context], device=device)] = True
    counts_1V = torch.zeros(1, size, dtype=torch.int32, device=device)
    answer_C = torch.tensor(branch.tokens[:place], dtype=torch.int64, device=device)
    take_in_(in_context_1V, counts_1V, torch.zeros_like(answer_C), answer_C)
    empty_10 = row_1[:, None][:, :0]
    key_1 = row_1 + branch_key(branch.request.seed, branch.index)
    settings = columns([rules], [branch.request.stop_ids], size, device)
    sampler = Sampler(settings, key_1, in_context_1V, counts_1V, answered_S=row_1 + place)
    scores_1V = process(logits_1V, sampler, row_1, tokens_RC=empty_10, path_RC=empty_10.bool())
    if rules.greedy:
        return scores_1V[0]
    return perturbed(scores_1V, token_keys(key_1, row_1 + first + place))[0]


class TokenScore(NamedTuple):
    """Log-probability of a token after all tokens before it, from raw logits; and the best ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Scorer:
    """Log-probabilities of tokens as they are written; the context's rows stay in its own pool.
    max_tokens: of the context and the tokens written after it."""

    def __init__(self, models: Models, max_tokens: int) -> None:
        self._models = models
        self._kv = new_pool(models.target, max_tokens, 1, models)
        self._pending: list[int] = []  # the last one gets its row with the next token
        self._rows = 0

    def read(self, ids: Sequence[int]) -> None:
        self._pending += ids

    def score(self, ids: Sequence[int], top: int) -> list[TokenScore]:
        """The scores of the next tokens, each with the `top` best; the very first has none."""
        unscored = len(self._pending)
        rows = [*self._pending, *ids]
        scores: list[TokenScore] = []
        for start in range(0, len(rows) - 1, MAX_SCORED_ROWS):
            stop = min(start + MAX_SCORED_ROWS, len(rows) - 1)
            first = min(max(start, unscored - 1), stop - 1)
            chunk = rows[start:stop]
            output = prefill(
                self._models.target, chunk, self._kv, start=self._rows, first_logits=first - start
            )
            self._rows += stop - start
            if stop <= unscored - 1:
                continue
            ids_R1 = torch.tensor(rows[first + 1 : stop + 1], device=self._models.device)[:, None]
            logs_RV = output.logits_RV.double().log_softmax(-1)
            best = logs_RV.topk(min(max(top, 1), logs_RV.shape[1]), dim=-1)
            numbers_RC = torch.cat([logs_RV.gather(1, ids_R1), best.values], 1).view(torch.int64)
            count = best.indices.shape[1]
            for row in HostReader().read(torch.cat([ids_R1, numbers_RC, best.indices], 1)):
                logprob, *logprobs = row[1:-count].view("float64").tolist()
                pairs = zip(row[-count:].tolist(), logprobs, strict=True)
                scores.append(TokenScore(int(row[0]), logprob, tuple(pairs)[:top]))
        self._pending = rows[-1:]
        return scores


# -- durations ------------------------------------------------------------------------------------

# Numbers of rows, in the order in which they are measured until the time is up.
ROWS = (1, 16, 4, 64, 8, 2, 32, 3, 6, 12, 24, 48)
MIN_POINTS = 2
CONTEXT_ROWS = 64  # tokens before the measured rows
MAX_SECONDS = 1.5  # for one model
REPEATS = 5  # of each point; the fastest counts, since noise only adds time


def costs_of(models: Models, block: DrafterSettings | None, drafter: Any) -> RoundCosts | None:
    """The graph's figures, or measured ones, for a drafter that chooses by them; raises ModelError
    for several ranks, which would each measure, and decide differently."""
    blocks = () if block is None else block.alternatives
    chooses = any(one.chooses for one in blocks)
    if block is None or not (chooses or block.takes_turns):
        return None
    target = models.target
    costs = getattr(block, "costs", None)
    if getattr(target, "ranks", None) is not None and (block.takes_turns or costs is None):
        instead = "omit drafter.or" if block.takes_turns else "give drafter.costs"
        reason = f"ranks that decode together cannot measure what forwards cost: {instead}"
        raise ModelError(target.config.path, reason)
    if costs is not None:
        return RoundCosts(Curve.of(costs.target), Curve.of(costs.drafter), costs.overhead)
    if not chooses:
        return RoundCosts(Curve((), ()), Curve((), ()))

    def drafter_logits(kv: KVCache, start: int, count: int) -> Tensor:
        slots_1Q = torch.arange(start, start + count, device=kv.data.device)[None]
        attention = AttentionPlan.causal(count, kv.data.device, start)
        text = TextRows(torch.ones_like(slots_1Q), slots_1Q, attention, kv)
        logits: Tensor = kind.logits(drafter, text)
        return logits

    target_costs = _measured(
        models,
        target,
        lambda kv, start, count: prefill(target, [1] * count, kv, start=start).logits_RV,
    )
    if drafter is None or not block.has_model:
        return RoundCosts(target_costs, Curve((), ()))
    kind: Any = drafter_class(block.kind)
    return RoundCosts(target_costs, _measured(models, drafter, drafter_logits))


def _measured(models: Models, model: Any, logits: Callable[[KVCache, int, int], Tensor]) -> Curve:
    """Milliseconds of forwards by their rows; logits: of `count` rows after `start` rows."""
    kv = new_pool(model, CONTEXT_ROWS + max(ROWS), 1, models)

    def forward(rows: int) -> None:
        logits(kv, CONTEXT_ROWS, rows).argmax(-1)
        if models.device.type == "cuda":
            torch.cuda.synchronize(models.device)

    millis = dict[int, float]()
    start = perf_counter()
    with torch.inference_mode():
        logits(kv, 0, CONTEXT_ROWS)
        for rows in ROWS:
            if len(millis) >= MIN_POINTS and perf_counter() - start > MAX_SECONDS:
                break
            millis[rows] = 1e3 * min(repeat(partial(forward, rows), number=1, repeat=REPEATS))
    return Curve.of(millis)


# -- blended prompts -------------------------------------------------------------------------------


def probe_blends(core: EngineCore, recorder: Recorder) -> ProbeFigures:
    """Compare each forward of this run with cached rows; the returned figures grow with the run."""
    figures = recorder.meter.probed = ProbeFigures()

    def compare(event: Event) -> None:
        # Before the commit: a branch that ends with its first token releases its rows there.
        forward = isinstance(event, OpRan) and event.op == "target.forward_"
        if not forward or core.board["rows"].blend is None:
            return
        rows = core.board["rows"]
        kv = core.board["kv"]
        cached = _cached(rows)
        # [V] logits of each branch that draws its first token; they follow the rows of the trees.
        owners = rows.owner_N[rows.tips_R.cpu().numpy()].tolist()
        logits_RV = core.board["logits"]
        tips = dict(zip(owners, logits_RV[logits_RV.shape[0] - len(owners) :], strict=True))
        prompts: list[tuple[int, int, Sequence[int]]] = []
        for request in core.requests:
            prefix = request.prefix_owner
            prompts.append((prefix, prefix, request.context))
            prompts += [(b.owner, prefix, b.context()) for b in request.all_branches()]
        for owner, prefix, ids in prompts:
            draws = owner in tips and (owner in cached or prefix in cached)
            if not (draws or owner in cached):
                continue
            output, full = full_prefill(core.board["target"], ids, kv.data.dtype, kv.data.device)
            if owner in cached:
                slots, positions = cached[owner]
                full_L2x = _rows(full, positions)
                error_L2x = _rows(kv, slots) - full_L2x
                figures.errors.append(error_L2x.norm(dim=-1) / full_L2x.norm(dim=-1))
                figures.rows += slots.size
            if draws:
                logs_V = output.logits_RV[0].double().log_softmax(-1)
                blended_V = tips[owner].double().log_softmax(-1)
                # Ids without a token (-inf) count 0.
                terms_V = torch.where(logs_V > -torch.inf, logs_V.exp() * (logs_V - blended_V), 0.0)
                figures.kl.append(float(terms_V.sum().clamp(min=0)))

    recorder.listeners.append(compare)
    return figures


def _cached(rows: Rows) -> dict[int, tuple[Ints, Ints]]:
    """Slots and positions of each owner's reused rows; of the first copy if there are several."""
    assert rows.blend is not None
    role_M = rows.blend.rows.role_BQ.reshape(-1)
    branch_M = rows.blend.rows.branch_BQ.reshape(-1)
    slot_M = rows.slots_BQ.reshape(-1).cpu().numpy()
    position_M = rows.positions_BQ.reshape(-1).cpu().numpy()
    reused: dict[int, tuple[Ints, Ints]] = {}
    for branch in np.unique(branch_M[role_M == RowRole.REUSED]):
        index = np.flatnonzero((branch_M == branch) & (role_M == RowRole.REUSED))
        reused.setdefault(int(rows.owner_N[index[0]]), (slot_M[index], position_M[index]))
    return reused


def _rows(pool: KVCache, slots: Ints) -> Tensor:
    slots_R = torch.as_tensor(slots.astype(np.int64), device=pool.data.device)
    return pool.data.index_select(3, slots_R).flatten(2).double()
