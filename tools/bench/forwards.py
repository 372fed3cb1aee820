"""How long a forward takes, by its rows.

    python -m tools.bench.forwards smollm2 --dtype bfloat16 --threads 1
    python -m tools.bench.forwards smollm2 --dtype bfloat16 --threads 1 --torch

Medians in milliseconds of forwards after 128 tokens, and of reading 256 tokens. `--torch` leaves
the compiled kernels out."""

from argparse import ArgumentParser
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from specsot.engine.hub import find_model
from specsot.engine.models import load_models
from specsot.engine.prepare.job import EMBEDDED, embedded_folder
from specsot.engine.run.scoring import prefill
from specsot.models import packed
from specsot.ops.kv.pool import KVCache

ROWS = (1, 2, 4, 8, 16, 32)
CACHED = 128
PROMPT = 256


def milliseconds(forward: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = perf_counter()
        forward()
        times.append(1e3 * (perf_counter() - start))
    return median(times[1:])


@torch.inference_mode()
def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weights", default="full")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--torch", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.torch:
        packed.SUPPORTED = frozenset()
    folder = embedded_folder("target") if args.model == EMBEDDED else find_model(args.model)
    target = load_models(folder, None, dtype=args.dtype, weights=args.weights).target
    shape = (target.num_layers, target.kv_heads, target.head_dim)
    kv = KVCache(*shape, PROMPT, dtype=target.dtype)
    ids = list(range(100, 100 + PROMPT))
    reading = milliseconds(lambda: prefill(target, ids, kv), 3)
    times = []
    for rows in ROWS:
        some = ids[:rows]
        times.append(
            milliseconds(
                lambda some=some: prefill(target, some, kv, start=CACHED, first_logits=0),
                args.repeats,
            )
        )
    numbers = " | ".join(f"{time:.1f}" for time in times)
    print(f"| {args.model}, {args.dtype}, {args.weights} | {numbers} | {reading:.0f} |")


if __name__ == "__main__":
    main()
