"""Whether cached rows, a layer plan and a model fit together, before anything is computed."""

from torch import Tensor

from ..ops.blend.blend import Blend
from ..ops.blend.layer_plan import compile_layer_plan
from ..ops.types import LayerPlan
from .layers import DecoderParts


def check_blend(
    decoder: DecoderParts, tokens_BQ: Tensor, plan: LayerPlan, taps: tuple[int, ...], blend: Blend
) -> None:
    """Raise ValueError if the cached rows, the plan and the model do not fit together."""
    settings, cached = blend.settings, blend.cached
    compiled = compile_layer_plan(settings, decoder.num_layers)
    if plan != compiled:
        raise ValueError(f"the layer plan {_numbers(plan)} is not the blend's {_numbers(compiled)}")
    if blend.rows.role_BQ.shape != tokens_BQ.shape:
        raise ValueError(
            f"the blend is for {blend.rows.role_BQ.shape} rows, not for {tuple(tokens_BQ.shape)}"
        )
    shape = (decoder.num_layers, cached.rows, decoder.kv_heads, decoder.head_dim)
    model = decoder.embed
    for name, value in (("keys", cached.keys_LRgd), ("values", cached.values_LRgd)):
        if (value.shape, value.dtype, value.device) != (shape, model.dtype, model.device):
            raise ValueError(
                f"the cached {name} are {tuple(value.shape)} in {value.dtype} on {value.device}, "
                f"the model has {shape} in {model.dtype} on {model.device}"
            )
    if settings.mask == "bottom_right" and any(decoder.config.sliding):
        raise ValueError(
            f"`mask: bottom_right` cannot have the model's sliding window {decoder.config.window}"
        )
    width, found = len(set(taps)) * decoder.hidden_size, cached.features_RF
    if width and (found is None or found.shape != (cached.rows, width)):
        shapes = None if found is None else tuple(found.shape), (cached.rows, width)
        raise ValueError(f"the cached features are {shapes[0]}, the drafter needs {shapes[1]}")


def _numbers(plan: LayerPlan) -> list[int]:
    return [int(status) for status in plan]
