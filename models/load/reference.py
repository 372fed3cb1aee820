"""A checkpoint in transformers: what a decoder is compared with, and the target of trainings."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from ..codes import FULL, codes_of, quantised
from ..families import families
from ..files import read_fields
from ..integer import wide_norm


def reference_linear(
    x: Tensor, integers_IO: Tensor, scale_O: Tensor, bias_O: Tensor | float
) -> Tensor:
    """A linear layer by float64 sums of integers, which are exact."""
    integers, scale = quantised(x.flatten(0, -2))
    return (integers @ integers_IO * (scale * scale_O) + bias_O).view(*x.shape[:-1], -1)


def as_reference(folder: Path, dtype: torch.dtype, kind: str) -> Any:
    """A checkpoint in transformers, in a dtype; with the arithmetic of a target whose weights have
    this kind and whose pool has the dtype."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # Other products of experts do not have every dtype.
    own: Any = {"dtype": dtype, "experts_implementation": "eager"}
    fields = read_fields(folder)
    family = families().get(str(fields.get("model_type")))
    if family is not None and family.like:
        values = {k: v for k, v in fields.values.items() if k not in ("model_type", "auto_map")}
        own["config"] = AutoConfig.for_model(family.like, **values)
    # It reports tensors of drafters as unexpected; specsot's own loader checks all names.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **own)
    finally:
        logging.set_verbosity(verbosity)
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
