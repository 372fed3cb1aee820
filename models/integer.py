"""Products of weights in int8 or int4 and activations in int8, with exact sums.

Each input row of a product is quantised: a scale for the row, and a step, an integer, for each
group of its numbers. The sums are integers, so they do not depend on how many rows a forward has or
on the order of the additions. Everything between two products is computed in float64, whose noise
almost never moves a code: a quantised model has the same tokens in every layout, with every
drafter, and in transformers (`as_reference`)."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .codes import FULL, Int4, Int8, codes_of, quantised
from .families import families
from .files import read_fields

DIGIT = 128  # torch multiplies int8: larger integers are split into digits of this base


class IntegerWeight:
    """The codes of a linear layer [O, I] and its product, by torch."""

    def __init__(self, codes: Int8 | Int4) -> None:
        self.scale_O = codes.scale_O.double()
        small = isinstance(codes, Int8)
        integers_IO = (codes.codes_OI if small else codes.integers()).t()
        self.digits = [integers_IO] if small or not integers_IO.is_cpu else digits(integers_IO)

    def product(
        self, x_NI: Tensor, added: Tensor | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """As that of `packed.PackedWeight`."""
        integers_NI, scale_N1 = quantised(x_NI)
        if x_NI.is_cpu:
            sums_NO = torch.zeros((), dtype=torch.float64)
            for place, digit_NI in enumerate(digits(integers_NI.to(torch.int16))):
                for other_place, digit_IO in enumerate(self.digits):
                    factor = float(DIGIT ** (place + other_place))
                    sums_NO = sums_NO + torch._int_mm(digit_NI, digit_IO).double() * factor
        else:  # exact in float64
            sums_NO = integers_NI @ self.digits[0].double()
        out_NO: Tensor = sums_NO * (scale_N1 * self.scale_O)
        return (out_NO if added is None else out_NO + added).to(dtype)


def digits(integers: Tensor) -> list[Tensor]:
    """int16 as two int8 tensors, whose sum with the factors 1 and DIGIT it is."""
    upper = torch.div(integers, DIGIT, rounding_mode="floor")
    return [(integers - upper * DIGIT).to(torch.int8), upper.to(torch.int8)]


def wide_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layers.rms_norm` in float64."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def wide_centred_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layers.centred_norm` in float64."""
    return wide_norm(x, 1.0 + weight.double(), eps)


# -- the same arithmetic in transformers' model ---------------------------------------------------


def reference_linear(
    x: Tensor, integers_IO: Tensor, scale_O: Tensor, bias_O: Tensor | float
) -> Tensor:
    """A linear layer by float64 sums of integers, which are exact."""
    integers, scale = quantised(x.flatten(0, -2))
    return (integers @ integers_IO * (scale * scale_O) + bias_O).view(*x.shape[:-1], -1)


def as_reference(folder: Path, dtype: torch.dtype, kind: str) -> Any:
    """A checkpoint in transformers, in a dtype; with the arithmetic of a target whose weights have
    this kind and whose pool has the dtype."""
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        AutoConfig,
        AutoModelForCausalLM,
    )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # Other products of experts do not have every dtype.
    own: Any = {"dtype": dtype, "experts_implementation": "eager"}
    fields = read_fields(folder)
    family = families().get(str(fields.get("model_type")))
    if family is not None and family.like:
        values = {k: v for k, v in fields.values.items() if k not in ("model_type", "auto_map")}
        own["config"] = AutoConfig.for_model(family.like, **values)
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **own)
    model: Any = loaded.train(False)
    if kind == FULL:
        return model
    model = model.double()

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **named: Any
    ) -> Any:
        k = k.to(dtype).double()
        v = v.to(dtype).double()
        return sdpa_attention_forward(module, q, k, v, attention_mask=attention_mask, **named)

    name = f"integer_{str(dtype).removeprefix('torch.')}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)
    for path, module in list(model.named_modules()):
        is_linear = isinstance(module, nn.Linear)  # a name: mypy would narrow the type
        if is_linear:
            codes = codes_of(path, module.weight, kind)
            wide = {"integers_IO": codes.integers().double().t(), "scale_O": codes.scale_O.double()}
            bias_O = 0.0 if module.bias is None else module.bias.detach()
            module.forward = partial(reference_linear, **wide, bias_O=bias_O)
            module.weight = None  # frees its memory
        elif type(module).__name__.endswith("RMSNorm"):
            weight = module.weight.detach()
            if type(module).__name__.startswith("Gemma"):
                module.forward = partial(wide_norm, weight=1.0 + weight, eps=module.eps)
            else:
                module.forward = partial(wide_norm, weight=weight, eps=module.variance_epsilon)
    return model
