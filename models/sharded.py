"""A decoder that several ranks compute together, each with views of its own replica.

A rank has some KV heads with their query heads, some columns of the MLP and some rows of the head;
all else is whole on every rank. A layer takes two sums over all ranks, behind the attention and
behind the MLP, a forward one more gather, of the logits. No weight is copied, so ranks may form
another group at once. All ranks make the same forwards in the same order: logits and taps are the
same bits on each, and so is every decision that follows from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.blend import Blend
from ..ops.layer_plan import LayerPlan
from .decoder import Decoder, Share, part
from .files import ModelError
from .linear import Linear, replace_

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Place(NamedTuple):
    """A rank's number in its group, and the group's ranks in order."""

    number: int
    members: range


def place(rank: int, ranks: int, tp: int) -> Place:
    """The place of a rank in groups of every (ranks / tp)-th rank: its part of a group of all ranks
    is inside its part of any smaller group, so that regrouping moves no weight. ValueError if `tp`
    does not divide the number of ranks, or the rank is out of range."""
    if tp < 1 or ranks % tp or not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks} in groups of {tp}: the groups must come out even")
    groups = ranks // tp
    return Place(rank // groups, range(rank % groups, ranks, groups))


class RankLost(RuntimeError):
    """A collective failed: a rank is dead, hangs, or calls another collective."""


@dataclass(slots=True)
class Ranks:
    """This rank's place in a process group: its collectives, which fail for good once one
    has failed. The group's own timeout is the deadline: a rank that is dead or hangs is an error on
    all others after it, on GPUs (NCCL) by torch's watchdog, which ends the process.

    group: a process group; None for the default one. lost: why the group has failed, if it has."""

    group: Any
    index: int
    count: int
    lost: str = ""

    def sum_(self, x: Tensor) -> Tensor:
        """Sum over all ranks, in place; the same bits everywhere. Raises RankLost."""
        self._run("all_reduce", lambda members: members.allreduce([x]))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[...] of each rank, of one shape -> [count, ...], everywhere. Raises RankLost."""
        parts = x.new_empty(self.count, *x.shape)
        into = [list(parts.unbind())]
        self._run("all_gather", lambda members: members.allgather(into, [x.contiguous()]))
        return parts

    def first(self, number: int, device: torch.device) -> int:
        """The first rank's number; the device is that of the group's tensors. Raises RankLost."""
        return int(self.gather(torch.tensor(number, device=device))[0])

    def _run(self, what: str, collective: Callable[[Any], Any]) -> None:
        if self.lost:
            raise RankLost(self.lost)
        try:
            collective(dist.group.WORLD if self.group is None else self.group).wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self.lost = f"rank {self.index} of {self.count}: {what} failed: {reason}"
            raise RankLost(self.lost) from error


class ShardedDecoder(Decoder):
    """A `Decoder` on one rank; `kv_heads` are those of the rank and of its pool. replica: a
    whole one, or a share that holds what this rank needs.

    Raises ModelError: the weights are packed or in codes, or this rank's share is not among them.
    Raises ValueError: the ranks have different models, dtypes or numbers of threads."""

    def __init__(self, replica: Decoder, ranks: Ranks) -> None:
        config = replica.config
        share = Share.of(replica.config, ranks.index, ranks.count)
        inner_share = share.within(replica.share)
        if inner_share is None:
            reason = f"rank {ranks.index} of {ranks.count} needs weights that were not loaded here"
            raise ModelError(config.path, reason)
        with torch.device("meta"):
            super().__init__(config, share)
        self.ranks = ranks
        self.whole = True  # together with the other ranks
        for name in ("known_tokens", "notes", "weights", "frequencies_RF", "embed", "norm"):
            setattr(self, name, getattr(replica, name))
        columns = inner_share.columns
        heads = inner_share.kv_heads
        dim = config.head_dim

        def rows(first: int, size: int) -> range:
            """Of this rank's heads, in blocks of `size` rows behind the first."""
            return range(first + heads.start * size, first + heads.stop * size)

        try:
            for rank_layer, layer in zip(self.stack, replica.stack, strict=True):
                for name in (*filter(None, layer.norm_names), "qk_norm"):
                    setattr(rank_layer, name, getattr(layer, name))
                queries = rows(0, self.groups * dim)
                keys = rows(layer.heads * dim, dim)
                values = rows((layer.heads + layer.kv_heads) * dim, dim)
                up = range(layer.inner + columns.start, layer.inner + columns.stop)
                rank_layer.qkv = _rows(layer.qkv, (queries, keys, values))
                rank_layer.gate_up = _rows(layer.gate_up, (columns, up))
                rank_layer.o = _Summed(layer.o, queries, ranks)
                rank_layer.down = _Summed(layer.down, columns, ranks)
            vocabulary = inner_share.vocabulary
            self.lm_head = _Gathered(replica.lm_head, vocabulary, ranks, self.vocab_size)
        except ValueError as error:
            raise ModelError(config.path, str(error)) from None
        self.eval()
        sizes = [config.num_layers, config.hidden_size, config.heads, config.vocab_size]
        sizes += [self.known_tokens, DTYPES.index(self.dtype), torch.get_num_threads()]
        all_RN = ranks.gather(torch.tensor(sizes, device=self.embed.device)).tolist()
        if any(rank_N != all_RN[0] for rank_N in all_RN):
            raise ValueError(f"the ranks are not alike: {all_RN}")

    def _check(self, plan: LayerPlan, taps: tuple[int, ...], blend: Blend | None) -> None:
        if blend is not None:
            raise ValueError("CacheBlend compares rows over all heads, and a rank has only its own")
        super()._check(plan, taps, blend)


