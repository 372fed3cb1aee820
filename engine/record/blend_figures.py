"""What a run reused of cached chunks, and what that saved. Names and definitions: docs/metrics.md.

Operations are estimated as `ops.blend_cost` says, for each prompt (or part of one: the shared
prefix, a branch) by itself; attention to rows that were there before is left out on both sides.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...ops.blend.cost import LayerShape, blend_flops, prefill_flops
from ...states.requests.blending import BlendState
from ...states.requests.branch import BlendSummary
from ..chunks.cache import ChunkLibrary
from .blend_errors import ProbeFigures


def blend_figures(
    forwards: Sequence[BlendSummary], board: Mapping[str, Any], probed: ProbeFigures | None = None
) -> dict[str, Any] | None:
    """The part `blend` of metrics.json; None for a graph that reuses nothing."""
    blending: BlendState | None = board["branches"].blend
    if blending is None:
        return None
    target, library = board["target"], blending.library
    assert isinstance(library, ChunkLibrary)
    shape, layers = _shape(target.config), target.num_layers
    parts = [part for one in forwards for part in one.parts]
    done = sum(blend_flops(shape, layers, blending.settings, *part) for part in parts)
    full = sum(prefill_flops(shape, layers, sum(part)) for part in parts)
    sizes = library.made_sizes
    return {
        "plan": list(map(int, forwards[0].plan)) if forwards else None,
        "forwards": len(forwards),
        "reused_rows": sum(one.reused for one in forwards),
        "picked_rows": sum(one.picked[0] for one in forwards if one.picked),
        "protected_rows": sum(one.protected for one in forwards),
        "suffix_rows": sum(one.suffix for one in forwards),
        "flops": done,
        "flops_full": full,
        "saved_share": 1 - done / full if full else 0.0,
        "chunks": {
            "hits": library.hits,
            "missed": library.missed,
            "collected": len(sizes),
            "collected_rows": sum(sizes),
            "collected_flops": sum(prefill_flops(shape, layers, size) for size in sizes),
            "collected_milliseconds": library.made_nanos / 1e6,
        },
        **({} if probed is None else {"probe": probed.figures()}),
    }


def _shape(config: Any) -> LayerShape:
    """The sizes of a decoder's layers; config: models.config.DecoderConfig."""
    return LayerShape(
        config.hidden_size, config.intermediate_size, config.heads, config.kv_heads, config.head_dim
    )
