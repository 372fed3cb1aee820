"""Describe a model folder without loading it: headers, configuration, tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ..config import DecoderConfig, shape_fields
from ..decoder import Decoder
from ..drafters.config import STATES_KEY, TAPS_KEY
from ..families import decoder_config
from ..files import ModelError, read_fields
from .checkpoint import KINDS, entries, kind_of, on_meta
from .tokenizer import cause_of, has_tokenizer, load_tokenizer, stop_ids
from .weights import LOADERS, load_target

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}  # bytes; others count as 1
DEFAULT_LAYERS = 32  # of the assumed target of a drafter whose file does not give them
MAX_LAYERS = 256


@dataclass(frozen=True, slots=True)
class Inspection:
    """The description of a model folder.

    kind: `target`, `drafter`, or `unknown`. family: of a target (llama), or of a drafter (eagle3).
    facts: names and values for display. assumed: where its files are silent or ambiguous.
    kinds: of drafters of the graphs that can use it, as target or as drafter; empty if there are
        problems.
    problems: why it cannot be used.
    """

    kind: str
    family: str
    facts: tuple[tuple[str, str], ...]
    kinds: tuple[str, ...]
    assumed: tuple[str, ...]
    problems: tuple[str, ...]


def inspect_model(path: Path) -> Inspection:
    """Read a folder as the loaders would, without the values of its weights.

    Bad content is listed in `problems`, and never raised.
    """
    inspector = _Inspector(path)
    inspector.attempt(inspector.weights)
    drafts = inspector.tensors_kind in LOADERS
    inspector.attempt(inspector.drafter if drafts else inspector.target)
    kind = "drafter" if drafts else "target" if inspector.family else "unknown"
    kinds = () if inspector.problems else inspector.kinds
    facts = tuple(inspector.facts.items())
    problems = tuple(dict.fromkeys(inspector.problems))
    return Inspection(kind, inspector.family, facts, kinds, inspector.assumed, problems)


class _Inspector:
    """Collects facts in steps: if a step fails, the next ones still run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors_kind = ""
        self.family = ""
        self.facts: dict[str, str] = {}
        self.kinds: tuple[str, ...] = ()
        self.assumed: tuple[str, ...] = ()
        self.problems: list[str] = []

    def attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except ModelError as error:
            self.problems.append(str(error))
        except Exception as error:  # of the libraries that read the folder
            self.problems.append(f"{self.path}: {cause_of(error)}")

    def weights(self) -> None:
        read_fields(self.path)  # refuses folders that are not models
        stored = entries(self.path)
        self.tensors_kind = kind_of(stored)
        values = sum(prod(entry.shape) for entry in stored.values())
        size = sum(prod(e.shape) * WIDTHS.get(e.dtype, 1) for e in stored.values())
        self.facts["is"] = KINDS.get(self.tensors_kind, "unknown by its tensors")
        self.facts["parameters"] = f"{values / 1e6:,.1f} M in {len(stored)} tensors"
        files = len({entry.path for entry in stored.values()})
        self.facts["size"] = f"{size / 1e6:,.1f} MB in {files} file{'s' if files > 1 else ''}"
        self.facts["stored as"] = ", ".join(sorted({entry.dtype for entry in stored.values()}))

    def target(self) -> None:
        config = decoder_config(self.path)
        self.family = config.family
        self.assumed = config.notes
        heads = f"{config.heads} heads, {config.kv_heads} for keys, of {config.head_dim}"
        rope = config.rope
        tied = ", tied" if config.tied else ""
        self.facts |= {
            "layers": str(config.num_layers),
            "hidden size": f"{config.hidden_size} ({heads})",
            "vocabulary": f"{config.vocab_size}{tied}",
            "context": f"{rope.limit} positions, RoPE {rope.kind} {rope.theta:g}",
            "dtype": config.dtype or "not given",
        }
        self.kinds = ("none", "ngram", "vanilla")
        self.attempt(self.tensors)
        self.attempt(lambda: self.tokens(config))

    def tensors(self) -> None:
        self.assumed = load_target(self.path, device="meta").notes

    def tokens(self, config: DecoderConfig) -> None:
        if not has_tokenizer(self.path):
            self.facts["tokenizer"] = "none: it can draft for a target, not answer"
            self.kinds = ("vanilla",)
            return
        tokenizer = load_tokenizer(self.path, config)
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

    def drafter(self) -> None:
        """Load it without values, for a target with the sizes that the drafter's file gives."""
        self.kinds = ("eagle2" if self.tensors_kind == "eagle" else self.tensors_kind,)
        self.family = self.tensors_kind
        fields = read_fields(self.path)
        section = fields.section("transformer_layer_config")
        dflash = self.tensors_kind == "dflash"
        layout = "z-lab" if dflash else "SafeAILab"
        sections = (fields, fields.section("eagle_config"), fields.section("dflash_config"))
        keys = (TAPS_KEY, STATES_KEY, "target_layer_ids")
        named = [i for part in sections for key in keys for i in part.ids(key)]
        layers = fields.integer("num_target_layers", max(named) + 3 if named else DEFAULT_LAYERS)
        layers = min(layers, MAX_LAYERS)
        layer = section if section.values else fields
        shape = shape_fields(layer, DEFAULT_LAYERS, 128 if dflash else 0)
        hidden = shape["hidden_size"]
        vocabulary = shape["vocab_size"]
        shape["hidden_size"] = fields.integer("target_hidden_size", hidden)
        self.facts |= {
            "layout": layout if fields.get("speculators_model_type") is None else "speculators",
            "hidden size": f"{hidden}, the target's {shape['hidden_size']}",
            "vocabulary": f"{fields.integer('draft_vocab_size', vocabulary)} of {vocabulary}",
        }
        config = DecoderConfig(
            **shape,
            family="llama",
            num_layers=layers,
            tied=False,
            window=0,
            sliding=(False,) * layers,
            eos_ids=(),
            pad_ids=(),
            bos_ids=(),
            dtype="",
        )
        target = on_meta(config.path, lambda: Decoder(config))
        drafter = LOADERS[self.tensors_kind](self.path, target, device="meta")
        self.assumed = tuple(note for note in drafter.notes if not note.startswith("taps "))
        if dflash:
            self.facts["block"] = f"{drafter.block_size}, mask token {drafter.mask_token_id}"
        if self.tensors_kind == "eagle" or named:
            where = ", ".join(map(str, drafter.tap_ids)) if named else "the last, behind its norm"
            self.facts["reads hidden states"] = where
        else:
            self.assumed += (
                "which states of the target it reads is not given: by its kind's rule",
            )
