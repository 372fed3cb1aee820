"""Real process groups in tests: processes of their own over gloo, one thread each."""

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Work = Callable[..., Any]
LIMIT = 240  # seconds after which a test's ranks are given up


def run_ranks(count: int, work: Work, folder: Path, *args: Any) -> list[Any]:
    """What `work(rank, *args)` returns in each of so many processes, by rank.

    Args:
        work: of a module that can be imported, so of `helpers`; folder: for the rendezvous.
    """
    context = get_context("spawn")
    files = [folder / f"rank{rank}.pt" for rank in range(count)]
    processes = [
        context.Process(target=_rank, args=(rank, count, work, files[rank], args), daemon=True)
        for rank in range(count)
    ]
    for one in processes:
        one.start()
    for one in processes:
        one.join(LIMIT)
    late = [one.pid for one in processes if one.is_alive()]
    for one in processes:
        one.kill()
    assert not late, "ranks that did not end"
    found = [torch.load(file, weights_only=False) for file in files]
    wrong = [text for said, text in found if said == "raised"]
    assert not wrong, "\n".join(wrong)
    return [value for _, value in found]


def _rank(rank: int, count: int, work: Work, file: Path, args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        meeting = f"file://{file.parent / 'meeting'}"
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", meeting, limit, rank=rank, world_size=count)
        found = ("returned", work(rank, *args))
    except BaseException:
        found = ("raised", traceback.format_exc())
    torch.save(found, file)
