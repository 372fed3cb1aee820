"""What two ranks of one machine gain and lose: collectives, forwards, a regroup.

Run as `python -m tools.bench.bench_ranks [--model DIR]` beside the checkout, with two cores free.
"""

import argparse
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from specsot.engine.models import prepare_
from specsot.engine.prepare.environment import embedded_folder
from specsot.models.decoder import Decoder
from specsot.models.load.weights import load_target
from specsot.models.quantise import Weights
from specsot.models.sharded import Ranks, gather_kv_, peer_heads, sharded, split_ranks
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.kv.pool import KVCache
from specsot.ops.layer_plan import decode_plan

RANKS = 2
ROWS = (1, 8, 32, 256, 1024)
PREFIXES = (64, 256, 1024)
TIMES = 15


def milliseconds(run: Callable[[], object], times: int = TIMES) -> float:
    """Of the fastest run, the first one left out: others only add to it."""
    took = []
    for _ in range(times + 1):
        began = perf_counter()
        run()
        took.append(1e3 * (perf_counter() - began))
    return min(took[1:])


def pool(model: Decoder) -> KVCache:
    return KVCache(model.num_layers, model.kv_heads, model.head_dim, max(ROWS))


def forward(model: Decoder, rows: int) -> Callable[[], object]:
    """A forward of so many rows, the last of which has logits."""
    kv, places = pool(model), torch.arange(rows)[None]
    attention, plan = AttentionPlan.causal(rows, "cpu"), decode_plan(model.num_layers)
    last = torch.tensor([rows - 1])

    def run() -> object:
        with torch.inference_mode():
            return model.forward(places % 61, places, places, attention, kv, plan, last, ())

    return run


def regroup(shard: Decoder, replica: Decoder, own: Ranks, rows: int) -> str:
    """A prefix of so many rows, from two ranks to both, and the collective in it alone."""
    slots, part, whole = np.arange(rows, dtype=np.int32), pool(shard), pool(replica)
    heads = peer_heads(replica.kv_heads, RANKS, RANKS, range(RANKS))
    size = whole.slot_bytes * rows
    piece = torch.zeros(max(heads) * size // replica.kv_heads // 4)
    took = milliseconds(lambda: gather_kv_(part, slots, whole, into=slots, peers=own, heads=heads))
    raw = milliseconds(lambda: own.gather(piece))
    told = f"{size / 1e6:.2f} MB, {took:.2f} ms, the collective alone {raw:.2f} ms"
    return f"regroup of {rows} rows: {told}"


def norms(replica: Decoder, rows: int) -> float:
    """Milliseconds of what sequence parallelism would split: all norms of a forward."""
    x = torch.ones(rows, replica.hidden_size)
    return (2 * replica.num_layers + 1) * milliseconds(lambda: replica.norm.forward(x))


def rank_of(rank: int, meeting: str, folder: Path) -> None:
    """What one rank measures; the first one tells."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", meeting, limit, rank=rank, world_size=RANKS)
    lines, replica = list[str](), load_target(folder)
    for rows in ROWS:
        took = milliseconds(partial(dist.all_reduce, torch.zeros(rows, replica.hidden_size)))
        lines.append(f"all_reduce [{rows}, {replica.hidden_size}]: {took:.2f} ms")
    began = perf_counter()
    own, _ = split_ranks(RANKS, seconds=30)
    lines.append(f"two process groups: {1e3 * (perf_counter() - began):.1f} ms")
    shard = sharded(replica, own.group, own.index, own.count)
    both = {rows: milliseconds(forward(shard, rows)) for rows in ROWS}
    lines += [regroup(shard, replica, own, rows) for rows in PREFIXES]
    dist.barrier()
    if not rank:  # the other one waits, and takes no processor time
        plain = {rows: milliseconds(forward(replica, rows)) for rows in ROWS}
        small = {rows: norms(replica, rows) for rows in ROWS}
        prepare_(replica, Weights(), torch.device("cpu"))
        packed = {rows: milliseconds(forward(replica, rows)) for rows in ROWS}
        lines.append("rows | one process, packed | plain | two ranks | norms, ms")
        for rows in ROWS:
            told = (one[rows] for one in (packed, plain, both, small))
            lines.append(f"{rows} | {' | '.join(f'{one:.1f}' for one in told)}")
        print("\n".join(lines))
    dist.barrier()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=embedded_folder("target"))
    folder = parser.parse_args().model
    with TemporaryDirectory() as place:
        context = get_context("spawn")
        args = (f"file://{place}/meeting", folder)
        ranks = [context.Process(target=rank_of, args=(rank, *args)) for rank in range(RANKS)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
    return max(abs(one.exitcode or 0) for one in ranks)


if __name__ == "__main__":
    sys.exit(main())