class _PartLinear(Linear):
    """Parts of a matrix, as views; no parameters of its own."""

    def __init__(self, *parts: Linear) -> None:
        nn.Module.__init__(self)
        self.register_parameter("bias", None)
        self.parts = parts


class _Rows(_PartLinear):
    """Several ranges of a matrix's rows: their products, next to each other."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert residual is None
        return torch.cat([layer.forward(x) for layer in self.parts], -1)


class _Summed(_PartLinear):
    """Some columns of a matrix: the ranks' products are added up."""

    def __init__(self, whole: Linear, columns: range, ranks: Ranks) -> None:
        super().__init__(_view(whole, range(whole.out_features), columns, bias=not ranks.index))
        self.ranks = ranks

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The first rank adds the residual and the bias."""
        return self.ranks.sum_(self.parts[0].forward(x, None if self.ranks.index else residual))


class _Gathered(_PartLinear):
    """Some rows of the head: every rank gets the logits of all."""

    def __init__(self, whole: Linear, rows: range, ranks: Ranks, vocabulary: int) -> None:
        super().__init__(_view(whole, rows, range(whole.in_features)))
        self.ranks = ranks
        self.sizes = [len(part(vocabulary, i, ranks.count)) for i in range(ranks.count)]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert residual is None
        rank_RV = self.parts[0].forward(x)
        if not x.shape[0]:
            return rank_RV.new_empty(0, sum(self.sizes))
        padded_RV = F.pad(rank_RV, (0, max(self.sizes) - rank_RV.shape[1]))
        parts = zip(self.ranks.gather(padded_RV), self.sizes, strict=True)
        return torch.cat([logits_RV[:, :size] for logits_RV, size in parts], -1)


def _rows(whole: Linear, ranges: Sequence[range]) -> Linear:
    columns = range(whole.in_features)
    if sum(map(len, ranges)) == whole.out_features:
        return _view(whole, range(whole.out_features), columns)
    return _Rows(*(_view(whole, span, columns) for span in ranges))


def _view(whole: Linear, rows: range, columns: range, bias: bool = True) -> Linear:
    """A part of a matrix, as a view; ValueError for a matrix in a layout without parts."""
    view = Linear(len(columns), len(rows), False, "meta")
    weight = whole.weight.detach()
    if (len(rows), len(columns)) == (whole.out_features, whole.in_features):
        view.row_IO = whole.row_IO
        view.kernel = whole.kernel
    elif weight.is_mkldnn or whole.row_IO is not None or whole.kernel is not None:
        raise ValueError("packed weights cannot be shared by ranks: load them with packed=False")
    else:
        weight = weight[rows.start : rows.stop, columns.start : columns.stop]
    replace_(view, "weight", weight)
    if bias and whole.bias is not None:
        replace_(view, "bias", whole.bias.detach()[rows.start : rows.stop])
    return view
