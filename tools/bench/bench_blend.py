"""CacheBlend: time to first token, answers and distributions against the share recomputed.

    python -m tools.bench.bench_blend --threads 2 --plot
    python -m tools.bench.bench_blend --part none --plot

Two parts. `ttft`: a random-weight Llama of 125 million parameters (12 layers x 768), prompts whose
chunks are in the store, beside the cost model. `quality`: the embedded target and generated prompts
with known answers. Tables go to stdout, figures into a JSON file after every length, so that an
interrupted measurement keeps what it has; `--resume` goes on behind it. `--plot` writes tables and
plots into docs/. The second command does that alone, from the file.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from specsot.engine.models import load_models
from specsot.engine.prepare.environment import embedded_folder

from . import blend_page, blend_quality, blend_ttft
from .blend_modes import Mode, modes_of

ROOT = Path(__file__).parents[2]


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Values with commas between them, as an option."""
    return lambda text: [kind(part) for part in text.split(",")]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("all", "ttft", "quality", "none"), default="all")
    parser.add_argument("--ratios", type=numbers(float), default=[0, 0.05, 0.15, 0.3, 0.5])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=numbers(int), default=[512, 1024, 2048, 4096])
    parser.add_argument("--suffix", type=int, default=64, help="tokens behind the documents")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sizes", type=numbers(int), default=[140, 300], help="of the documents")
    parser.add_argument("--prompts", type=int, default=50, help="of each kind and size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=ROOT / "runs" / "bench_blend.json")
    parser.add_argument("--resume", action="store_true", help="keep what the JSON file has")
    parser.add_argument("--plot", action="store_true", help="write tables and plots into --docs")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    return parser


def conditions(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """What a part was measured with; parts measured otherwise are not put together."""
    found = {name: getattr(args, name) for name in ("ratios", "threads", *names)}
    return found | {"torch": torch.__version__, "machine": platform.machine(), "dtype": "float32"}


def section(results: dict[str, Any], name: str, given: dict[str, Any], key: str) -> dict[str, Any]:
    """The lengths of a part that are measured already; none if it was measured otherwise."""
    if results.get(name, {}).get("conditions") != given:
        results[name] = {"conditions": given, key: {}}
    return results[name][key]


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ttft(args: argparse.Namespace, modes: tuple[Mode, ...], results: dict[str, Any]) -> None:
    done = section(results, "ttft", conditions(args, "suffix", "repeats"), "tokens")
    models = blend_ttft.random_models(blend_ttft.SHAPE)
    for tokens in args.tokens:
        if str(tokens) not in done:
            found = blend_ttft.measure(models, modes, tokens, args.suffix, args.repeats, tell)
            done[str(tokens)] = found
            keep(args, results, blend_page.ttft_table(results["ttft"]))


def quality(args: argparse.Namespace, modes: tuple[Mode, ...], results: dict[str, Any]) -> None:
    done = section(results, "quality", conditions(args, "prompts", "seed"), "sizes")
    models = load_models(embedded_folder("target"), embedded_folder("eagle3"))
    for size in args.sizes:
        if str(size) not in done:
            found = blend_quality.measure(models, modes, size, args.prompts, args.seed, tell)
            done[str(size)] = found
            keep(args, results, blend_page.quality_tables(results["quality"]))


def keep(args: argparse.Namespace, results: dict[str, Any], table: str) -> None:
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table, flush=True)


def main(given: list[str] | None = None) -> None:
    args = options().parse_args(given)
    torch.set_num_threads(args.threads)
    kept = args.resume or args.part != "all"
    results = json.loads(args.json.read_text()) if kept and args.json.exists() else {}
    if not args.resume:
        for part in ("ttft", "quality") if args.part == "all" else (args.part,):
            results.pop(part, None)
    began, modes = perf_counter(), modes_of(args.ratios)
    if args.part in ("all", "ttft"):
        ttft(args, modes, results)
    if args.part in ("all", "quality"):
        quality(args, modes, results)
    if args.plot and not results:
        sys.exit(f"{args.json}: no figures in it")
    if args.plot:
        blend_page.write(args.docs, results)
    tell(f"{perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
