"""Training of an EAGLE-3 drafter for the embedded target."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from operator import mul
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ..models.config import RopeConfig
from ..models.eagle3 import Eagle3
from ..models.eagle3_config import Eagle3Config, default_taps
from ..models.eagle3_loss import Lesson, rehearse, shift
from .corpus import Corpus
from .corpus_pieces import Sample
from .train_data import Batch, Packer, encode_sample
from .train_files import load_checkpoint, save_atomically
from .train_log import TrainingLog
from .train_optim import Pair

GOLD = 1.0


@dataclass(frozen=True)
class Eagle3Training:
    """What to train and for how long; the first of ``minutes`` and ``tokens`` ends the run."""

    target: Path
    out: Path
    run: Path
    minutes: float = 18.0
    tokens: int = 6_000_000
    lr: float = 2e-3
    head_lr: float = 2e-3
    batch_tokens: int = 4096
    length: int = 512
    steps: int = 4
    decay: float = 0.8
    draft_vocabulary: int = 2048
    intermediate: int = 768
    seed: int = 5
    resume: bool = False
    save_minutes: float = 3.0


@dataclass(slots=True)
class Progress:
    """What has been trained so far; ``index`` is the next sample's number."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    index: int = 0

    def done(self, config: Eagle3Training) -> float:
        """The share of the training that is over."""
        return max(self.seconds / 60.0 / config.minutes, self.tokens / config.tokens)


@dataclass(frozen=True)
class LinearCorpus(Corpus):
    """Samples without a tree: the trunk with one of its branches, as a drafter meets them."""

    def sample(self, index: int) -> Sample:
        """The sample of this number."""
        tree = Corpus.sample(self, index)
        if not tree.branches:
            return tree
        branch = Random(f"branch:{self.seed}:{index}").choice(tree.branches)
        return Sample(tree.kind, tree.trunk + branch)


def draft_vocabulary(corpus: Corpus, encode: Any, size: int, samples: int = 4000) -> Tensor:
    """The most frequent ids of the texts to be written, increasing, int64 [size]."""
    counts: Counter[int] = Counter(dict.fromkeys(range(4096), 0))
    for index in range(samples):
        tokens = encode_sample(corpus.sample(index), encode)
        counts.update(i for i, w in zip(tokens.ids, tokens.weights, strict=True) if w >= GOLD)
    return torch.tensor(sorted(i for i, _ in counts.most_common(size)))


def drafter_config(config: Eagle3Training, target: Any) -> Eagle3Config:
    """The drafter's shape: the target's width and heads, one layer."""
    shape = target.config
    theta = float(shape.rope_parameters["rope_theta"])
    return Eagle3Config(
        path=config.out / "config.json",
        vocab_size=shape.vocab_size,
        draft_vocab_size=config.draft_vocabulary,
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        intermediate_size=config.intermediate,
        heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        eps=shape.rms_norm_eps,
        rope=RopeConfig("default", theta, {}, shape.max_position_embeddings),
        taps=default_taps(shape.num_hidden_layers),
    )


def new_drafter(config: Eagle3Training, target: Any, ids: Tensor) -> Eagle3:
    """An untrained drafter that shares the target's embedding; its head starts from it."""
    torch.manual_seed(config.seed)
    drafter = Eagle3(drafter_config(config, target))
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
        elif name != "embed_tokens.weight":
            nn.init.normal_(parameter, std=0.02)
    embedding = target.get_input_embeddings().weight.detach()
    drafter.embed_tokens.weight = nn.Parameter(embedding, requires_grad=False)
    drafter.lm_head.weight.data.copy_(embedding[ids])
    drafter.d2t.copy_(ids - torch.arange(len(ids)))
    drafter.t2d.fill_(False)[ids] = True
    return drafter


@torch.no_grad()
def lesson(target: Any, batch: Batch, taps: tuple[int, ...]) -> Lesson:
    """What the target says about a batch of packed rows."""
    with torch.autocast("cpu", torch.bfloat16):
        out = target(
            input_ids=batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=False,
            output_hidden_states=True,
        )
    return Lesson(
        taps_BSF=torch.cat([out.hidden_states[i] for i in taps], -1).float(),
        tokens_BS=batch.labels,
        teacher_BSV=shift(out.logits),
        counted_BS=(shift(batch.weights) >= GOLD).float(),
        positions_BS=batch.positions,
        visible_BSS=batch.mask[:, 0],
    )


