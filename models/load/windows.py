"""Which part of each stored tensor a rank's share of a decoder is."""

from ..config import DecoderConfig
from ..shares import Share

Window = tuple[slice, ...]
"""What to take of a stored tensor: of its rows, and of its columns, if it has any."""

EVERYTHING = slice(None)


def window(name: str, config: DecoderConfig, share: Share) -> Window:
    """The part of a tensor, by its name in a Hugging Face checkpoint, that a share holds."""
    words = name.split(".")
    heads = share.kv_heads
    dim = config.head_dim
    layer = words[-2]
    kind = words[-1]
    width = dim * (config.heads // config.kv_heads)
    rows = {
        "q_proj": _times(heads, width),
        "k_proj": _times(heads, dim),
        "v_proj": _times(heads, dim),
        "gate_proj": _times(share.columns),
        "up_proj": _times(share.columns),
        "lm_head": _times(share.vocabulary),
    }
    columns = {"o_proj": _times(heads, width), "down_proj": _times(share.columns)}
    if layer in columns and kind == "weight":
        return EVERYTHING, columns[layer]
    return (rows.get(layer, EVERYTHING),)


def _times(some: range, each: int = 1) -> slice:
    return slice(some.start * each, some.stop * each)
