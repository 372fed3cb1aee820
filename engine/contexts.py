"""Behind which token ids each branch was decoded, and what the target says there by itself."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.kv import KVCache
from ..ops.types import LayerStatus, Visibility
from ..states.branches import Branch, Finish, Request
from .session import Models


def contexts(request: Request, book: Any) -> Iterator[tuple[Branch, list[int]]]:
    """Every branch that was decoded, the outline's first, with the token ids before its answer.

    They are put together from prompts and answers alone, not from what lies in any pool. A branch
    that never started is left out.

    Args:
        book: states.prompts.PromptBook of the run.
    """
    asked = [*request.prefix, *request.tail]
    root = request.root
    if request.outline_budget == 0:
        yield from ((branch, asked) for branch in _started(request))
        return
    if root is not None and request.given is None:
        yield root, asked
    if root is None or request.outline is None:
        return
    shared = list(request.prefix)
    if book.share == "outline":
        shared = [*asked, *(request.given_ids or root.tokens)]
    for branch in _started(request):
        yield branch, [*shared, *_own(branch, book)]


def _started(request: Request) -> list[Branch]:
    """Branches that were not refused, and all of whose dependencies are there to be quoted."""
    return [b for b in request.branches if b.prompt and b.finish is not Finish.REFUSED]


def _own(branch: Branch, book: Any) -> list[int]:
    """A branch's prompt behind what all branches share; results are quoted by their ids."""
    point, outline = branch.point, branch.request.outline
    if point is None or outline is None:
        return list(book.direct())
    done = {b.point.id: b.tokens for b in branch.request.branches if b.point is not None}
    hoist, own = book.branch(point, outline, [(dep, done[dep]) for dep in point.deps])
    return [*hoist, *own]


def next_logits(models: Models, ids: Sequence[int]) -> Tensor:
    """[V] the target's logits behind these ids, by one forward of its own in a fresh pool."""
    target, device, count = models.target, models.device, len(ids)
    kv = KVCache(
        target.num_layers,
        target.kv_heads,
        target.head_dim,
        count,
        dtype=models.dtype,
        device=device,
    )
    steps_1Q = torch.arange(count, device=device)[None]
    mask_1QQ = torch.ones(1, count, count, dtype=torch.bool, device=device).tril()
    with torch.inference_mode():
        output = target.forward(
            torch.tensor([list(ids)], device=device),
            steps_1Q,
            steps_1Q,
            Visibility(mask_1QQ, steps_1Q),
            kv,
            (LayerStatus.FULL,) * target.num_layers,
            steps_1Q[0, -1:],
            (),
        )
    logits_V: Tensor = output.logits_RV[0]
    return logits_V
