"""The models of a run, loaded once and shared by any number of runs, and its KV pools."""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..models.codes import FULL
from ..models.decoder import Decoder
from ..models.drafters.dflash import DFlashDraftModel
from ..models.files import ModelError
from ..models.layers import PoolModel, settle_
from ..models.linear import can_pack, compile_, has_products, pack_
from ..models.load.tokenizer import load_tokenizer, stop_ids
from ..models.load.weights import load_target
from ..models.packed import can_compile
from ..ops.kv.pool import KVCache
from ..states.graph.drafter_settings import DrafterSettings
from ..states.graph.graph import Program
from ..states.graph.plugins import drafter_class
from ..states.yaml.source import GraphError, ProblemCode
from .limits import free_memory, release_memory


@dataclass(frozen=True, slots=True)
class Models:
    target: Any
    drafter: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype


def load_models(
    target_dir: Path,
    drafter_dir: Path | None,
    kind: str = "eagle3",
    *,
    device: str = "cpu",
    dtype: str = "float32",
    weights: str = FULL,
    scan: bool = True,
    packed: bool = True,
    part: tuple[int, int] = (0, 1),
) -> Models:
    """Load the target, its tokenizer and (if given) the drafter that fits it; raises ModelError.
    weights: of the target: FULL, INT8 or INT4. scan: refuse a target whose weights are not all
    finite. packed: the target's weights may be packed for this processor; not if ranks share them.
    part: index and count of the ranks that compute the target together."""
    place = torch.device(device)
    torch_dtype = getattr(torch, dtype)
    whole = drafter_dir is not None
    target = load_target(target_dir, torch_dtype, place, part=part, scan=scan, whole_head=whole)
    tokenizer = load_tokenizer(target_dir, target.config)
    stops = stop_ids(target.config, tokenizer)
    prepare_(target, weights, place, packed)
    target.known_tokens = max(*tokenizer.get_vocab().values(), *stops) + 1
    models = Models(target, None, tokenizer, stops, device=place, dtype=torch_dtype)
    if drafter_dir is not None:
        models = with_drafter(models, drafter_dir, kind)
    release_memory()
    return models


def prepare_(target: Decoder, weights: str, place: torch.device, packed: bool = True) -> None:
    """Quantise a target unless `weights` is FULL, and bring its weights into the layout in which
    they are multiplied (`packed`); raises ModelError."""
    if weights != FULL and not packed:
        reason = f"{weights} quantises whole rows, of which ranks that compute together have parts"
        raise ModelError(target.config.path, f"{reason}: take --weights full")
    if weights != FULL and target.config.experts is not None:
        raise ModelError(target.config.path, f"{weights} experts are not supported: --weights full")
    if weights != FULL and target.dtype == torch.float16:
        raise ModelError(target.config.path, f"{weights} needs another --dtype than float16")
    if weights != FULL or (packed and can_compile(place, target.dtype)):
        target.compile_(weights)
    elif packed and can_pack(place, target.dtype):
        pack_(target)
    settle_(target)


def with_drafter(models: Models, folder: Path, kind: str) -> Models:
    """The same target with the drafter of this folder; raises ModelError."""
    drafter_type = drafter_class(kind)
    if drafter_type is None:
        raise ModelError(folder, f"unknown drafter {kind!r}")
    target = models.target
    try:
        drafter = drafter_type.load(folder, target, models.dtype, models.device)
    except (ImportError, NotImplementedError) as error:
        raise ModelError(folder, f"the drafter {kind!r} has no loader: {error}") from error
    if not isinstance(drafter, torch.nn.Module):
        return replace(models, drafter=drafter)
    if getattr(target, "compiled", None) is not None:
        # Drafts decide nothing, so a drafter may be quantised where that is faster.
        head = target.lm_head
        borrowed = {head.weight.data_ptr(): head.kernel}
        if isinstance(drafter, PoolModel):
            drafter.compile_(target.weights, borrowed)
        else:
            compile_(drafter, target.weights, borrowed)
        if isinstance(drafter, DFlashDraftModel):
            drafter.head = head.kernel
        settle_(drafter)
    elif can_pack(models.device, models.dtype):
        pack_(drafter, borrowed=(target.embed, target.lm_head.weight))
        settle_(drafter)
    return replace(models, drafter=drafter)


