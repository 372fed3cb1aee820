"""Time to first token of a prompt whose chunks are cached, against that of a full prefill."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from specsot.engine.chunks.store import ChunkStore
from specsot.engine.models import Models
from specsot.engine.run.session import Session
from specsot.models.decoder import Decoder
from specsot.models.families import decoder_config
from specsot.ops.layer_plan import LayerShape, blend_flops, prefill_flops
from specsot.states.machine import Run
from specsot.states.request import Request
from specsot.states.text.documents import CHUNK_TOKENS, split_ids
from specsot.states.text.tokens import PromptTokens

from .blend_modes import FULL, Mode, collected, session_of

CONTEXT = 8192
SHAPE = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
Tell = Callable[[str], None]


def random_models(shape: dict[str, Any]) -> Models:
    """A target of this shape with random weights, in memory; no drafter, no tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        target = Decoder(decoder_config(Path(folder))).requires_grad_(False).eval()
    draw = torch.Generator().manual_seed(0)
    for name, view in target.published().items():
        view.fill_(1.0) if name.endswith("norm.weight") else view.normal_(0, 0.02, generator=draw)
    return Models(target, None, None, (), torch.device("cpu"), torch.float32)


def measure(
    models: Models, modes: Sequence[Mode], tokens: int, suffix: int, repeats: int, tell: Tell
) -> dict[str, Any]:
    """One length: per mode medians of seconds and of the ratio to a round's full prefill.

    Every round runs every mode once, in turn, so that drifts of the machine hit all alike; a round
    before them fills the store and is not counted. Timed is the first phase of a run, from the
    admission of its one request to its first token, with the look-up of the chunks.
    """
    store = ChunkStore(1 << 32)
    size = f"layout.kv_slots={tokens + 16}"
    fixed = (size, "limits.max_new_tokens=2", "layout.max_num_branches=1", "drafter.kind=none")
    opened = {mode: session_of(mode, models, store, *fixed, prompts=NoPrompts()) for mode in modes}
    written = prompt_of(tokens, suffix, models.target.vocab_size)
    seconds: dict[Mode, list[float]] = {mode: [] for mode in modes}
    rows: dict[Mode, int] = {}
    for number in range(repeats + 1):
        for mode, session in opened.items():
            took, rows[mode] = first_token(session, written, fill=number == 0)
            seconds[mode] += [took] if number else []
            tell(f"{tokens} tokens, round {number} of {repeats}, {mode.name}: {took:.3f} s")
    (full,) = (mode for mode in modes if mode.name == FULL)
    return {
        mode.name: {
            "seconds": median(took),
            "relative": median(t / f for t, f in zip(took, seconds[full], strict=True)),
            "model": cost(models.target, mode, tokens - suffix, suffix),
            "rows": rows[mode],
        }
        for mode, took in seconds.items()
    }


class NoPrompts:
    """Stands in for a `PromptBook`: prompts are ids here."""

    share = "outline"
    stop_ids = ()


def prompt_of(tokens: int, suffix: int, vocabulary: int) -> PromptTokens:
    """Random ids: chunks of documents, then the suffix."""
    draw = torch.Generator().manual_seed(tokens)
    ids = torch.randint(vocabulary, (tokens,), generator=draw).tolist()
    chunks = split_ids(ids[: tokens - suffix], CHUNK_TOKENS)
    written = sum(
        (PromptTokens.chunk(part, str(n)) for n, part in enumerate(chunks)), PromptTokens()
    )
    return written + ids[tokens - suffix :]


def first_token(session: Session, written: PromptTokens, *, fill: bool) -> tuple[float, int]:
    """(seconds, rows that the last layer computed)."""
    request = Request("1", 0, "", PromptTokens(), written, frozenset(), 2, 0)
    board = session.board()
    board["branches"].submit(request)
    with Run(session.program, board, lambda event: None) as run:
        began = perf_counter()
        while run.state != "prefill":
            run.advance()
        took = perf_counter() - began
        (branch,) = request.branches
        assert run.state == "prefill" and len(branch.tokens) == 1
        assert fill or not collected(run), "a chunk was read in the time that is measured"
        blend = run.board["committed"].blend
        return took, blend.live[-1] if blend is not None else len(written.ids)


def cost(target: Decoder, mode: Mode, context: int, suffix: int) -> float:
    """The share of a full prefill's operations that is left by the cost model."""
    config, layers = target.config, target.num_layers
    if mode.settings.kind_for(context) == "plain":
        return 1.0
    widths = config.hidden_size, config.intermediate_size
    shape = LayerShape(*widths, config.heads, config.kv_heads, config.head_dim)
    done = blend_flops(shape, layers, mode.settings, context, suffix)
    return done / prefill_flops(shape, layers, context + suffix)
