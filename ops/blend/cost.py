"""What a blended prefill costs, in floating-point operations; embedding and output head left out.

The model of CacheBlend (2405.16444, section 5.1) in more detail: each layer's projections, its
attention by the pairs of query and key that see each other, and the rest of the layer. Picked rows
are taken to lie evenly in the context. Needs no torch.
"""

from dataclasses import dataclass

from .layer_plan import BlendSettings, LayerStatus, compile_layer_plan


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of a decoder layer: widths of its rows and of its MLP, heads and their width."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int

    def project(self, rows: float) -> float:
        """Queries, keys and values of some rows."""
        return 2 * rows * self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim

    def attend(self, pairs: float) -> float:
        """Scores and weighted sums of some pairs of a query and a key."""
        return 4 * pairs * self.heads * self.head_dim

    def finish(self, rows: float) -> float:
        """Output projection and MLP of some rows."""
        return 2 * rows * self.hidden * (self.heads * self.head_dim + 3 * self.inner)


def prefill_flops(shape: LayerShape, layers: int, rows: int) -> float:
    """A prefill of `rows` rows that computes everything."""
    return blend_flops(shape, layers, BlendSettings(plan="plain"), 0, rows)


def blend_flops(
    shape: LayerShape, layers: int, settings: BlendSettings, context: int, suffix: int
) -> float:
    """A prefill of `context` cached rows and `suffix` rows behind them.

    Raises:
        ValueError: the settings do not fit a model of so many layers.
    """
    plan = compile_layer_plan(settings, layers)
    shares = iter(settings.ratios)
    alive = 0 if plan[0] is LayerStatus.REUSE else context
    total = 0.0
    for status in plan:
        total += shape.project(alive + suffix)
        if status is LayerStatus.CHECK:
            alive = int(next(shares) * context)
        pairs = alive * (context + 1) / 2 + suffix * context + suffix * (suffix + 1) / 2
        total += shape.attend(pairs) + shape.finish(alive + suffix)
    return total
