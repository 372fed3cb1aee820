"""A decoder that several ranks compute together, each with views of its own replica.

A rank has some KV heads with their query heads, some columns of the MLP and some rows of the head;
what lies between two layers, and embedding, norms and positions, every rank has whole. A layer
takes two sums over all ranks, behind the attention and behind the MLP, a forward one more gather,
of the logits. Nothing of a weight is copied, so whoever formed a group may form another at once.

All ranks must make the same forwards in the same order. They can: logits and taps are the same bits
on each, and so is every decision that follows from them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.blend import Blend
from ..ops.layer_plan import LayerPlan
from .decoder import Decoder
from .files import ModelError
from .layers import DecoderLayer
from .linear import Linear, replace_
from .ranks import Ranks
from .shares import Share, part
from .stack import DecoderStack

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def sharded(target: DecoderStack, group: Any, rank: int, ranks: int) -> Decoder:
    """What this rank of a group computes a target with, together with the others.

    Args:
        target: a whole replica, or a share of one that holds what this rank needs.
        group: of torch.distributed, with a timeout; rank, ranks: the place in it.

    Raises:
        ModelError: the weights are packed or in codes, or this rank's share is not among them.
        ValueError: the ranks have different models, dtypes or numbers of threads.
    """
    if ranks == 1 and isinstance(target, Decoder):
        return target
    return ShardedDecoder(target, Ranks(group, rank, ranks))


class ShardedDecoder(Decoder):
    """Implements `Target` on one rank; `kv_heads` are its own, and those of its pool."""

    def __init__(self, replica: DecoderStack, ranks: Ranks) -> None:
        config = replica.config
        share = Share.of(replica.config, ranks.index, ranks.count)
        held = share.within(replica.share)
        if held is None:
            reason = f"rank {ranks.index} of {ranks.count} needs weights that were not loaded here"
            raise ModelError(config.path, reason)
        with torch.device("meta"):
            super().__init__(config, share)
        self.ranks: Ranks = ranks
        self.known = replica.known
        self.notes = replica.notes
        self.weights = getattr(replica, "weights", self.weights)
        self.register_buffer("frequencies", replica.frequencies, persistent=False)
        self.embed = replica.embed
        self.norm = replica.norm
        try:
            for own, layer in zip(self.layers, replica.layers, strict=True):
                assert isinstance(own, DecoderLayer) and isinstance(layer, DecoderLayer)
                _lend_(own, layer, held, self.groups, ranks)
            self.lm_head = _Gathered(replica.lm_head, held.vocabulary, ranks, self.vocab_size)
        except ValueError as error:
            raise ModelError(config.path, str(error)) from None
        self.eval()
        sizes = (config.num_layers, config.hidden_size, config.heads, config.vocab_size, self.known)
        kinds = DTYPES.index(self.dtype), torch.get_num_threads()
        ranks.check_alike((*sizes, *kinds), self.embed.device)

    def _check(self, plan: LayerPlan, taps: tuple[int, ...], blend: Blend | None) -> None:
        if blend is not None:
            raise ValueError("CacheBlend compares rows over all heads, and a rank has only its own")
        super()._check(plan, taps, blend)


def _lend_(own: DecoderLayer, layer: DecoderLayer, held: Share, groups: int, ranks: Ranks) -> None:
    """Give a layer of this rank its views of one that holds more.

    Args:
        held: the rank's share, counted from where the layer's begins. groups: query heads of a key
            head.
    """
    heads = held.kv_heads
    dim = layer.head_dim
    queries = range(heads.start * groups, heads.stop * groups)
    fused = (0, queries), (layer.heads, heads), (layer.heads + layer.kv_heads, heads)
    columns = held.columns
    inner = layer.down.in_features
    own.input_norm = layer.input_norm
    own.post_norm = layer.post_norm
    own.qk_norm = layer.qk_norm
    own.qkv = _rows(layer.qkv, (_moved(one, first, dim) for first, one in fused))
    own.gate_up = _rows(layer.gate_up, (columns, _moved(columns, inner)))
    own.o = _Summed(layer.o, _moved(queries, 0, dim), ranks)
    own.down = _Summed(layer.down, columns, ranks)


def _moved(some: range, first: int, times: int = 1) -> range:
    """So many numbers for each of some, counted from another beginning."""
    return range((first + some.start) * times, (first + some.stop) * times)


class _Rows(Linear):
    """Several ranges of a matrix's rows: their products, side by side."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        nn.Module.__init__(self)
        self.register_parameter("bias", None)
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([one.forward(x) for one in self.parts], -1)


class _Summed(Linear):
    """Some columns of a matrix: what all ranks make of theirs is added up."""

    def __init__(self, whole: Linear, columns: range, ranks: Ranks) -> None:
        nn.Module.__init__(self)
        self.register_parameter("bias", None)
        self.ranks = ranks
        self.part = _view(whole, range(whole.out_features), columns, bias=not ranks.index)

    def added(self, residual_NH: Tensor, x_NI: Tensor) -> Tensor:
        """The residual, and the bias, are the first rank's to add."""
        first = not self.ranks.index
        part_NH = self.part.added(residual_NH, x_NI) if first else self.part.forward(x_NI)
        return self.ranks.sum_(part_NH)


class _Gathered(Linear):
    """Some rows of the head: everybody gets the logits of all."""

    def __init__(self, whole: Linear, rows: range, ranks: Ranks, vocabulary: int) -> None:
        nn.Module.__init__(self)
        self.register_parameter("bias", None)
        self.ranks = ranks
        self.part = _view(whole, rows, range(whole.in_features))
        self.sizes = [len(part(vocabulary, i, ranks.count)) for i in range(ranks.count)]

    def forward(self, x: Tensor) -> Tensor:
        own_RV = self.part.forward(x)
        if not len(x):
            return own_RV.new_empty(0, sum(self.sizes))
        padded_RV = F.pad(own_RV, (0, max(self.sizes) - own_RV.shape[1]))
        parts = zip(self.ranks.gather(padded_RV), self.sizes, strict=True)
        return torch.cat([logits_RV[:, :size] for logits_RV, size in parts], -1)


def _rows(whole: Linear, ranges: Iterable[range]) -> Linear:
    """These ranges of a matrix's rows; neighbours become one."""
    merged = list[range]()
    for one in ranges:
        if merged and merged[-1].stop == one.start:
            one = range(merged.pop().start, one.stop)
        merged.append(one)
    parts = [_view(whole, one, range(whole.in_features)) for one in merged]
    return parts[0] if len(parts) == 1 else _Rows(parts)


def _view(whole: Linear, rows: range, columns: range, bias: bool = True) -> Linear:
    """A part of a matrix, where it lies.

    Raises:
        ValueError: it lies in a layout that has no parts.
    """
    view = Linear(len(columns), len(rows), False, "meta")
    weight = whole.weight.detach()
    has_bias = bias and whole.bias is not None
    if (len(rows), len(columns)) == (whole.out_features, whole.in_features):
        view.few = whole.few
        view.few_rows = whole.few_rows
    elif weight.is_mkldnn or whole.few is not None:
        raise ValueError("packed weights cannot be shared by ranks: load them with packed=False")
    else:
        weight = weight[rows.start : rows.stop, columns.start : columns.stop]
    replace_(view, "weight", weight)
    if has_bias:
        replace_(view, "bias", whole.bias.detach()[rows.start : rows.stop])
    return view
