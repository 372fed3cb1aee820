"""Products with weights that are stored as oneDNN multiplies with them.

`F.linear` on a CPU is slow in float32 for the few rows of a round, and in bfloat16 brings the whole
weight into oneDNN's layout at every call. Packed once, five rows cost what one does
(docs/performance.md), and a row's sums hardly ever depend on how many rows there are."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from timeit import repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .files import ModelError
from .integer import IntegerWeight, integer_reference_

SMALL_MODEL = 16_000_000  # weights

ONEDNN: Any = torch.ops.mkldnn  # the operators that torch.compile makes of frozen weights
SUPPORT_CHECKS = {  # which of them say whether a processor has products in a dtype
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}

FULL = "full"
INT8 = "int8"
INT4 = "int4"
GROUP_SIZE = 32  # numbers of a row that share a scale in int4
INT4_ROWS = 32  # the product in four bits takes a multiple of as many rows of a matrix
MEASURED_ROWS = (1, 2, 4, 8, 16, 32)  # of a forward
MEASURED_LAYERS = 8
ATEN: Any = torch.ops.aten

FewRows = Callable[[Tensor, Tensor | None], Tensor]
"""(x_NI, a term to add [N, O] or [O]) -> [N, O], by a weight of its own."""


@lru_cache(1 << 13)
def padding(count: int) -> int:
    """Rows of zeros to add to `count` rows: oneDNN makes a kernel for every number of rows, which
    takes 0.3 ms and half a megabyte for good. With an eighth more rows at most there are eight
    kernels between one power of two and the next."""
    return -count % (1 << max(count.bit_length() - 4, 0))


def linear(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """[N, I] -> [N, O] by a weight that is packed or not."""
    if not weight_OI.is_mkldnn:
        return F.linear(x_NI, weight_OI)
    count = x_NI.shape[0]
    if extra := padding(count):
        x_NI = F.pad(x_NI, (0, 0, 0, extra))
    out_NO: Tensor = ONEDNN._linear_pointwise(x_NI, weight_OI, None, "none", [], "")
    return out_NO[:count] if extra else out_NO


def one_row(weight_IO: Tensor, x_NI: Tensor, added: Tensor | None) -> Tensor:
    """One row by the weight as MKL multiplies it."""
    return torch.mm(x_NI, weight_IO) if added is None else torch.addmm(added, x_NI, weight_IO)


def coded_rows(
    kernel: Any, arguments: tuple[Any, ...], x_NI: Tensor, added: Tensor | None
) -> Tensor:
    """Rows by packed codes, the `arguments` of a kernel."""
    out_NO: Tensor = kernel(x_NI, *arguments)
    return out_NO if added is None else out_NO.add_(added)


class Linear(nn.Linear):
    """`nn.Linear` that can be packed for inference, which makes `weight` a buffer; `few` multiplies
    up to `few_rows` rows faster."""

    few: FewRows | None = None
    few_rows = 0
    integer: IntegerWeight | None = None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias, plus the residual [N, O]. Without a bias, one kernel does both."""
        bias = self.bias
        if self.integer is not None:
            wide = self.integer.product(x, residual if bias is None else bias)
            return (wide if residual is None or bias is None else wide + residual).to(x.dtype)
        if residual is not None and bias is not None:
            return residual + self.forward(x)
        count = x.shape[0]  # `len` of a tensor is Python's, and takes longer
        if self.few is not None and count <= self.few_rows:
            return self.few(x, bias if residual is None else residual)
        weight = self.weight
        if not weight.is_mkldnn:
            if residual is None:
                return F.linear(x, weight, bias)
            return torch.addmm(residual, x, weight.t())
        extra = padding(count)
        if extra:
            x = F.pad(x, (0, 0, 0, extra))
        out: Tensor
        if residual is None:
            out = ONEDNN._linear_pointwise(x, weight, bias, "none", [], "")
        else:
            if extra:
                residual = F.pad(residual, (0, 0, 0, extra))
            out = ONEDNN._linear_pointwise.binary(x, residual, weight, None, "add")
        return out[:count] if extra else out


