"""What a kept prefix would gain the layout ``batching``: its rows copied, or computed anew.

    python -m tools.bench.bench_copy --threads 1
    python -m tools.bench.bench_copy --threads 1 --model DIR

A prefix lies in one row of a pool; a new request wants it in another. Both ways in turn, medians of
`--repeats`. Beside them what keeping it costs: the row that it lies in is no branch's meanwhile.
"""

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from specsot.engine.models import load_models
from specsot.engine.prepare.environment import embedded_folder
from specsot.engine.run.scoring import full_prefill
from specsot.ops.kv.pool import KVCache

CAPACITY, ROWS = 4096, 8  # of machines/decode.yaml
MEBI = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 489, 2000])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, default=embedded_folder("target"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = load_models(args.model, None)
    target = models.target
    shape = target.num_layers, target.kv_heads, target.head_dim
    print(
        "| tokens | computed, ms | copied, ms | copied, MiB | its row, MiB |\n|---|---|---|---|---|"
    )
    for tokens in args.tokens:
        ids = [5 + n % 900 for n in range(tokens)]
        pool = KVCache(*shape, CAPACITY, ROWS, dtype=models.dtype)
        source = pool.append_([0] * tokens, range(tokens), 0)
        pool.commit_(source, range(tokens))
        computed, copied = [], []
        for _ in range(args.repeats):
            begun = perf_counter()
            full_prefill(target, ids, models.dtype, models.device)
            between = perf_counter()
            pool.copy_(source, pool.lowest_free(tokens, 1), "prefix")
            copied.append(perf_counter() - between)
            computed.append(between - begun)
            pool.retire_([0], 1)
        row = CAPACITY * pool.slot_bytes / MEBI
        mebi = tokens * pool.slot_bytes / MEBI
        times = f"{1e3 * median(computed):.1f} | {1e3 * median(copied):.2f}"
        print(f"| {tokens} | {times} | {mebi:.1f} | {row:.0f} |")


if __name__ == "__main__":
    main()
