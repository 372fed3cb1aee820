"""The layers of a decoder as one compiled function."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops.attention.backends import AttentionBackend, AttentionPlan
from ..ops.attention.metadata import SlotRun
from ..ops.kv.pool import KVCache
from .layer_kernels import run_layers
from .layers import DecoderLayer, PoolModel
from .packed import PackedWeight


class CompiledLayers:
    """Layers of a model, each with the addresses of what it multiplies with. mixes: the first one
    gets the input of its attention, beside the residual, and does not normalise."""

    def __init__(self, model: PoolModel, layers: Sequence[DecoderLayer], mixes: bool) -> None:
        self._kept: list[Any] = []  # what the addresses point to
        addresses = [self._addresses(layer, mixes) for layer in layers]
        self._layers_LA = np.array(addresses, np.int64)
        layer = layers[0]
        self._sizes = (layer.heads, layer.kv_heads, layer.head_dim, layer.inner)
        self._eps = layer.eps
        self._narrow = model.narrows[model.kinds[0]]
        self._model = model

    @classmethod
    def of(
        cls, model: PoolModel, layers: Sequence[DecoderLayer], mixes: bool = False
    ) -> "CompiledLayers | None":
        """None unless kernels multiply here, all layers see the same masks and have SwiGLU."""
        packed = all(isinstance(layer.down.kernel, PackedWeight) for layer in layers)
        alike = len(set(model.kinds)) == 1 and layers[0].kv_heads > 0
        if not (packed and alike and layers[0].activation is torch.nn.functional.silu):
            return None
        return cls(model, layers, mixes)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """One row through the layers: numba compiles at the first call, and reads its cache."""
        model = self._model
        shape = (model.num_layers, model.kv_heads, model.head_dim, 1)
        row_1 = torch.zeros(1, dtype=torch.int64)
        self.run(
            torch.zeros(1, model.hidden_size),
            positions_N=row_1,
            slots_N=row_1,
            attention=AttentionPlan.causal(1),
            kv=KVCache(*shape, dtype=model.dtype),
        )

    def takes(self, attention: AttentionPlan) -> bool:
        """Whether a plan is computed here: that of a backend with a way of its own is not."""
        return not attention.merged and type(attention.backend).run is AttentionBackend.run

    def _addresses(self, layer: DecoderLayer, mixes: bool) -> list[int]:
        def of(numbers: Tensor) -> int:
            array = numbers.detach().double().contiguous().numpy()
            self._kept.append(array)
            return int(array.ctypes.data)

        def linear(part: Any) -> list[int]:
            bias = 0 if part.bias is None else of(part.bias)
            return [*part.kernel.fields, bias]

        qk_norm = 0 if layer.qk_norm is None else of(layer.qk_norm)
        norm = 0 if mixes else of(layer.input_layernorm.weight)
        first = [norm, *linear(layer.qkv), qk_norm]
        last = [of(layer.post_attention_layernorm.weight), *linear(layer.gate_up)]
        return [*first, *linear(layer.o), *last, *linear(layer.down)]

    def run(
        self,
        x_NH: Tensor,
        *,
        mixed_NW: Tensor | None = None,
        positions_N: Tensor,
        slots_N: Tensor,
        attention: AttentionPlan,
        kv: KVCache,
        taps: Sequence[int] = (),
    ) -> list[Tensor]:
        """Rows through all layers -> the rows at each tap before the last, in order, and after the
        last layer. mixed_NW: the input of the first layer's attention, if it mixes."""
        model = self._model
        layers = len(self._layers_LA)
        inner = [tap for tap in taps if tap < layers]
        tapped_TNH = torch.empty(len(inner), *x_NH.shape, dtype=torch.float64)
        groups_X, masks = self._groups(attention, positions_N)
        cos_N1d, sin_N1d = model.angles(positions_N)
        wide_NH = x_NH.to(torch.float64, copy=True)
        mixed_NW = wide_NH[:0] if mixed_NW is None else mixed_NW.double().contiguous()
        data = kv.data if kv.data.dtype != torch.bfloat16 else kv.data.view(torch.int16)
        run_layers(
            x_NH=wide_NH.numpy(),
            mixed_NW=mixed_NW.numpy(),
            layers_LA=self._layers_LA,
            sizes=self._sizes,
            eps=self._eps,
            cos_Nd=cos_N1d[:, 0].double().numpy(),
            sin_Nd=sin_N1d[:, 0].double().numpy(),
            slots_N=slots_N.contiguous().numpy(),  # one type of array: numba compiles once
            kv_LtgSd=data.numpy(),
            groups_X=groups_X,
            taps_T=np.array(inner, np.int64),
            tapped_TNH=tapped_TNH.numpy(),
        )
        del masks  # no address of them is used any more
        return [*tapped_TNH.to(x_NH.dtype).unbind(), wide_NH.to(x_NH.dtype)]

    def _groups(self, attention: AttentionPlan, positions_N: Tensor) -> tuple[Any, list[Tensor]]:
        """For each group of a plan: the address of its rows (0: all, in order), its sequences,
        queries of each and slots of each, the address of the slots (0: runs), the first slot and
        the distance of two runs, and the address of the mask; and what the addresses point to."""
        kept: list[Tensor] = []
        lines = []
        for group in attention.groups:
            mask_GqK = group.mask_GqK
            if self._narrow is not None:
                positions_Gq = group.of_rows(positions_N)
                mask_GqK = self._narrow(mask_GqK, positions_Gq, group.positions_GK)
            mask_GqK = mask_GqK.contiguous()
            kept.append(mask_GqK)
            rows = 0
            if group.rows_Gq is not None:
                kept.append(group.rows_Gq.contiguous())
                rows = kept[-1].data_ptr()
            slots = first = stride = 0
            if isinstance(group.keys, SlotRun):
                first = group.keys.first
                stride = group.keys.stride
            else:
                kept.append(group.keys.contiguous())
                slots = kept[-1].data_ptr()
            lines.append([rows, *mask_GqK.shape, slots, first, stride, mask_GqK.data_ptr()])
        return np.array(lines, np.int64).reshape(-1, 8), kept
