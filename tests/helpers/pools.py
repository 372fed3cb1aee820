"""Small pools whose slots hold marks that can be told apart."""

import torch

from specsot.ops.kv.pool import KVCache

LAYERS, HEADS, DIM = 2, 3, 4


def pool(capacity: int = 8, rows: int = 1, block_size: int = 1) -> KVCache:
    return KVCache(LAYERS, HEADS, DIM, capacity, rows, block_size=block_size)


def mark_(kv: KVCache, slot: int, value: float) -> None:
    """Give a row a content that can be told from all others."""
    for layer in range(LAYERS):
        row = torch.full((HEADS, 1, DIM), value + layer / 8)
        kv.write_(layer, torch.tensor([slot]), row, -row)


def content(kv: KVCache, slot: int) -> float:
    """The value that a row was marked with, once it is the same everywhere."""
    row = kv.data[:, :, :, slot].clone()
    value = float(row[0, 0, 0, 0])
    for layer in range(LAYERS):
        assert (row[layer, 0] == value + layer / 8).all()
        assert (row[layer, 1] == -value - layer / 8).all()
    return value


def commit(kv: KVCache, owner: int, positions: list[int], row: int = 0) -> list[int]:
    slots = kv.append_([owner] * len(positions), positions, row)
    kv.commit_(slots, positions)
    return slots.tolist()
