"""Who there is: requests, branches, what the pools hold of them, and who may start next."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from ...ops.blend.blend import Blend
from ...ops.kv.pool import NOBODY, KVCache
from ..graph.drafter_spec import Drafter
from ..graph.graph import AnyLayout
from ..layout.batching import BatchingLayout
from ..layout.bim import BimLayout
from ..layout.layout import Layout, Segment, Span
from ..layout.tree_rows import PlacedRows
from ..text.prompt_tokens import PromptTokens
from .admission import Room, choose, request_slots
from .blending import Blending, Reused
from .branch import Branch, Finish, Request, Stage
from .folding import Folding
from .ngram_memory import ngram_memory_of
from .samplers import Samplers

BuildPrompt = Callable[[Branch], PromptTokens]


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What a graph fixes for all requests of a run."""

    layout: AnyLayout
    drafter: Drafter
    share_outline: bool
    max_positions: int
    vocabulary: int


class RequestTable:
    """Requests and branches of a run, and the ownership of rows in both pools.

    Args:
        blending: how cached chunks are used; None computes every row.
        folding: how finished parts are combined; None leaves them as they are.

    Attributes:
        active: branches that run, in the order of every [S, ...] tensor.
        inbox: rows that the drafter has yet to take in.
        reused: which of an owner's rows came from cached chunks.
    """

    def __init__(
        self,
        kv: KVCache,
        kv_draft: KVCache | None,
        rules: RunLimits,
        build_prompt: BuildPrompt,
        blending: Blending | None = None,
        folding: Folding | None = None,
    ) -> None:
        self.kv, self.kv_draft, self.rules = kv, kv_draft, rules
        self.build_prompt, self.blending, self.folding = build_prompt, blending, folding
        self.pools = [pool for pool in (kv, kv_draft) if pool is not None]
        alone = rules.layout.kind == "batching"  # every branch in a row of its own
        device = kv.data.device
        self.layout: Layout = BatchingLayout(device, kv.rows) if alone else BimLayout(device)
        most, nodes = rules.layout.max_active, rules.drafter.offered
        self.room = Room(kv.capacity, most, nodes, kv.rows if alone else 0, rules.drafter.shared)
        self.requests: list[Request] = []
        self.active: list[Branch] = []
        self.inbox: list[Segment] = []
        self.reused: dict[int, Reused] = {}
        self.recall = ngram_memory_of(rules.drafter)
        self.samplers = Samplers(rules.vocabulary, device)
        self._owners = count()
        self._newcomers: list[Branch] = []
        self._opened: list[Request] = []
        self._placed: PlacedRows | None = None
        self._blend: Blend | None = None
        self._spans: list[Span] = []

    # -- requests -------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; it starts at the next admission that has room for it."""
        request.prefix_owner = next(self._owners)
        self.requests.append(request)
        limit = self.rules.max_positions  # what the model can never write needs no slots
        request.budget = min(request.budget, limit)
        request.outline_budget = min(request.outline_budget, limit)
        needed = request_slots(request) + self.room.tree_slots(1)
        given = len(request.given_ids) if self.rules.share_outline else 0
        prompt = len(request.prefix) + len(request.tail) + given
        if prompt >= limit:
            self._refuse(request, f"prompt of {prompt} tokens, the model takes {limit}")
        elif needed > self.kv.capacity:
            self._refuse(request, f"needs {needed} slots, the pool has {self.kv.capacity}")

    def cancel(self, key: str) -> None:
        """End a request at the next step boundary; what it has written so far is kept."""
        for request in self.requests:
            if request.key == key and not request.finished:
                request.cancelled = True

    def new_branch(self, request: Request, index: int, budget: int) -> Branch:
        return Branch(request, index, next(self._owners), min(budget, self.rules.max_positions))

    def _refuse(self, request: Request, why: str) -> None:
        branch = self.new_branch(request, 0, 0)
        branch.end(Finish.REFUSED, why)
        request.branches = [branch]
        request.stage = Stage.DONE

    def bim(self, owner: int) -> int:
        """The number a row of this owner is shown with: -1 for a prefix, else the branch index."""
        return next(
            (b.index for r in self.requests for b in r.all_branches() if b.owner == owner), -1
        )

    # -- who may start --------------------------------------------------------------------------

    def waiting(self) -> tuple[list[Branch], list[Request]]:
        """Branches and requests that could start now, those that combine parts left out."""
        branches, opened = self._who_may()
        return [b for b in branches if not b.combines], opened

    def folds(self) -> list[Branch]:
        """Branches that could start to combine finished parts now."""
        return [b for b in self._who_may()[0] if b.combines]

    def _who_may(self) -> tuple[list[Branch], list[Request]]:
        return choose(self.requests, len(self.active), self.room, self.rules.layout.order)

    # -- bookkeeping at every step boundary -----------------------------------------------------

    def retire_and_prepare_(self, ran: Iterable[Branch] = ()) -> None:
        """Retire what ended, prepare prompts that became known, refuse what can never run."""
        self._cancel_()
        self.active = [b for b in (*self.active, *ran) if b.stage is Stage.RUNNING]
        self.active = list(dict.fromkeys(self.active))
        for request in self.requests:
            if not request.finished:
                self._settle_request_(request)
        self._break_deadlock_()
        for pool in self.pools:
            if pool.holes > pool.current_length + 64:
                pool.compact_()

    def _cancel_(self) -> None:
        for request in self.requests:
            if request.cancelled and not request.finished:
                for branch in request.all_branches():
                    if branch.stage is not Stage.DONE:
                        branch.end(Finish.CANCELLED)
                if not request.branches:
                    branch = self.new_branch(request, 0, 0)
                    branch.end(Finish.CANCELLED)
                    request.branches = [branch]
                self._close_(request)
                self.retire_([request.prefix_owner, *(b.owner for b in request.all_branches())])

    def _close_(self, request: Request) -> None:
        request.stage = Stage.DONE
        for branch in request.branches:
            branch.leave_parts_()
        if self.recall is not None:
            self.recall.forget(request)

    def _settle_request_(self, request: Request) -> None:
        ended = [b for b in request.branches if b.stage is Stage.DONE]
        self.retire_([b.owner for b in ended])
        for branch in request.branches:
            if branch.stage is Stage.WAITING and not branch.prompt:
                self._prepare_(branch)
        if request.branches and all(b.stage is Stage.DONE for b in request.branches):
            self._fold_(request)
        if request.branches and all(b.stage is Stage.DONE for b in request.branches):
            self._close_(request)
            self.retire_([request.prefix_owner])
        elif request.branches and not any(b.stage is Stage.WAITING for b in request.branches):
            self.layout.prune_(request.prefix_owner, self.pools)

    def keep_parts_(self, ran: Iterable[Branch]) -> None:
        """What will be folded of branches that have just ended; their rows are given back next."""
        for branch in ran:
            if self.folding is not None and branch.stage is Stage.DONE:
                slots = self.kv.slots_of(branch.owner, self.layout.rows_of(branch.owner)[0])
                self.folding.keep_(branch, self.kv, slots)

    def _fold_(self, request: Request) -> None:
        """The last branch of a request whose parts are all done, if they are to be combined."""
        if self.folding is None or request.branches[-1].combines:
            return
        written = self.folding.written(request)
        if written is not None:
            branch = self.new_branch(request, len(request.branches), request.budget)
            branch.combines = True
            branch.prompt, branch.chunks = list(written.ids), written.chunks
            request.branches.append(branch)
            self.check_fit_(branch)

    def _prepare_(self, branch: Branch) -> None:
        """Build the prompt once everything the branch depends on is finished."""
        request, point = branch.request, branch.point
        needs = set(point.deps) if point else set()
        if any(
            b.stage is not Stage.DONE for b in request.branches if b.point and b.point.id in needs
        ):
            return
        written = self.build_prompt(branch)
        branch.prompt, branch.chunks = list(written.ids), written.chunks
        self.check_fit_(branch)

    def check_fit_(self, branch: Branch) -> None:
        """Refuse a branch, by name and with the numbers, whose prompt can never be run."""
        prefix = branch.request.prefix_length + len(branch.request.hoist)
        context = prefix + len(branch.prompt)
        needed = self.room.alone(prefix, len(branch.prompt), branch.budget)
        if context >= self.rules.max_positions:
            limit = self.rules.max_positions
            branch.end(Finish.REFUSED, f"context of {context} tokens, the model takes {limit}")
        elif needed > self.kv.capacity:
            why = f"needs {needed} slots, the pool has {self.kv.capacity}"
            branch.end(Finish.REFUSED, why)

    def _break_deadlock_(self) -> None:
        """If nothing runs and nobody fits, the first who waits is refused: never a hang."""
        while not self.active and not any(self._who_may()):
            stuck = [b for r in self.requests for b in r.branches if b.stage is Stage.WAITING]
            late = [r for r in self.requests if r.stage is Stage.WAITING]
            if any(r.stage is Stage.OUTLINE for r in self.requests) or not (stuck or late):
                return
            if stuck:
                stuck[0].end(Finish.REFUSED, "no room beside the other requests")
                self._settle_request_(stuck[0].request)
            else:
                self._refuse(late[0], "no room beside the other requests")

    def retire_(self, owners: Sequence[int]) -> None:
        """Give back all rows of these owners, in both pools and in the drafter's inbox."""
        gone = set(owners)
        for pool in self.pools:
            pool.retire_(owners)
        self.layout.leave_(owners)
        for owner in owners:
            self.reused.pop(owner, None)
        self.samplers.forget(owners)
        self.inbox = [s for s in self.inbox if s.owner not in gone]

    def promote_root_(self, request: Request) -> None:
        """The outline's rows stay and become the prefix: relabelled, 0 bytes moved."""
        root = request.root
        assert root is not None
        for pool in self.pools:
            pool.relabel_(root.owner, request.prefix_owner)
        self.layout.leave_([root.owner])
        self.inbox = [
            Segment(request.prefix_owner, NOBODY, s.position, s.tokens, s.features)
            if s.owner == root.owner
            else s
            for s in self.inbox
        ]
        request.prefix_length, request.prefix_feature = root.length, root.feature
        request.context += [*root.prompt, *root.tokens[: root.kept]]
