"""`--trace kv`: one record per operation on a KV pool."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np

OPERATIONS = ("append_", "commit_", "release_", "retire_", "relabel_", "truncate_", "copy_")
OF_ROWS = ("append_", "commit_", "copy_")  # whose first argument has an entry for each row

Write = Callable[[dict[str, Any]], None]


def trace_pools(board: Mapping[str, Any], write: Write) -> None:
    """Both pools of a run."""
    for key, name in (("kv", "target"), ("kv_draft", "drafter")):
        if board[key] is not None:
            trace_pool(board[key], name, write)


def trace_pool(pool: Any, name: str, write: Write) -> None:
    """Let this one pool (ops.kv.KVCache) write a record of each operation; nothing else changes.

    An operation that another one uses (`retire_` releases rows) has no record of its own. `rows`
    are those that it was about; of what frees rows, how many became free.
    """
    inside: list[str] = []

    def traced(operation: str) -> Callable[..., Any]:
        function = getattr(pool, operation)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = pool.current_length
            inside.append(operation)
            try:
                result = function(*args, **kwargs)
            finally:
                inside.pop()
            if not inside:
                counts = operation in OF_ROWS and args
                record = {
                    "kind": "kv",
                    "pool": name,
                    "op": operation,
                    "rows": np.asarray(args[0]).size
                    if counts
                    else abs(pool.current_length - before),
                    "length": pool.current_length,
                    "ledger_bytes": sum(pool.ledger.bytes.values()),
                }
                write(record)
            return result

        return run

    for operation in OPERATIONS:
        setattr(pool, operation, traced(operation))
