"""A round against its floor: the weights that it reads, at the speed at which the device copies.

    python -m tools.bench.round_floor --shape tiny --dtype float32
    python -m tools.bench.round_floor --shape 8b --device cuda
    python -m tools.bench.round_floor --device cuda --model PATH --drafter-model PATH

A shape is a target of random weights with an EAGLE-3 head, in a folder that is removed afterwards:
8b is that of Llama-3.1-8B, and takes 17 GB of disk. One sequence (`autoregressive`, `eagle`), then
five branches behind a given outline (`bim_plain`, `bim_eagle`). Milliseconds are medians of all
rounds but the first two. What random weights draft is not accepted: a model of one's own shows tau.
"""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from shutil import copy
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.prepare.job import embedded_folder, prepare
from specsot.engine.prepare.options import RunOptions
from specsot.engine.run.session import Session, load, recorded
from specsot.models.decoder import Decoder
from specsot.models.drafters.config import Eagle3Config, default_taps
from specsot.models.drafters.eagle import Eagle3
from specsot.models.families import decoder_config
from specsot.models.packed import PackedWeight
from specsot.states.text.outline import Outline, Point

QUESTION = "Write about the history of tea. Plan a weekend trip."
PARTS = 5
COPIED = {"cpu": 1 << 28, "cuda": 1 << 30}  # bytes of the buffer whose copies are timed
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 8192,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_theta": 10000.0,
    },
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500000.0,
    },
}


def write_random(folder: Path, shape: str, dtype: torch.dtype) -> tuple[Path, Path]:
    """A target and an EAGLE-3 head of random weights; their folders."""
    target, head = folder / "target", folder / "eagle3"
    for one in (target, head):
        one.mkdir()
    own = embedded_folder("target")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        copy(own / name, target)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (target / "config.json").write_text(json.dumps(config | SHAPES[shape]))
    size = decoder_config(target)
    drafter = Eagle3Config(
        path=head / "config.json",
        vocab_size=size.vocab_size,
        draft_vocab_size=size.vocab_size // 4,
        hidden_size=size.hidden_size,
        target_hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        eps=size.eps,
        rope=size.rope,
        taps=default_taps(size.num_layers),
    )
    (head / "config.json").write_text(json.dumps(drafter.to_json()))
    with torch.device("meta"):
        made: tuple[Decoder | Eagle3, ...] = Decoder(size), Eagle3(drafter)
    for model, place in zip(made, (target, head), strict=True):
        save_file(_random(model, dtype), place / "model.safetensors", {"format": "pt"})
    return target, head


def _random(model: Decoder | Eagle3, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = {}
    for name, like in model.published().items():
        if name == "d2t":
            found[name] = torch.zeros(like.shape, dtype=torch.int64)
        elif name == "t2d":
            found[name] = torch.arange(len(like)) < model.config.draft_vocab_size
        elif like.ndim == 1:
            found[name] = torch.ones(like.shape, dtype=dtype)
        else:
            found[name] = torch.empty(like.shape, dtype=dtype).normal_(std=like.shape[1] ** -0.5)
    return found


def bandwidth(device: str) -> float:
    """Bytes that a copy reads and writes in a second, the fastest of twenty."""
    source = torch.ones(COPIED[torch.device(device).type], dtype=torch.uint8, device=device)
    target, took = torch.empty_like(source), []
    for _ in range(20):
        _finish(device)
        began = perf_counter()
        target.copy_(source)
        _finish(device)
        took.append(perf_counter() - began)
    return 2 * len(source) / min(took)


def _finish(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def weight_bytes(model: nn.Module | None) -> int:
    """Of the matrices but the embedding, of which a forward reads a few rows."""
    if model is None:
        return 0
    count = 0
    for name, module in model.named_modules():
        kernel = getattr(module, "kernel", None)
        if isinstance(kernel, PackedWeight):
            count += kernel.blocks.nbytes
            continue
        held = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        not_read = ("embed", "frequencies")
        read = [
            one
            for own, one in held
            if one.ndim == 2 and not any(part in f"{name}.{own}" for part in not_read)
        ]
        count += sum(one.numel() * one.element_size() for one in read)
    return count


def rounds_of(session: Session) -> tuple[list[float], float, float]:
    """Seconds of the rounds of one run; forwards of the drafter in a round, and tau."""
    run, recorder = recorded(session, [Prompt("floor", QUESTION)], None)
    meter, found = recorder.meter, list[float]()
    began, done = perf_counter(), 0
    while not run.finished:
        run.advance()
        if meter.forwards > done:
            now, done = perf_counter(), meter.forwards
            found.append(now - began)
            began = now
    drafts = meter.draft_forwards / max(meter.forwards, 1)
    run.close()
    return found[2:], drafts, meter.tau_step


def measure(args: Namespace, folders: tuple[str, str], speed: float) -> None:
    """One line for each graph."""
    points = (Point(n, args.tokens, None, (), f"Part {n}") for n in range(1, PARTS + 1))
    outline = Outline("plan", tuple(points), (), "ok")
    for graph in ("autoregressive", "eagle", "bim_plain", "bim_eagle"):
        given = dict(zip(("model", "drafter_model"), folders, strict=True))
        if graph in ("autoregressive", "bim_plain"):
            del given["drafter_model"]
        device, threads = args.device, args.threads
        more = {"dtype": args.dtype, "device": device, "threads": threads}
        job = prepare(RunOptions(graph, **given, **more, max_new_tokens=args.tokens))
        if graph.startswith("bim"):
            job = replace(job, outline=outline)
        session = load(job)
        rounds_of(session)
        seconds, drafts, tau = rounds_of(session)
        models = session.models
        read = weight_bytes(models.target) + drafts * weight_bytes(models.drafter)
        took, floor = 1e3 * median(seconds), 1e3 * read / speed
        print(
            f"| `{graph}` | {PARTS if job.outline else 1} | {read / 1e6:.0f} | {floor:.2f} | "
            f"{took:.2f} | {took / floor:.1f} | {drafts:.1f} | {tau:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--model", default="")
    parser.add_argument("--drafter-model", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    speed = bandwidth(args.device)
    print(f"{args.device}: copies {speed / 1e9:.1f} GB/s, {args.dtype}, {args.threads} threads\n")
    print("| graph | branches | MB read | floor, ms | round, ms | times | drafter forwards | tau |")
    print("|---|---|---|---|---|---|---|---|")
    if not args.shape:
        measure(args, (args.model, args.drafter_model), speed)
        return
    with TemporaryDirectory(prefix="specsot-floor-") as folder:
        target, head = write_random(Path(folder), args.shape, getattr(torch, args.dtype))
        measure(args, (str(target), str(head)), speed)


if __name__ == "__main__":
    main()
