"""Perplexity of a text under a model in each format of its weights.

    python -m tools.smollm2.perplexity docs/concepts.md docs/architecture.md

The first tokens of the files, in windows that begin without context."""

from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer

from specsot.engine.hub import find_model
from specsot.engine.models import load_models
from specsot.engine.run.scoring import prefill
from specsot.ops.kv.pool import KVCache


@torch.inference_mode()
def main(
    texts: list[Path],
    model: str = "smollm2",
    weights: Annotated[list[str] | None, typer.Option(help="Formats [all].")] = None,
    dtype: str = "float32",
    tokens: int = 2400,
    window: int = 800,
) -> None:
    text = "".join(path.read_text() for path in texts)
    for kind in weights or ["full", "int8", "int4"]:
        models = load_models(find_model(model), None, dtype=dtype, weights=kind)
        target = models.target
        ids = models.tokenizer.encode(text)[:tokens]
        losses = []
        for first in range(0, len(ids), window):
            part = ids[first : first + window]
            shape = (target.num_layers, target.kv_heads, target.head_dim, len(part))
            kv = KVCache(*shape, dtype=models.dtype)
            logits_QV = prefill(target, part, kv, first_logits=0).logits_RV.double()
            expected_Q = torch.tensor(part[1:])
            losses.append(F.cross_entropy(logits_QV[:-1], expected_Q, reduction="none"))
        typer.echo(f"{kind}: {torch.cat(losses).mean().exp():.2f}, {len(ids)} tokens")


if __name__ == "__main__":
    typer.run(main)
