"""`--trace kv`: one record per operation on a KV pool."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np

OPERATIONS = (
    "append_",
    "commit_",
    "release_",
    "retire_",
    "relabel_",
    "truncate_",
    "copy_",
)


def trace_pool(pool: Any, name: str, write: Callable[[dict[str, Any]], None]) -> None:
    """Write down each operation of this one pool (ops.kv.KVCache); nothing else changes.

    An operation that another one uses (`retire_` releases rows) is not written again.
    """
    inside: list[str] = []
    for operation in OPERATIONS:
        setattr(pool, operation, _traced(pool, name, operation, inside, write))


def _traced(
    pool: Any,
    name: str,
    operation: str,
    inside: list[str],
    write: Callable[[dict[str, Any]], None],
) -> Callable[..., Any]:
    function = getattr(pool, operation)

    @wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        before = pool.current_length
        inside.append(operation)
        try:
            result = function(*args, **kwargs)
        finally:
            inside.pop()
        if not inside:
            after = pool.current_length
            write(
                {
                    "kind": "kv",
                    "pool": name,
                    "op": operation,
                    "rows": _rows(operation, args, before, after),
                    "length": after,
                    "ledger_bytes": sum(pool.ledger.bytes.values()),
                }
            )
        return result

    return traced


def _rows(operation: str, args: tuple[Any, ...], before: int, after: int) -> int:
    """How many rows it was about; for what frees rows, how many became free."""
    if operation in ("append_", "commit_", "copy_") and args:
        return int(np.asarray(args[0]).size)
    return abs(after - before)


def trace_pools(board: Mapping[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
    """Both pools of a run."""
    for key, name in (("kv", "target"), ("kv_draft", "drafter")):
        if board[key] is not None:
            trace_pool(board[key], name, write)