def integer_(model: nn.Module, borrowed: Mapping[int, IntegerWeight] | None = None) -> None:
    """Let all linear layers of a model multiply in integers, and free their plain weights but the
    head's. borrowed: products of another model's weights, by the addresses of these."""
    for name, layer in layers_of(model):
        if isinstance(layer, Linear):
            weight = layer.weight.detach()
            given = (borrowed or {}).get(weight.data_ptr())
            layer.integer = given or IntegerWeight(*Int8.of(weight.float()))
            if not _is_head(name):
                layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed weights are supported here, and faster."""
    if device.type != "cpu" or not hasattr(ONEDNN, "_linear_pointwise"):
        return False
    return dtype in (torch.float32, torch.bfloat16) and has_products(device, dtype)


def has_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies in this dtype, and not many times as slowly as in float32."""
    if device.type != "cpu" or dtype not in SUPPORT_CHECKS:
        return True
    supported = getattr(ONEDNN, SUPPORT_CHECKS[dtype], None)
    return supported is not None and bool(supported())


def pack_(model: nn.Module, borrowed: Iterable[Tensor] = ()) -> None:
    """Pack all weights of a model that will only run forwards, but those `borrowed` from another
    model, which uses them unpacked. The plain weights are freed unless they are referenced
    elsewhere; of small models in float32 a copy stays for single rows, for which oneDNN takes
    longer to start than to multiply."""
    unpacked = {weight.data_ptr() for weight in borrowed if not weight.is_mkldnn}
    layers = [part for part in model.modules() if isinstance(part, Linear)]
    small = sum(layer.weight.numel() for layer in layers) <= SMALL_MODEL
    for layer in layers:
        weight = layer.weight.detach()
        if weight.is_mkldnn or weight.data_ptr() in unpacked:
            continue
        if small and weight.dtype == torch.float32:
            layer.few = partial(one_row, weight.t().contiguous())
            layer.few_rows = 1
        replace_(layer, "weight", ONEDNN._reorder_linear_weight(weight, None))


def replace_(module: nn.Module, name: str, weight: Tensor) -> None:
    """Replace a weight of a module; the new one may be packed: then it is not a parameter."""
    delattr(module, name)
    if isinstance(weight, nn.Parameter):
        module.register_parameter(name, weight)
    else:
        module.register_buffer(name, weight, persistent=False)


# -- weights in codes -----------------------------------------------------------------------------


class Weights(NamedTuple):
    """How a model's weights are stored: FULL, INT8 (a scale for each row of a matrix) or INT4 (a
    scale and an offset for each 32 numbers of a row, and int8 for the head). A quantised model is
    another model: its weights are the values of the codes, wherever they are multiplied;
    embeddings, norms and biases stay as they are. rows: forwards of up to as many rows are
    multiplied with the codes; None to measure for how many that is faster."""

    kind: str = FULL
    rows: int | None = None

    @classmethod
    def of(cls, text: str) -> "Weights":
        """`int8`, `int4`, or with the number of rows `int4@4`; checked with the options."""
        kind, _, rows = text.partition("@")
        return cls(kind, int(rows) if rows else None)


class Int8(NamedTuple):
    """codes_OI: int8; scale_O: float32."""

    codes_OI: Tensor
    scale_O: Tensor

    @classmethod
    def of(cls, weight_OI: Tensor) -> "Int8":
        max_O = weight_OI.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
        scale_O = (max_O / 127).bfloat16().float()
        codes_OI = (weight_OI / scale_O[:, None]).round().clamp(-127, 127)
        return cls(codes_OI.to(torch.int8), scale_O)

    def plain(self) -> Tensor:
        return self.codes_OI.float() * self.scale_O[:, None]

    def product(self) -> FewRows | None:
        """The product with the codes in bfloat16 (of an int4 model's head)."""
        arguments = (self.codes_OI, self.scale_O.bfloat16())
        return partial(coded_rows, ATEN._weight_int8pack_mm.default, arguments)


