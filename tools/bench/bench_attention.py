"""What attention costs behind a shared prefix: dense, grouped and cascade, layout by layout.

    python -m tools.bench.bench_attention            # milliseconds of a layer, medians
    python -m tools.bench.bench_attention --blocks   # block sizes: slots read, and the time

Heads are those of SmolLM2-135M. The rule of `attention: auto` (`AutoBackend` in
`ops/attention/backends.py`) follows from this table.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np
import torch

from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.forward import plan_attention
from specsot.ops.kv.pool import KVCache
from specsot.ops.tree import single_path
from specsot.ops.types import Rows
from specsot.states.layout import Layout, PagedLayout
from specsot.states.rows import Trees
from specsot.states.segments import SegmentTree

HEADS, KV_HEADS, DIM = 9, 3, 64
PREFIXES, BRANCHES, OWN, NODES = (250, 1000, 4000), (2, 4, 8), 60, (0, 4)
BACKENDS = ("dense", "grouped", "cascade")


def scene(kind: str, prefix: int, branches: int, nodes: int, size: int) -> tuple[KVCache, Rows]:
    """Branches of one request, each with OWN rows written round by round, and their next trees."""
    kv = KVCache(1, KV_HEADS, DIM, 8192, block_size=size)
    kv.data.normal_()
    tree = SegmentTree(apart=kind == "paged")
    made = PagedLayout(torch.device("cpu"), tree) if kind == "paged" else None
    layout = made or Layout(torch.device("cpu"), tree)
    root = tree.add()
    layout.open_(root, 8192, [kv])
    kv.commit_(kv.append_([root] * prefix, range(prefix), home=root), range(prefix))
    owners = [tree.add(root) for _ in range(branches)]
    for owner in owners:
        layout.enter_(owner, root, [kv])
    for at in range(prefix, prefix + OWN, 2):  # two tokens a round, the rest is rejected
        for owner in owners:
            slots = kv.append_([owner] * (nodes + 2), [at] * (nodes + 2), home=tree.home(owner))
            kv.commit_(slots[:2], [at, at + 1])
            kv.release_(slots[2:])
    drafts = torch.zeros(branches, nodes, dtype=torch.int64)
    proposal = single_path(drafts, drafts.float())
    trees = Trees([1] * branches, [prefix + OWN] * branches, owners, (), proposal)
    return kv, layout.place_(kv, trees, ()).rows


def seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)


def layer(kv: KVCache, rows: Rows, seen: AttentionPlan) -> Callable[[], object]:
    """One layer's attention of a forward."""
    positions_N = rows.positions_BQ.view(-1)
    plan = seen.for_layers(positions_N, HEADS // KV_HEADS, torch.float32)
    q_Nhd = torch.randn(len(positions_N), HEADS, DIM)
    return lambda: plan.backend.run(q_Nhd, *kv.layers[0], plan)


def compare(kinds: Sequence[str], repeats: int) -> None:
    print("layout  prefix branches rows |  dense grouped cascade  ms | grouped/cascade | auto")
    for kind in kinds:
        for prefix in PREFIXES:
            for branches in BRANCHES:
                for nodes in NODES:
                    kv, rows = scene(kind, prefix, branches, nodes, 16)
                    told = {
                        name: plan_attention(rows, kv, attention=name)
                        for name in (*BACKENDS, "auto")
                    }
                    ms = [1e3 * seconds(layer(kv, rows, told[b]), repeats) for b in BACKENDS]
                    times = " ".join(f"{one:7.3f}" for one in ms)
                    auto = "cascade" if told["auto"].merged else "grouped"
                    sizes = f"{kind:7} {prefix:6} {branches:8} {nodes + 1:4}"
                    print(f"{sizes} | {times}     | {ms[1] / ms[2]:15.2f} | {auto}", flush=True)


def blocks(kinds: Sequence[str], repeats: int) -> None:
    head = "layout block | slots read, ms: grouped       cascade | blocks of a branch | wasted"
    print(f"{head} | host us of a round")
    for kind in kinds:
        for size in (1, 16, 64):
            kv, rows = scene(kind, 1000, 8, 4, size)
            found = []
            for name in BACKENDS[1:]:
                seen = plan_attention(rows, kv, attention=name)
                read = sum(group.mask_GqK[:, 0].numel() for group in seen.groups)
                ms = 1e3 * seconds(layer(kv, rows, seen), repeats)
                found.append(f"{read:6} {ms:6.3f}")
            table = max(len(kv.blocks.table(one)) for one in rows.visibility.ids_S.tolist())
            waste = kv.blocks.wasted(kv.current_length)
            host = 1e6 * seconds(partial(_round, kv, rows), 20 * repeats)
            line = f"{kind:6} {size:5} | {'   '.join(found)} | {table:4} | {waste:5} | {host:6.0f}"
            print(line, flush=True)


def _round(kv: KVCache, rows: Rows) -> None:
    """The pool's table in a round: slots for 8 trees of 5 nodes, 2 of each kept for a moment."""
    owners = [owner for owner in rows.visibility.ids_S.tolist() for _ in range(5)]
    homes = np.repeat([homes[0] for homes in rows.visibility.homes_S], 5)
    slots = kv.append_(owners, 9_000, home=homes)
    kept = np.arange(len(slots)) % 5 < 2
    kv.commit_(slots[kept], 9_000)
    kv.release_(slots[~kept])
    kv.release_(slots[kept])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--repeats", type=int, default=30)
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    (blocks if asked.blocks else compare)(("bim", "paged"), asked.repeats)