def save_drafter(drafter: Eagle3, out: Path) -> None:
    """Write config and weights (bf16) in the published layout; each file is replaced whole."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to(torch.bfloat16 if value.is_floating_point() else value.dtype)
        for name, value in drafter.published().items()
    }
    save_file(tensors, out / "model.partial", metadata={"format": "pt"})
    (out / "model.partial").chmod(0o644)
    os.replace(out / "model.partial", out / "model.safetensors")
    text = json.dumps(drafter.config.to_json(), indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")


def _packer(config: Eagle3Training, progress: Progress) -> Packer:
    tokenizer = Tokenizer.from_file(str(config.target / "tokenizer.json"))

    @cache
    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    corpus = LinearCorpus(lambda text: len(encode(text)), seed=config.seed)
    return Packer(corpus, encode, config.batch_tokens, config.length, progress.index)


def _checkpoint(
    config: Eagle3Training, drafter: Eagle3, optimizer: Pair, progress: Progress
) -> None:
    state: dict[str, object] = {
        "model": drafter.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": {name: getattr(progress, name) for name in Progress.__slots__},
    }
    save_atomically(state, config.run / "state.pt")
    save_drafter(drafter, config.out)


def _restore(config: Eagle3Training, drafter: Eagle3, optimizer: Pair) -> Progress:
    path = config.run / "state.pt"
    if not (config.resume and path.exists()):
        return Progress()
    state: dict[str, Any] = load_checkpoint(path)
    drafter.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def chain_tau(accuracies: list[float]) -> float:
    """Tokens per verification of a chain of drafts, from the accuracy of each step."""
    return 1.0 + sum(accumulate(accuracies, mul), 0.0)


def train_eagle3(config: Eagle3Training) -> Path:
    """Train, saving now and then; returns the folder of the exported drafter."""
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32)
    fresh = _packer(config, Progress())
    ids = draft_vocabulary(fresh.corpus, fresh.encode, config.draft_vocabulary)
    drafter = new_drafter(config, target, ids)
    optimizer = Pair(drafter, config.lr, config.head_lr)
    progress = _restore(config, drafter, optimizer)
    packer = replace(fresh, index=progress.index)
    saved = progress.seconds
    with TrainingLog(config.run / "log.jsonl", "eagle3") as log:
        for batch in packer.batches():
            start = time.monotonic()
            values = _train_step(config, drafter, optimizer, target, batch, progress)
            progress.step += 1
            progress.tokens += batch.ids.numel()
            progress.seconds += time.monotonic() - start
            progress.index = packer.index
            log.report(progress.done(config), **values, tokens=progress.tokens)
            if progress.done(config) >= 1.0:
                break
            if progress.seconds - saved > 60.0 * config.save_minutes:
                saved = progress.seconds
                _checkpoint(config, drafter, optimizer, progress)
    _checkpoint(config, drafter, optimizer, progress)
    return config.out


def _train_step(
    config: Eagle3Training,
    drafter: Eagle3,
    optimizer: Pair,
    target: Any,
    batch: Batch,
    progress: Progress,
) -> dict[str, float]:
    """One update; returns loss, accuracy per drafted step and the tau that they mean."""
    taught = lesson(target, batch, drafter.config.taps)
    with torch.autocast("cpu", torch.bfloat16):
        verdict = rehearse(drafter, taught, config.steps)
    share = taught.counted_BS.mean().clamp_min(1e-3)
    total = verdict.total(config.decay) / share
    total.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_((p for p in drafter.parameters() if p.requires_grad), 1.0)
    optimizer.step(progress.done(config))
    found = [a.item() for a in verdict.accuracies]
    accuracies = {f"acc{i}": value for i, value in enumerate(found)}
    return {"loss": total.item(), **accuracies, "tau": chain_tau(found)}