class Int4(NamedTuple):
    """codes_OI: int32 from 0 to 15; a number is (code - 8) * scale_OG + offset_OG, both float32."""

    codes_OI: Tensor
    scale_OG: Tensor
    offset_OG: Tensor

    @classmethod
    def of(cls, weight_OI: Tensor) -> "Int4":
        groups_OGg = weight_OI.unflatten(1, (-1, GROUP_SIZE))  # type: ignore[no-untyped-call]
        low_OG = groups_OGg.amin(-1)
        high_OG = groups_OGg.amax(-1)
        tiny = torch.finfo(torch.float32).tiny
        scale_OG = ((high_OG - low_OG) / 15).clamp(min=tiny).bfloat16().float()
        offset_OG = (low_OG + 8 * scale_OG).bfloat16().float()
        codes_OGg = (groups_OGg - offset_OG[..., None]) / scale_OG[..., None] + 8
        codes_OI = codes_OGg.round().clamp(0, 15).flatten(1).to(torch.int32)
        return cls(codes_OI, scale_OG, offset_OG)

    def plain(self) -> Tensor:
        codes_OGg = (self.codes_OI - 8).float().view(*self.scale_OG.shape, GROUP_SIZE)
        return (codes_OGg * self.scale_OG[..., None] + self.offset_OG[..., None]).flatten(1)

    def product(self) -> FewRows | None:
        """The product with the codes in bfloat16; None for matrices that it does not support."""
        if len(self.codes_OI) % INT4_ROWS:
            return None
        packed = ATEN._convert_weight_to_int4pack_for_cpu(self.codes_OI, 1)
        both_GO2 = torch.stack((self.scale_OG, self.offset_OG), -1).transpose(0, 1)
        arguments = (packed, GROUP_SIZE, both_GO2.contiguous().bfloat16())
        return partial(coded_rows, ATEN._weight_int4pack_mm_for_cpu.default, arguments)


def check_widths(path: Path, kind: str, model: nn.Module) -> None:
    """Raise ModelError where a row cannot be cut into groups."""
    for name, layer in layers_of(model):
        if kind == INT4 and not _is_head(name) and layer.in_features % GROUP_SIZE:
            reason = f"int4 needs rows of a multiple of {GROUP_SIZE} numbers"
            raise ModelError(path, f"{reason}, `{name}` has {layer.in_features}: take int8")


def quantise_(model: nn.Module, kind: str) -> dict[str, Int8 | Int4]:
    """Replace the weights of every linear layer of a model, ours or of transformers, by the values
    of their codes; returns the codes by the layers' names, none for FULL. A head that is tied to
    the embedding gets its own weights."""
    codes: dict[str, Int8 | Int4] = {}
    if kind == FULL:
        return codes
    with torch.no_grad():
        for name, layer in layers_of(model):
            form: type[Int8 | Int4] = Int8 if kind == INT8 or _is_head(name) else Int4
            codes[name] = form.of(layer.weight.float())
            plain = codes[name].plain().to(layer.weight.dtype)
            replace_(layer, "weight", nn.Parameter(plain, requires_grad=False))
    return codes


def as_reference(load: Callable[[torch.dtype], Any], dtype: torch.dtype, kind: str) -> Any:
    """A model of transformers with the weights of a quantised target. load: loads it in a dtype."""
    model = load(dtype)
    if kind == INT8:
        integer_reference_(model.double(), Int8.of, dtype)
    else:
        quantise_(model, kind)
    return model


def multiply_(model: nn.Module, codes: Mapping[str, Int8 | Int4], rows: int | None) -> None:
    """Let a packed model in bfloat16 multiply up to `rows` rows with its codes; None to measure."""
    supported: list[Linear] = []
    for name, layer in layers_of(model):
        product = codes[name].product()
        if product is not None and isinstance(layer, Linear):
            layer.few = product
            supported.append(layer)
    few_rows = faster_rows(supported) if rows is None else rows
    for layer in supported:
        layer.few_rows = few_rows


@torch.inference_mode()
def faster_rows(layers: Sequence[Linear]) -> int:
    """Up to how many rows are multiplied faster with the codes than with the weights: measured with
    several layers of the largest group of one shape, in turn, so that no weight is in a cache."""
    sizes = Counter((layer.in_features, layer.out_features) for layer in layers)
    shape = max(sizes, key=lambda size: sizes[size] * size[0] * size[1], default=None)
    alike = [layer for layer in layers if (layer.in_features, layer.out_features) == shape]
    alike = alike[:MEASURED_LAYERS]

    def seconds(x_NI: Tensor, few_rows: int) -> float:
        for layer in alike:
            layer.few_rows = few_rows
        return min(repeat(lambda: [layer.forward(x_NI) for layer in alike], repeat=3, number=1))

    fastest = 0
    for rows in MEASURED_ROWS if alike else ():
        x_NI = torch.ones(rows, alike[0].in_features, dtype=torch.bfloat16)
        if seconds(x_NI, rows) > seconds(x_NI, 0):
            break
        fastest = rows
    return fastest


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] == "lm_head"
