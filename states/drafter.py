"""What a drafter is: one object that proposes a token tree for every branch of a run.

A round calls `intake_` (lay out the rows committed since the drafter's last forward), `root` (one
forward over them, which proposes the first level) and `grow` (deepen, return the proposal). Torch
is imported inside methods only, since `specsot check` reads the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from .graph.drafter_settings import DrafterSettings, largest, nodes_for

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from ..ops.attention.backends import AttentionPlan
    from ..ops.draft.gamma import GammaRecord
    from ..ops.draft.ngram import HostTree
    from ..ops.draft.sizes import RoundCosts
    from ..ops.kv.pool import KVCache
    from ..ops.types import DraftRows, DraftWork, Proposal
    from .layout import Layout
    from .request import Branch, Request
    from .request_table import RequestTable
    from .round import CommittedRows, PendingRows, RoundResult
    from .sampling import Samplers


SALTS = 8  # cache salts of whose requests a drafter keeps something
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """What a drafter uses of its run: its network and KV pool, if it has them; the acceptance rule;
    costs to choose sizes by. outlines: drafts for outlines only, for all others, for all (None)."""

    table: RequestTable
    layout: Layout
    samplers: Samplers
    model: Any = None
    kv: KVCache | None = None
    accept: str = "match"
    costs: RoundCosts | None = None
    outlines: bool | None = None


class TextRows(NamedTuple):
    """Rows of one text, whose slots in `kv` are their positions; features_QF: those of the target
    that they read, zeros if not given."""

    tokens_1Q: Tensor
    slots_1Q: Tensor
    attention: AttentionPlan
    kv: KVCache
    features_QF: Tensor | None = None


class Drafter:
    """Base of all drafters. A kind overrides `grow`, and what it needs of the rest.

    Attributes:
        Settings: the block `drafter` of a graph, whose `kind` registers the class.
        loader: the function of `models/load/weights.py` that reads its checkpoints.
        lookback: how many tokens after a row determine it besides those before (`PrefixCache`).
        reads_root: whether the root token has a row before the round, besides all before it.
        inbox: committed rows that the drafter's next forward reads.
        memory: what a kind keeps by segment; it follows and ends with the segment's rows.
        learns: whether `learn` reads the target's best tokens, in rounds of other drafters too.
        columns_F: int64, which columns of the target's features are its own; None for all."""

    Settings: ClassVar[type[DrafterSettings]]
    loader: ClassVar[str] = ""
    lookback: int = 0
    reads_root: ClassVar[bool] = False
    learns: ClassVar[bool] = False

    def __init__(self, settings: DrafterSettings, context: DraftContext) -> None:
        self.settings = settings
        self.context = context
        self.model = context.model
        self.kv: Any = context.kv
        self._num_nodes: dict[int, int] = {}  # by number of branches
        self._no_drafts: dict[tuple[int, bool], Proposal] = {}  # by number of branches, candidates
        self.inbox: list[PendingRows] = []
        self.columns_F: Tensor | None = None
        self.chooser: Any = None  # of the sizes that are left open, or of drafters
        self.waits = False  # whether another drafter drafts in this round (`AutoDrafter`)
        self.candidates = True  # whether its proposals ask for the target's best tokens
        self.memory: tuple[dict[int, Any], ...] = ()
        costs = context.costs
        if settings.chooses and costs is not None:
            from ..ops.draft.sizes import ChainChooser, TreeChooser

            most = largest(settings.offered)
            depth = getattr(settings, "draft_depth", 1)
            if settings.is_chain:
                self.chooser = ChainChooser(costs, most)
            else:
                self.chooser = TreeChooser(costs, most, depth, settings.forward_rows)
            self.memory = (self.chooser.by_owner,)

    @classmethod
    def load(cls, folder: Path, target: Any, dtype: torch.dtype, device: torch.device) -> Any:
        """The network of a checkpoint, for a kind with `has_model`; raises ModelError."""
        if not cls.loader:
            raise NotImplementedError(f"{cls.__name__} has a model, but no method `load`")
        from ..models.load import weights

        return getattr(weights, cls.loader)(folder, target, dtype=dtype, device=device)

    @classmethod
    def completed(cls, settings: DrafterSettings, model: Any) -> DrafterSettings:
        """The settings of a kind with `has_model`, with what the graph leaves to the checkpoint."""
        return settings

    @classmethod
    def logits(cls, model: Any, text: TextRows) -> Tensor:
        """float32 [Q, V]: one forward over rows of one text."""
        raise NotImplementedError(f"{cls.__name__} has a model, but no method `logits`")

    def write_rows_(
        self, tokens_1Q: Tensor, rows: int, features_QF: Tensor | None, kv: KVCache
    ) -> None:
        """Write the first rows of a longer text into an empty pool, as the rounds of a run do."""
        import torch

        from ..ops.attention.backends import AttentionPlan

        steps_1Q = torch.arange(rows, device=tokens_1Q.device)[None]
        attention = AttentionPlan.causal(rows, tokens_1Q.device)
        read_1Q = tokens_1Q[:, self.lookback : self.lookback + rows]
        text = TextRows(read_1Q, steps_1Q, attention, kv=kv, features_QF=features_QF)
        self.logits(self.model, text)

    # -- a round ----------------------------------------------------------------------------------

    def reads(self) -> bool:
        """Whether it reads the rows of a request that starts now. A drafter with a KV pool drafts
        for no other requests."""
        return self.kv is not None or type(self).observe is not Drafter.observe

    def serves(self, branch: Branch) -> bool:
        is_read = self.kv is None or branch.request.drafted
        return is_read and self.context.outlines in (None, branch.is_root)

    @property
    def active(self) -> list[Branch]:
        """The running branches that it drafts for, in the order of its [S, ...] tensors."""
        active = self.context.table.active
        if self.context.outlines is None and self.kv is None:
            return active
        return [branch for branch in active if self.serves(branch)]

    def intake_(self, *, attention: str = "auto") -> DraftRows | tuple[Branch, ...]:
        """The rows committed since its last forward, in its pool; the active branches where no
        forward is needed: without a pool, or drafts, whose rows no other branch continues."""
        active = self.active
        can_wait = self.kv is None
        if self.chooser is not None and active and not self.waits:
            remaining = [branch.budget - len(branch.tokens) - 1 for branch in active]
            unread = sum(len(rows.tokens) for rows in self.inbox)
            self.chooser.choose_([branch.owner for branch in active], remaining, unread)
        if not (can_wait or self.num_nodes(len(active))):  # if every row follows a prompt
            starts = {branch.owner: branch.start + len(branch.prompt) for branch in active}
            can_wait = all(
                rows.owner in starts and rows.position >= starts[rows.owner] for rows in self.inbox
            )
        if can_wait:
            return tuple(active)
        pending = self.inbox
        self.inbox = []
        tips = [(branch.owner, branch.length, branch.tokens[-1]) for branch in active]
        rows = self.context.layout.place_draft_(self.kv, pending, tips)
        sampled = [branch for branch in active if not branch.request.sampling.plain]
        sampler = self.context.samplers.of(active) if sampled else None
        return replace(rows, sampler=sampler, attention=attention)

    def root(self, batch: DraftRows | tuple[Branch, ...]) -> Any:
        """Read the rows of `intake_` in one forward and propose the first level: the frontier."""
        return batch

    def grow(self, frontier: Any) -> Proposal:
        """Deepen the trees of all active branches and free the temporary rows."""
        active = self.active
        nodes = self.num_nodes(len(active)) if self.settings.drafts else 0
        return self.propose(active, nodes) if nodes else self.no_drafts(len(active))

    def propose(self, branches: Sequence[Branch], nodes: int) -> Proposal:
        """Trees of at most `nodes` nodes, by a drafter without a forward."""
        from ..ops.draft.proposals import pack

        device = self.context.layout.device
        trees = [self.tree_(branch, nodes) for branch in branches]
        return pack(trees, device, candidates=self.candidates)

    def tree_(self, branch: Branch, nodes: int) -> HostTree:
        """A tree of at most `nodes` nodes."""
        raise NotImplementedError(f"{type(self).__name__} has no method `tree_`, nor `grow`")

    def expected_(self, branch: Branch, nodes: int) -> tuple[float, int]:
        """Tokens that such a tree is expected to give, and about how many nodes it has, in less
        time than `tree_` takes; `learn` of this round follows."""
        raise NotImplementedError(f"{type(self).__name__} has no method `expected_`")

    def no_drafts(self, branches: int, work: DraftWork | None = None) -> Proposal:
        """Trees [S, 0]: verifying them is one ordinary decoding step of all branches."""
        import torch

        from ..ops.types import Proposal

        key = branches, self.candidates
        if key not in self._no_drafts:
            device = self.context.layout.device
            with torch.inference_mode(False):
                none_S0 = torch.zeros(branches, 0, dtype=torch.int64, device=device)
                nodes = none_S0, none_S0, none_S0, none_S0.bool(), none_S0.float()
            self._no_drafts[key] = Proposal(
                *nodes, levels=0, is_chain=True, candidates=self.candidates
            )
        proposal = self._no_drafts[key]
        return proposal if work is None else replace(proposal, work=work)

    def num_nodes(self, branches: int) -> int:
        """Drafted tokens of each tree while `branches` branches share the round; 0: no drafts."""
        if self.waits:
            return 0
        if self.chooser is not None:
            return int(self.chooser.choice.size)
        if branches not in self._num_nodes:
            self._num_nodes[branches] = nodes_for(self.settings.offered, branches)
        return self._num_nodes[branches]

    def observe(self, rows: CommittedRows) -> None:
        """Committed rows of a segment that later tokens depend on."""

    def learn(
        self, branches: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        """The outcome of its proposal for these branches: the accepted nodes of each tree, the root
        first. Returns what the trace reports of each branch; nothing for most kinds."""
        if self.chooser is not None and branches:
            self.chooser.learn_([branch.owner for branch in branches], paths)
        return ()

    def promote(self, root: Branch) -> None:
        """The rows of an outline become rows of its request's prefix."""
        prefix = root.request.prefix_owner
        self.inbox = [
            replace(rows, owner=prefix) if rows.owner == root.owner else rows for rows in self.inbox
        ]
        for kept in self.memory:
            if root.owner in kept:
                kept[prefix] = kept.pop(root.owner)

    def truncate(self, owner: int, length: int) -> None:
        """A segment ends at position `length`."""
        self.inbox = [rows if rows.owner != owner else rows.before(length) for rows in self.inbox]
        for kept in self.memory:
            kept.pop(owner, None)

    def forget(self, owners: Sequence[int]) -> None:
        """The rows of these segments are freed."""
        self.inbox = [rows for rows in self.inbox if rows.owner not in owners]
        for kept in self.memory:
            for owner in owners:
                kept.pop(owner, None)

    def close(self, request: Request) -> None:
        """A request has ended."""

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """Itself, or the drafters that it consists of."""
        return (self,)

    def queue(
        self, owner: int, position: int, tokens: Sequence[int], features_RF: Tensor | None = None
    ) -> None:
        """Add rows to the inbox: tokens[i] with features_RF[i] at `position + i`."""
        from .round import PendingRows

        if tokens:
            features_RF = None if features_RF is None else features_RF[: len(tokens)]
            self.inbox.append(PendingRows(owner, position, tokens, features_RF))


def committed_features(rows: CommittedRows, columns_F: Tensor | None = None) -> Tensor | None:
    """[R, F] features of committed rows, all columns or some; None if the target has no taps."""
    if rows.features_QF is None:
        return None
    import torch

    index = torch.tensor(rows.rows, dtype=torch.int64, device=rows.features_QF.device)
    features_RF = rows.features_QF.index_select(0, index)
    return features_RF if columns_F is None else features_RF.index_select(1, columns_F)


def remembered_(memory: dict[str, T], salt: str, make: Callable[[], T]) -> T:
    """What a drafter keeps for the requests of a cache salt: of the SALTS last used ones."""
    kept = memory.pop(salt) if salt in memory else make()
    memory[salt] = kept
    while len(memory) > SALTS:
        del memory[next(iter(memory))]
    return kept


class NoDrafterSettings(DrafterSettings):
    """Plain decoding: one token per branch and round. The baseline, through the same machine."""

    kind: Literal["none"]
    drafts: ClassVar[bool] = False


class NoDrafter(Drafter):
    """Trees without drafts."""

    Settings = NoDrafterSettings


class TwoDrafters(Drafter):
    """Splits the branches between its parts; between ops a value is a pair, each of it or None."""

    def __init__(self, main: Drafter, outlines: Drafter) -> None:
        super().__init__(main.settings, replace(main.context, costs=None))
        self.main = main
        self.outlines = outlines
        self.both = (main, outlines)
        self.lookback = max(main.lookback, outlines.lookback)

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (*self.main.parts, *self.outlines.parts)

    def reads(self) -> bool:
        return any(part.reads() for part in self.both)

    def intake_(self, *, attention: str = "auto") -> Any:
        return tuple(
            part.intake_(attention=attention) if part.active else None for part in self.both
        )

    def root(self, batch: Any) -> Any:
        pairs = zip(self.both, batch, strict=True)
        return tuple(None if rows is None else part.root(rows) for part, rows in pairs)

    def grow(self, frontier: Any) -> Proposal:
        from ..ops.draft.proposals import join

        pairs = zip(self.both, frontier, strict=True)
        active = self.context.table.active
        places = [
            [at for at, branch in enumerate(active) if part.serves(branch)] for part in self.both
        ]
        return join([None if value is None else part.grow(value) for part, value in pairs], places)

    def observe(self, rows: CommittedRows) -> None:
        self.main.observe(rows)
        if rows.branch is None or rows.branch.is_root:
            self.outlines.observe(rows)

    def learn(
        self, branches: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        records: list[GammaRecord] = []
        for part in self.both:
            trees = [tree for tree, branch in enumerate(branches) if part.serves(branch)]
            served = [branches[tree] for tree in trees]
            own = replace(
                result,
                tokens_ST=result.tokens_ST[trees],
                parents_ST=result.parents_ST[trees],
                bonus_S=result.bonus_S[trees],
                side_outputs_SC=result.side_outputs_SC[trees],
            )
            records += part.learn(served, own, [paths[tree] for tree in trees])
        return tuple(records)


class MixedDrafter(Drafter):
    """One tree of the nodes of a main drafter and of others, which need no forward; each has its
    own reliability."""

    def __init__(self, main: Drafter, others: Sequence[Drafter]) -> None:
        from ..ops.draft.reliability import Reliability

        super().__init__(main.settings, replace(main.context, costs=None))
        self.main = main
        self.others = others
        self.lookback = main.lookback
        self.reliabilities = [Reliability() for _ in self.parts]
        self._nodes = 0  # of the trees of this round

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (self.main, *self.others)

    def intake_(self, *, attention: str = "auto") -> Any:
        return self.main.intake_(attention=attention)

    def root(self, batch: Any) -> Any:
        return self.main.root(batch)

    def grow(self, frontier: Any) -> Proposal:
        from ..ops.draft.mixed import ends, mix

        main = self.main.grow(frontier)
        active = self.active
        nodes = self.main.num_nodes(len(active))
        self._nodes = 0
        if not nodes:
            return main
        others = [part.propose(active, nodes) for part in self.others]
        device = main.tokens_SN.device
        logs = [ends(source, device) for source in self.reliabilities]
        mixed = mix([main, *others], logs, nodes)
        self._nodes = mixed.tokens_SN.shape[1]
        return replace(mixed, work=main.work)

    def observe(self, rows: CommittedRows) -> None:
        for part in self.parts:
            part.observe(rows)

    def learn(
        self, branches: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        from ..ops.draft.mixed import learn_

        tokens_ST = result.tokens_ST.tolist()
        columns = self._nodes * (2 + len(self.parts))
        rows = zip(tokens_ST, result.parents_ST.tolist(), paths, strict=True)
        for sides_C, row in zip(result.side_outputs_SC, rows, strict=True):
            learn_(self.reliabilities, sides_C[:columns], *row)
        for part in self.others:
            part.learn(branches, result, paths)
        return self.main.learn(branches, result, paths)
