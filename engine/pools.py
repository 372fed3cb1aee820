"""The KV pools of a run: allocated once, at fixed addresses."""

from dataclasses import dataclass
from math import prod
from typing import Any

from ..models.drafters.eagle import Eagle3
from ..ops.forward import Target
from ..ops.kv.pool import KVCache
from ..states.graph.drafter_settings import DrafterSettings
from ..states.graph.program import Program
from ..states.yaml.source import GraphError, ProblemCode
from .limits import free_memory
from .models import Models


@dataclass(frozen=True, slots=True)
class RunPools:
    """kv: the target's. kv_draft, kv_outline: of the drafters with a model, the second one that of
    outlines. kv_prefix: under ``batching`` one more row for each of these pools, for prefixes that
    stay for later requests.
    """

    kv: KVCache
    kv_draft: KVCache | None
    kv_outline: KVCache | None
    kv_prefix: tuple[KVCache, ...]

    @classmethod
    def of(cls, program: Program, models: Models, outline_drafter: Any) -> "RunPools":
        """The pools of a graph.

        Raises:
            GraphError: they take more memory than is free; with both numbers.
        """
        try:
            return cls._allocate(program, models, outline_drafter)
        except (MemoryError, OSError) as error:
            at = ("layout", "kv_slots")
            code = ProblemCode.NO_MEMORY
            raise GraphError([program.source.problem(at, str(error), code)]) from None

    @classmethod
    def _allocate(cls, program: Program, models: Models, outline_drafter: Any) -> "RunPools":
        graph = program.graph
        layout = program.graph.layout
        batches = layout.kind == "batching"
        rows = layout.max_num_branches if batches else 1
        size = 1 if layout.kind == "batching" else layout.block_size

        def drafter_pool(block: DrafterSettings | None, drafter: Any) -> KVCache | None:
            """With slots for the drafter's temporary rows."""
            if block is None or drafter is None or not block.has_model:
                return None
            scratch = block.scratch * (layout.max_num_branches // rows)
            return new_pool(drafter, layout.kv_slots + scratch, rows, models, size)

        outlines = None if graph.skeleton is None else graph.skeleton.drafter
        kv = new_pool(models.target, layout.kv_slots, rows, models, size)
        kv_draft = drafter_pool(graph.drafter, models.drafter)
        kv_outline = drafter_pool(outlines, outline_drafter)
        kv_prefix: list[KVCache] = []
        if batches and graph.blend is None and graph.beam is None and graph.scheduler.prefix_cache:
            users = (models.target, kv), (models.drafter, kv_draft), (outline_drafter, kv_outline)
            kv_prefix = [new_pool(model, pool.capacity, 1, models) for model, pool in users if pool]
        return cls(kv, kv_draft, kv_outline, tuple(kv_prefix))


def new_pool(
    model: Target | Eagle3, capacity: int, rows: int, models: Models, block_size: int = 1
) -> KVCache:
    """The KV pool of one model: `rows` rows of `capacity` slots, in blocks of `block_size` slots.

    Raises:
        MemoryError: it takes more memory than is free; with both numbers.
    """
    shape = (model.num_layers, model.kv_heads, model.head_dim, capacity, rows)
    needed = 2 * prod(shape) * models.dtype.itemsize
    free = free_memory()
    if models.device.type == "cpu" and free is not None and needed > free:
        each = f"{rows} rows of {capacity}" if rows > 1 else str(capacity)
        raise MemoryError(
            f"keys and values of {each} slots take {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free"
        )
    return KVCache(*shape, block_size=block_size, dtype=models.dtype, device=models.device)
