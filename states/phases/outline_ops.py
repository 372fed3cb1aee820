"""From a finished outline to branches, from branches to an answer; forced tokens as drafts."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ...ops.registry import op
from ...ops.types import Proposal
from ..fold import FINISHED
from ..manager import BranchStateManager
from ..prompt_builder import PromptBuilder
from ..request import Branch, Finish, Request, failing, move, reason_of
from ..request_table import RequestTable
from ..text.documents import CHUNK_TOKENS
from ..text.outline import Outline
from ..text.prompts import PromptBook
from ..text.tokens import PromptTokens


@dataclass(frozen=True, slots=True)
class Section:
    """One branch of an answer. tokens: the ids it decoded, no stop token."""

    index: int
    title: str
    text: str
    tokens: tuple[int, ...]
    finish: str
    note: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A request's answer in reading order; `outline_tokens` is empty for a given outline.

    combined: the answer behind the folded sections, if the graph combines them; `text` is its text
    once it has ended, and before that, or where it was refused, the sections'.
    """

    key: str
    question: str
    outline: Outline | None
    outline_tokens: tuple[int, ...]
    outline_finish: str
    sections: tuple[Section, ...]
    text: str
    combined: Section | None = None

    @property
    def samples(self) -> tuple[str, ...]:
        """The texts of all answers that were drawn to this prompt (`limits.n`)."""
        one = self.outline is not None or len(self.sections) < 2
        return (self.text,) if one else tuple(section.text for section in self.sections)


@op("outline.force", writes="proposal", needs="skeleton")
def force(branches: BranchStateManager, proposal: Proposal) -> Proposal:
    """Where a grammar leaves no choice for longer than half a tree, that chain is the draft."""
    nodes = proposal.tokens_SN.shape[1]
    chains = {
        tree: chain
        for tree, branch in enumerate(branches.active)
        if 2 * len(chain := _forced(branch)[:nodes]) > proposal.levels
    }
    return _with_chains(proposal, chains) if chains else proposal


def _forced(branch: Branch) -> list[int]:
    """All that a grammar leaves; nothing if there is none, or if it fails, which ends the branch
    when its next token is looked for."""
    if branch.matcher is None:
        return []
    with suppress(Exception):
        return branch.matcher.forced()
    return []


def _with_chains(proposal: Proposal, chains: dict[int, list[int]]) -> Proposal:
    """The proposal with some trees replaced by one path each, padded with invalid nodes."""
    tokens = proposal.tokens_SN.clone()
    valid = proposal.valid_SN.clone()
    parents = proposal.parents_SN.clone()
    depths = proposal.depths_SN.clone()
    scores = proposal.scores_SN.clone()
    sizes = list(proposal.laid_out)
    device = tokens.device
    nodes = tokens.shape[1]
    steps_N = torch.arange(nodes, device=device)
    for tree, chain in chains.items():
        padded = chain + [0] * (nodes - len(chain))
        tokens[tree] = torch.tensor(padded, dtype=torch.int64, device=device)
        valid[tree] = steps_N < len(chain)
        parents[tree] = torch.where(valid[tree], steps_N - 1, -1)
        depths[tree] = torch.where(valid[tree], steps_N + 1, 1)
        sizes[tree] = len(chain)
        scores[tree] = 0.0  # certain: where branches share their rows, these come first
    return replace(
        proposal,
        tokens_SN=tokens,
        valid_SN=valid,
        parents_SN=parents,
        depths_SN=depths,
        scores_SN=scores,
        levels=max(proposal.levels, *(len(chain) for chain in chains.values())),
        forced=tuple(chains),
        sizes=tuple(sizes),
    )


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
    """Read finished outlines into branches; anything else falls back to one ordinary answer. A
    request whose branches may write nothing ends with its outline.

    Only generated ids are read, so nothing a user wrote can pass for an outline.
    """
    builder = PromptBuilder(prompts, search_top_k, chunk_tokens)
    for request in [one for one in branches.table.open.values() if one.outline_ended]:
        root = request.root
        assert root is not None
        with failing(root):
            request.outline = request.given or prompts.read_outline(
                root.tokens, max_branches=max_branches, tools=tools
            )
            pending = _close_root_(branches, request, root)
            if not request.budget:
                branches.lifecycle.finish_(request)
                continue
            fan_out_(branches.table, builder, request, pending, direct_tokens)
            if not request.outline.points:
                branches.lifecycle.check_fit_(request.branches[0])
            move("request", request, "run")
        if root.finish is Finish.FAILED:
            branches.table.end(request, Finish.FAILED, root.note)
    branches.lifecycle.retire_and_prepare_()


def _close_root_(branches: BranchStateManager, request: Request, root: Branch) -> list[int]:
    """Keep the outline's rows as prefix, or give them back; its tokens that have no row yet."""
    if branches.limits.share_outline:
        branches.lifecycle.promote_root_(request)
        return root.pending
    branches.lifecycle.leave_root_(request)
    return []


def fan_out_(
    table: RequestTable,
    builder: PromptBuilder,
    request: Request,
    pending: Sequence[int],
    direct_tokens: int,
) -> None:
    """The branches of an outline that was read; one ordinary answer where there is none to follow.

    Args:
        pending: tokens of the outline that stand before what parts begin with.
    """
    before = PromptTokens(tuple(pending)) + request.opening
    assert request.outline is not None
    points = request.outline.points
    if not points:
        most = min(direct_tokens, request.asked or direct_tokens)
        direct = table.new_branch(request, 0, most)
        direct.prompt = before + builder.direct(request)
        request.branches = [direct]
        return
    hoist, own = builder.shared(request)
    request.hoist = before + hoist
    for index, (point, documents) in enumerate(zip(points, own, strict=True)):
        branch = table.new_branch(request, index, request.budget)
        branch.point = point
        branch.documents = documents
        request.branches.append(branch)


@op("answer.merge", writes="answers", commits=True)
def merge(branches: BranchStateManager, prompts: PromptBook) -> tuple[Answer, ...]:
    """The answers of all requests that have ended and were not handed over, in reading order."""
    return tuple(delivered(one, prompts) for one in branches.table.finished)


def delivered(request: Request, prompts: PromptBook) -> Answer:
    """A request's answer; one that cannot be put into words says why."""
    try:
        return answer(request, prompts)
    except Exception as error:  # of somebody's tokenizer
        why = reason_of(error)
        section = Section(0, "", "", (), str(Finish.FAILED), why)
        return Answer(request.key, request.question, None, (), "", (section,), "")


def answer(request: Request, prompts: PromptBook) -> Answer:
    """What a request has so far, finished or not."""
    sections = tuple(_section(b, prompts) for b in request.branches if not b.combines)
    combined = next((_section(b, prompts) for b in request.branches if b.combines), None)
    text = "\n\n".join(map(_with_heading, sections))
    if combined is not None and combined.text and combined.finish in FINISHED:
        text = combined.text
    root = request.root
    return Answer(
        request.key,
        request.question,
        request.outline,
        tuple(root.tokens) if root is not None else (),
        str(root.finish or "") if root is not None else "",
        sections,
        text,
        combined,
    )


def _section(branch: Branch, prompts: PromptBook) -> Section:
    return Section(
        branch.index,
        branch.title if branch.point or branch.combines or branch.request.samples > 1 else "",
        prompts.decode(branch.tokens).strip(),
        tuple(branch.tokens),
        str(branch.finish or Finish.CANCELLED),
        branch.note,
    )


def _with_heading(section: Section) -> str:
    if not section.title:
        return section.text
    return f"{section.index + 1}. {section.title}\n\n{section.text}"
