"""Training of the embedded target model on the generated corpus."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

from specsot.engine.prepare.options import option
from specsot.engine.train.data import Packer, TrainingBatch
from specsot.engine.train.loop import (
    MuonAdamW,
    export_beside,
    load_checkpoint,
    save_atomically,
    training_log,
    write_json,
)
from specsot.models.linear import has_products

from .corpus import Corpus
from .samples import Encode, corpus_source
from .stages import STAGES, Stage, stage_at
from .tokenizer_training import VOCABULARY, save_tokenizer, train_tokenizer

SHORT, LONG = 768, 1024  # tokens of a row
OUT: Any = option(..., "Folder of the finished model.")
RUN: Any = option(None, "Checkpoints and the log; default OUT.run.")
GENERATION = {"do_sample": False, "eos_token_id": [2, 0], "pad_token_id": 0}


@dataclass(frozen=True, kw_only=True)
class TargetTraining:
    """What to train and for how long; the first of ``minutes`` and ``tokens`` ends it."""

    out: Path = OUT
    run: Path | None = RUN
    minutes: float = option(60.0, "Stop after this much training.", min=0.01)
    tokens: int = option(16_000_000, "Stop after this many tokens.", min=1)
    seed: int = option(0, "Another seed, other samples and weights.")
    resume: bool = option(False, "Go on from the last checkpoint.")
    lr: float = 2.5e-3
    embedding_lr: float = 3e-3
    batch_tokens: int = 6144
    save_minutes: float = 4.0
    layers: int = 8
    hidden: int = 256
    intermediate: int = 768
    stages: tuple[Stage, ...] = STAGES

    @property
    def run_folder(self) -> Path:
        return self.run or self.out.with_name(f"{self.out.name}.run")


@dataclass(slots=True)
class Progress:
    """What has been trained so far; ``short`` and ``long`` are the next samples' numbers."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    short: int = 0
    long: int = 0

    def done(self, config: TargetTraining) -> float:
        """The share of the training that is over."""
        return max(self.seconds / 60.0 / config.minutes, self.tokens / config.tokens)


def model_config(config: TargetTraining) -> Qwen3Config:
    """The shape of the target."""
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.hidden // 64,
        num_key_value_heads=config.hidden // 128,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def new_model(config: TargetTraining) -> Qwen3ForCausalLM:
    """An untrained target."""
    torch.manual_seed(config.seed)
    return Qwen3ForCausalLM(model_config(config))


def batch_loss(model: Qwen3ForCausalLM, batch: TrainingBatch) -> Tensor:
    """Weighted mean cross-entropy over the positions that have a weight."""
    kept = batch.weights.flatten() > 0
    low = has_products(batch.ids.device, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        hidden = model.model(
            input_ids=batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        logits = hidden.flatten(0, 1)[kept] @ model.lm_head.weight.T
    losses = cross_entropy(logits.float(), batch.labels.flatten()[kept], reduction="none")
    weights = batch.weights.flatten()[kept]
    return (losses * weights).sum() / weights.sum()


def packers(
    stage: Stage, config: TargetTraining, encode: Encode, progress: Progress
) -> tuple[Packer, Packer]:
    """Sources of short rows and of long rows, which hold more documents."""
    base = Corpus(
        lambda text: len(encode(text)),
        seed=config.seed,
        mixture=dict(stage.mixture),
        longest_crowd=stage.longest_crowd,
        longest_drill=stage.longest_drill,
    )
    far = replace(base, seed=config.seed + 1_000_003, longest_crowd=2 * stage.longest_crowd)
    tokens = config.batch_tokens
    return (
        Packer(corpus_source(base, encode), tokens, SHORT, progress.short),
        Packer(corpus_source(far, encode), tokens, LONG, progress.long),
    )


def stage_batches(
    stage: Stage, config: TargetTraining, encode: Encode, progress: Progress
) -> Iterator[TrainingBatch]:
    """Five batches of short rows, then one of long rows, and so on; keeps count of samples."""
    short, long = packers(stage, config, encode, progress)
    shorts, longs = short.batches(), long.batches()
    while True:
        yield next(longs if progress.step % 6 == 5 else shorts)
        progress.short, progress.long = short.index, long.index


def batches(
    config: TargetTraining, tokenizer: Tokenizer, progress: Progress
) -> Iterator[TrainingBatch]:
    """Batches of the stage that the training is in, until it is over."""

    @cache
    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    while (done := progress.done(config)) < 1.0:
        stage = stage_at(config.stages, done)
        for batch in stage_batches(stage, config, encode, progress):
            yield batch
            if progress.done(config) >= min(stage.until, 1.0):
                break


def _tokenizer(config: TargetTraining) -> Tokenizer:
    folder = config.run_folder
    if not (folder / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(20_000), folder)
    write_json(GENERATION, folder / "generation_config.json")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _checkpoint(
    config: TargetTraining, model: Qwen3ForCausalLM, optimizer: MuonAdamW, progress: Progress
) -> None:
    state: dict[str, object] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": {name: getattr(progress, name) for name in Progress.__slots__},
    }
    save_atomically(state, config.run_folder / "state.pt")
    export_beside(model, config.run_folder, config.out)


def _restore(config: TargetTraining, model: Qwen3ForCausalLM, optimizer: MuonAdamW) -> Progress:
    path = config.run_folder / "state.pt"
    if not (config.resume and path.exists()):
        return Progress()
    state: dict[str, Any] = load_checkpoint(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def train_target(config: TargetTraining) -> Path:
    """Train, saving now and then; returns the folder of the exported model."""
    tokenizer = _tokenizer(config)
    model = new_model(config)
    optimizer = MuonAdamW(model, config.lr, config.embedding_lr)
    progress = _restore(config, model, optimizer)
    saved = progress.seconds
    with training_log(config.run_folder / "log.jsonl", "target") as report:
        for batch in batches(config, tokenizer, progress):
            values = _train_step(model, optimizer, batch, progress.done(config))
            progress.step += 1
            progress.tokens += batch.ids.numel()
            progress.seconds += values["seconds"]
            report(progress.done(config), **values, step=progress.step, tokens=progress.tokens)
            if progress.seconds - saved > 60.0 * config.save_minutes:
                saved = progress.seconds
                _checkpoint(config, model, optimizer, progress)
    _checkpoint(config, model, optimizer, progress)
    return config.out


def _train_step(
    model: Qwen3ForCausalLM, optimizer: MuonAdamW, batch: TrainingBatch, done: float
) -> dict[str, float]:
    """One update; returns loss, gradient norm, seconds and tokens per second."""
    start = time.monotonic()
    loss = batch_loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(done)
    seconds = time.monotonic() - start
    rate = batch.ids.numel() / seconds
    return {"loss": loss.item(), "norm": norm.item(), "seconds": seconds, "rate": rate}
