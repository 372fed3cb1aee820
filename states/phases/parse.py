"""The phase `parse`: complete outlines become branches; anything else becomes one plain answer."""

from collections.abc import Sequence

from ...ops.registry import op
from ..manager import BranchStateManager
from ..prompt_builder import PromptBuilder
from ..request import Finish, Request, failing, move
from ..request_table import RequestTable
from ..text.documents import CHUNK_TOKENS
from ..text.prompts import PromptBook
from ..text.tokens import PromptTokens


@op("outline.parse_", needs="skeleton", commits=True)
def parse_(
    branches: BranchStateManager,
    prompts: PromptBook,
    *,
    max_branches: int,
    direct_tokens: int,
    tools: Sequence[str],
    search_top_k: int = 2,
    chunk_tokens: int = CHUNK_TOKENS,
) -> None:
    """Parse complete outlines into branches, with plain decoding as the fallback. A request with a
    budget of 0 ends with its outline. Only generated ids are parsed, so the text of a prompt is
    never read as an outline."""
    builder = PromptBuilder(prompts, search_top_k, chunk_tokens)
    for request in [r for r in branches.table.open.values() if r.outline_ended]:
        root = request.root
        assert root is not None
        with failing(root):
            most = min(max_branches, tokens_of_parts(branches.table, request))
            request.outline = request.given_outline or prompts.read_outline(
                root.tokens, max_branches=most, tools=tools
            )
            if branches.limits.share_outline:
                branches.kv_cache.promote_root_(root)
                pending = root.pending  # tokens without rows, before the common prompt
            else:
                branches.kv_cache.drop_root_(root)
                pending = []
            if not request.budget:
                move(request, "run")
                branches.lifecycle.close_(request)
                continue
            fan_out_(branches.table, builder, request, pending=pending, direct_tokens=direct_tokens)
            if not request.outline.points:
                branches.lifecycle.check_fit(request.branches[0])
            move(request, "run")
        if root.finish is Finish.FAILED:
            branches.table.end(request, Finish.FAILED, root.note)
    branches.lifecycle.release_and_prepare_()


def fan_out_(
    table: RequestTable,
    builder: PromptBuilder,
    request: Request,
    *,
    pending: Sequence[int],
    direct_tokens: int,
) -> None:
    """Create the branches of a parsed outline, or one plain answer if it has no points. pending:
    tokens of the outline before the common prompt. direct_tokens: of the plain answer. Parts divide
    the tokens of the whole answer by the lengths that the outline expects."""
    before = PromptTokens(tuple(pending)) + request.opening
    assert request.outline is not None
    points = request.outline.points
    if not points:
        most = min(direct_tokens, request.spare_tokens)
        direct = table.new_branch(request, 0, min(most, request.requested_tokens or most))
        direct.prompt = before + builder.direct(request)
        request.branches = [direct]
        return
    common, documents_of = builder.shared(request)
    request.common_prompt = before + common
    total = request.spare_tokens if len(points) == 1 else tokens_of_parts(table, request)
    shares = divided(total, [point.length for point in points])
    for index, (point, documents) in enumerate(zip(points, documents_of, strict=True)):
        branch = table.new_branch(request, index, min(request.budget, shares[index]))
        branch.point = point
        branch.documents = documents
        request.branches.append(branch)


def tokens_of_parts(table: RequestTable, request: Request) -> int:
    """Tokens of all parts together; half of what is left, if one more branch combines them."""
    skeleton = table.limits.graph.skeleton
    combines = skeleton is not None and skeleton.merge != "concat"
    return max(request.spare_tokens // 2, 1) if combines else request.spare_tokens


def divided(total: int, weights: Sequence[int]) -> list[int]:
    """A total as shares in proportion to weights, at least 1; the first have the remainder."""
    spare = max(total - len(weights), 0)
    shares = [spare * weight // sum(weights) for weight in weights]
    rest = spare - sum(shares)
    return [1 + share + (place < rest) for place, share in enumerate(shares)]