def notes_of(models: Models) -> tuple[str, ...]:
    """The notes of the loaders, and whether the dtype is slow on this processor."""
    if has_products(models.device, models.dtype):
        return assumed(models.target, models.drafter)
    dtype = str(models.dtype).removeprefix("torch.")
    slow = f"this processor does not multiply in {dtype}: --dtype float32 is many times as fast"
    return (*assumed(models.target, models.drafter), slow)


def assumed(*loaded: Any) -> tuple[str, ...]:
    return tuple(note for model in loaded if model is not None for note in model.notes)


def run_pools(
    program: Program, models: Models, outline_drafter: Any
) -> tuple[KVCache, KVCache | None, KVCache | None, tuple[KVCache, ...]]:
    """The pools of the target, the drafter and the drafter of outlines; under ``batching`` one more
    row for each, for prefixes that stay for later requests. Raises GraphError if they take more
    memory than is free."""
    graph = program.graph
    layout = graph.layout
    batches = layout.kind == "batching"
    rows = layout.max_num_branches if batches else 1
    block_size = 1 if layout.kind == "batching" else layout.block_size

    def drafter_pool(block: DrafterSettings | None, drafter: Any) -> KVCache | None:
        if block is None or drafter is None or not block.has_model or not drafter.num_layers:
            return None
        scratch = block.scratch * (layout.max_num_branches // rows)
        return new_pool(drafter, layout.kv_slots + scratch, rows, models, block_size=block_size)

    try:
        free = free_memory() if models.device.type == "cpu" else None
        kv = new_pool(models.target, layout.kv_slots, rows, models, block_size=block_size)
        kv_draft = drafter_pool(graph.drafter, models.drafter)
        kv_outline = drafter_pool(graph.outline_drafter, outline_drafter)
        users = [(models.target, kv), (models.drafter, kv_draft), (outline_drafter, kv_outline)]
        stays = batches and not (graph.blend or graph.beam) and graph.scheduler.prefix_cache
        used = [(user, pool) for user, pool in users if pool is not None]
        prefix = [new_pool(user, pool.capacity, 1, models) for user, pool in used if stays]
        pools = [*(pool for _, pool in used), *prefix]
        check_free("all pools", sum(pool.data.nbytes for pool in pools), free)
    except (MemoryError, OSError) as error:
        problem = program.source.problem(("layout", "kv_slots"), str(error), ProblemCode.NO_MEMORY)
        raise GraphError([problem]) from None
    return kv, kv_draft, kv_outline, tuple(prefix)


def new_pool(
    model: PoolModel, capacity: int, rows: int, models: Models, block_size: int = 1
) -> KVCache:
    """The KV pool of one model: `rows` rows of `capacity` slots, in blocks of `block_size` slots;
    raises MemoryError with both numbers if it takes more memory than is free."""
    shape = (model.num_layers, model.kv_heads, model.head_dim, capacity, rows)
    needed = 2 * prod(shape) * models.dtype.itemsize
    each = f"{rows} rows of {capacity} slots" if rows > 1 else f"{capacity} slots"
    check_free(each, needed, free_memory() if models.device.type == "cpu" else None)
    return KVCache(*shape, block_size=block_size, dtype=models.dtype, device=models.device)


def check_free(what: str, needed: int, free: int | None) -> None:
    """Raise MemoryError with both numbers if keys and values take more memory than is free."""
    if free is not None and needed > free:
        numbers = f"{needed / 1e9:.3f} GB, {free / 1e9:.3f} are free"
        raise MemoryError(f"keys and values of {what} take {numbers}")
