"""Describe a model folder without loading it: headers, configuration, tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from ..config import DecoderConfig, shape_fields
from ..decoder import Decoder
from ..drafters.config import (
    DFLASH_POSITIONS,
    EAGLE_POSITIONS,
    MEDUSA_BLOCK,
    STATES_KEY,
    TAPS_KEY,
)
from ..families import decoder_config
from ..files import Fields, ModelError, cause_of, read_fields
from .tokenizer import has_tokenizer, load_tokenizer, stop_ids
from .weights import KINDS, LOADERS, MTP, entries, kind_of, load_target, on_meta

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}  # bytes; others count as 1
DEFAULT_LAYERS = 32  # of the assumed target of a drafter whose file does not give them
MAX_LAYERS = 256


@dataclass(slots=True)
class Inspection:
    """The description of a model folder, collected in steps: if one fails, the next ones still run.

    kind: `target`, `drafter`, or `unknown`. family: of a target (llama), or of a drafter (eagle3).
    kinds: of drafters of the graphs that can use it, as target or as drafter; none with problems.
    assumed: where its files are silent or ambiguous. problems: why it cannot be used."""

    kind: str = "unknown"
    family: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)

    def attempt(self, step: Callable[[Path], None], path: Path) -> None:
        try:
            step(path)
        except Exception as error:  # others than ModelError: of the libraries that read the folder
            problem = str(error) if isinstance(error, ModelError) else f"{path}: {cause_of(error)}"
            if problem not in self.problems:
                self.problems.append(problem)

    def weights(self, path: Path) -> None:
        read_fields(path)  # refuses folders that are not models
        stored = entries(path)
        tensors = kind_of(stored)
        if tensors in LOADERS:
            self.kind = "drafter"
            self.family = tensors
        values = sum(prod(entry.shape) for entry in stored.values())
        size = sum(prod(e.shape) * WIDTHS.get(e.dtype, 1) for e in stored.values())
        files = len({entry.path for entry in stored.values()})
        self.facts |= {
            "is": KINDS.get(tensors, "unknown by its tensors"),
            "parameters": f"{values / 1e6:,.1f} M in {len(stored)} tensors",
            "size": f"{size / 1e6:,.1f} MB in {files} file{'s' if files > 1 else ''}",
            "stored as": ", ".join(sorted({entry.dtype for entry in stored.values()})),
        }

    def target(self, path: Path) -> None:
        config = decoder_config(path)
        self.kind = "target"
        self.family = config.family
        self.assumed = config.notes
        heads = f"{config.heads} heads, {config.kv_heads} for keys, of {config.head_dim}"
        rope = config.rope
        self.facts |= {
            "layers": str(config.num_layers),
            "hidden size": f"{config.hidden_size} ({heads})",
            "vocabulary": f"{config.vocab_size}{', tied' if config.tied else ''}",
            "context": f"{rope.limit} positions, RoPE {rope.kind} {rope.theta:g}",
            "dtype": config.dtype or "not given",
        }
        self.kinds = ("none", "ngram", "recycle", "suffix", "vanilla")
        if any(name.startswith(MTP) for name in entries(path)):
            self.kinds += ("mtp",)
        self.attempt(self.tensors, path)
        self.attempt(lambda path: self.tokens(path, config), path)

    def tensors(self, path: Path) -> None:
        self.assumed = load_target(path, device="meta").notes

    def tokens(self, path: Path, config: DecoderConfig) -> None:
        if not has_tokenizer(path):
            self.facts["tokenizer"] = "none: it can draft for a target, not answer"
            self.kinds = ("vanilla",)
            return
        tokenizer = load_tokenizer(path, config)
        template = str(tokenizer.chat_template or "")
        thinking = " with a switch for thinking (used: off)" if "thinking" in template else ""
        stops = stop_ids(config, tokenizer)
        self.facts |= {
            "tokenizer": f"{len(tokenizer)} tokens",
            "chat template": f"yes{thinking}" if template else "none",
            "stop ids": ", ".join(f"{i} {tokenizer.decode([i])!r}" for i in stops) or "none",
        }
        if not stops:
            self.assumed += ("no stop ids: answers end where their budget does",)

    def drafter(self, path: Path) -> None:
        """Load it without values, for a target with the sizes that the drafter's file gives."""
        self.kinds = ("eagle2" if self.family == "eagle" else self.family,)
        fields = read_fields(path)
        medusa = self.family == "medusa"
        if medusa:  # its config.json has no sizes, its tensors have
            stored = entries(path)
            inner, hidden = next(e.shape for n, e in stored.items() if MEDUSA_BLOCK.fullmatch(n))
            lasts = (e for n, e in stored.items() if "linear" not in n and "layers" not in n)
            ends = [e.shape[0] for e in lasts if len(e.shape) == 2] or [inner]
            sizes = {"vocab_size": ends[0], "hidden_size": hidden, "intermediate_size": 1}
            fields = Fields(fields.path, {**sizes, "num_attention_heads": 1, **fields.values})
        section = fields.section("transformer_layer_config")
        dflash = self.family == "dflash"
        layout = {"dflash": "z-lab", "medusa": "FasterDecoding"}.get(self.family, "SafeAILab")
        sections = (fields, fields.section("eagle_config"), fields.section("dflash_config"))
        keys = (TAPS_KEY, STATES_KEY, "target_layer_ids")
        named = [i for part in sections for key in keys for i in part.ids(key)]
        layers = fields.integer("num_target_layers", max(named) + 3 if named else DEFAULT_LAYERS)
        sliding = (False,) * min(layers, MAX_LAYERS)
        layer = section if section.values else fields
        assumed = (DFLASH_POSITIONS, 128) if dflash else (EAGLE_POSITIONS, 0)
        shape = shape_fields(layer, *assumed)
        hidden = shape["hidden_size"]
        vocabulary = shape["vocab_size"]
        shape["hidden_size"] = fields.integer("target_hidden_size", hidden)
        self.facts |= {
            "layout": layout if fields.get("speculators_model_type") is None else "speculators",
            "hidden size": f"{hidden}, the target's {shape['hidden_size']}",
            "vocabulary": f"{fields.integer('draft_vocab_size', vocabulary)} of {vocabulary}",
        }
        config = DecoderConfig(**shape, family="llama", num_layers=len(sliding), sliding=sliding)
        target = on_meta(config.path, lambda: Decoder(config))
        drafter = LOADERS[self.family](path, target, device="meta")
        self.assumed = tuple(note for note in drafter.notes if not note.startswith("taps "))
        if dflash:
            self.facts["block"] = f"{drafter.block_size}, mask token {drafter.mask_token_id}"
        if medusa:
            self.facts["heads"] = f"{drafter.config.heads}, {drafter.config.blocks} blocks each"
            self.facts |= {"layout": "vLLM"} if drafter.config.vllm else {}
        if self.family in ("eagle", "medusa") or named:
            where = ", ".join(map(str, drafter.tap_ids)) if named else "the last, after its norm"
            self.facts["reads hidden states"] = where
        else:
            note = "which states of the target it reads is not given: by its kind's rule"
            self.assumed += (note,)


def inspect_model(path: Path) -> Inspection:
    """Read a folder as the loaders would, without the values of its weights; never raises."""
    report = Inspection()
    report.attempt(report.weights, path)
    report.attempt(report.drafter if report.kind == "drafter" else report.target, path)
    if report.problems:
        report.kinds = ()
    return report
