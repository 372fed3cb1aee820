"""Behind which token ids each branch was decoded, and what the target says there by itself."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.attention.metadata import AttentionMetadata
from ...ops.forward import TargetOutput
from ...ops.kv.pool import KVCache
from ...ops.layer_plan import LayerStatus
from ...ops.sampling.coins import branch_key, perturbed, token_keys
from ...ops.sampling.processors import Past, columns, process, take_in_
from ...states.request import Branch, Finish, Request
from ...states.sampling import rules_of
from ...states.text.prompts import PromptBook
from ..models import Models
from .visibility import Segments, context_segments, visible


def contexts(request: Request, book: PromptBook) -> Iterator[tuple[Branch, list[int]]]:
    """Every branch that was decoded, the outline's first, with the token ids before its answer.

    They are put together from prompts and answers alone, not from what lies in any pool. A branch
    that never started is left out. What one sees of them, if not everything: `visibility.py`.
    """
    question = [*request.prefix, *request.tail]
    root = request.root
    if request.outline_budget == 0:
        yield from ((branch, question) for branch in _started(request))
        return
    if root is None:
        return
    if request.given is None:
        yield root, question
    if request.outline is None:
        return
    outlined = [*question, *(request.given_ids or root.tokens)]
    shared = outlined if book.share == "outline" else [*request.prefix, *request.opening]
    for branch in _started(request):
        # Which documents a branch got, and what of the parts was folded, the book alone knows.
        if request.documents or branch.combines:
            yield branch, branch.before
        else:
            yield branch, [*shared, *_own(branch, book)]


def _started(request: Request) -> list[Branch]:
    """Branches that were not refused, and all of whose dependencies are there to be quoted."""
    return [b for b in request.branches if len(b.prompt) and b.finish is not Finish.REFUSED]


def _own(branch: Branch, book: PromptBook) -> list[int]:
    """A branch's prompt behind what all branches share; results are quoted by their ids."""
    point = branch.point
    outline = branch.request.outline
    if point is None or outline is None:
        return list(book.direct())
    done = {b.point.id: b.tokens for b in branch.request.branches if b.point is not None}
    hoist, own = book.branch(point, outline, [(dep, done[dep]) for dep in point.deps])
    return [*hoist, *own]


def next_logits(models: Models, ids: Sequence[int], segments: Segments = ()) -> Tensor:
    """[V] the target's logits behind these ids, by one forward of its own in a fresh pool."""
    output, _ = full_prefill(models.target, ids, models.dtype, models.device, segments=segments)
    return output.logits_RV[0]


def full_prefill(
    target: Any,
    ids: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    taps: Sequence[int] = (),
    segments: Segments = (),
) -> tuple[TargetOutput, KVCache]:
    """What the target says behind these ids (logits_RV has one row), and a fresh pool with them.

    Args:
        segments: what of the ids each one sees; by default all before it.
    """
    count = len(ids)
    shape = (target.num_layers, target.kv_heads, target.head_dim)
    kv = KVCache(*shape, count, dtype=dtype, device=device)
    steps_1Q = torch.arange(count, device=device)[None]
    positions_1Q = steps_1Q
    attention = AttentionMetadata.causal(count, device)
    if segments:
        positions_Q, mask_QQ = (one.to(device) for one in visible(segments, count))
        positions_1Q = positions_Q[None]
        attention = AttentionMetadata.dense(mask_QQ[None], positions_1Q)
    with torch.inference_mode():
        output = target.forward(
            torch.tensor([list(ids)], device=device),
            positions_1Q,
            steps_1Q,
            attention,
            kv,
            (LayerStatus.FULL,) * target.num_layers,
            steps_1Q[0, -1:],
            tuple(taps),
        )
    return output, kv


def next_order(models: Models, branch: Branch, context: Sequence[int], place: int) -> Tensor:
    """[V] what decides on token number `place` of an answer behind `context` under
    ``accept: match``."""
    ids = [*context, *branch.tokens[:place]]
    logits_V = next_logits(models, ids, context_segments(branch))
    return order_of(logits_V, branch, context, place)


def order_of(logits_V: Tensor, branch: Branch, context: Sequence[int], place: int) -> Tensor:
    """[V] the same where the logits behind the first `place` tokens of the answer are known.

    Processed scores, with the token's coins where it is drawn; put together from the ids alone, as
    a branch of plain decoding would see them.
    """
    rules = rules_of(branch)
    stops = branch.request.stop_ids
    first = branch.start + len(branch.prompt) if branch.reads else len(context)
    logits_1V = logits_V[None]
    behind = first + place
    size = logits_1V.shape[1]
    device = logits_1V.device
    row_1 = torch.zeros(1, dtype=torch.int64, device=device)
    seen_1V = torch.zeros(1, size, dtype=torch.bool, device=device)
    seen_1V[0, torch.tensor([*context], device=device)] = True
    counts_1V = torch.zeros(1, size, dtype=torch.int32, device=device)
    answer_C = torch.tensor(branch.tokens[:place], dtype=torch.int64, device=device)
    take_in_(seen_1V, counts_1V, torch.zeros_like(answer_C), answer_C)
    none_10 = row_1[:, None][:, :0]
    past = Past(seen_1V, counts_1V, row_1 + place, none_10, none_10.bool())
    scores_1V = process(logits_1V, columns([rules], [stops], size, device), row_1, past)
    if rules.greedy:
        return scores_1V[0]
    key_1 = row_1 + branch_key(branch.request.seed, branch.index)
    return perturbed(scores_1V, token_keys(key_1, row_1 + behind))[0]
