"""What the checks of a certificate share: the graph with other settings, its models, transformers.

Everything that is certified runs through the ops that the graph resolves to, on the models it was
given; only settings are changed, as `--set` changes them.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.files import ModelError
from ...models.quantise import Weights, quantise_
from ...ops.registry import OpTable
from ...states.graph.load import load_program, op_table
from ...states.request import Branch
from ..bench.sides import SharedModels, Side
from ..prepare.inputs import Prompt
from ..prepare.job import Job
from ..run.scoring import Segments, visible

SHOWN = 5  # differences that are shown


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; figures: what was measured and what it was measured against, by name."""

    name: str
    passed: bool
    figures: Mapping[str, float]
    text: str


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is looked at.

    prompts, tokens: of the greedy runs, and tokens of each branch at most; None for all and for
        what the graph says. generated: prompts whose answers `generate` writes too.
    drawn_prompts, seeds, drawn_tokens: of every setting that is drawn with.
    answers: that are drawn through whole runs. gate_tokens: of each branch in a gate.
    """

    prompts: int | None
    tokens: int | None
    generated: int
    drawn_prompts: int
    seeds: int
    drawn_tokens: int
    answers: int
    gate_tokens: int


FULL = Extent(None, None, 3, 5, 3, 48, 2000, 24)
QUICK = Extent(3, 48, 1, 2, 2, 24, 1000, 16)


@dataclass(frozen=True, slots=True)
class Transformers:
    """The checkpoint of a folder in transformers, loaded once for each dtype.

    weights: how the target's are kept; the reference of a quantised one has what its codes say.
    """

    folder: Path
    device: str
    weights: str = "full"
    _loaded: dict[str, Any] = field(default_factory=dict)

    def model(self, dtype: str) -> Any:
        """Raises ModelError: transformers cannot load it."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        if dtype not in self._loaded:
            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            try:
                load = AutoModelForCausalLM.from_pretrained
                model = load(self.folder, dtype=getattr(torch, dtype))
            except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
                reason = str(error).strip().split("\n", 1)[0]
                message = f"transformers cannot load it, so nothing can be held to it: {reason}"
                raise ModelError(self.folder, message) from None
            quantise_(model, Weights.of(self.weights).kind)
            self._loaded[dtype] = model.train(False).to(self.device)
        return self._loaded[dtype]

    def logits(self, ids: Sequence[int], dtype: str, segments: Segments = ()) -> Tensor:
        """[Q, V] behind every one of these ids, in one forward.

        Args:
            segments: what of the ids each one sees; by default all before it.
        """
        model = self.model(dtype)
        options = _options(model, segments, len(ids)) if segments else {}
        with torch.inference_mode():
            logits: Tensor = model(self._ids(ids), use_cache=False, **options).logits[0]
        return logits

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.device)

    def generate(
        self, branch: Branch, context: Sequence[int], dtype: str, **beams: Any
    ) -> tuple[list[int], float | None]:
        """What `generate` writes for a branch, the stop token included, and a beam search's score.

        A branch under a grammar is written with the grammar as a logits processor.

        Args:
            beams: num_beams, length_penalty, early_stopping of a beam search.
        """
        ids = self._ids(context)
        grammar = grammar_of(branch)
        with torch.inference_mode():
            output = self.model(dtype).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=branch.budget,
                eos_token_id=sorted(branch.request.stop_ids) or None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
                logits_processor=[] if grammar is None else [_only_legal(grammar, len(context))],
                **beams,
            )
        scores = getattr(output, "sequences_scores", None)
        tokens: list[int] = output.sequences[0, len(context) :].tolist()
        return tokens, None if scores is None else float(scores[0])


def _options(model: Any, segments: Segments, count: int) -> dict[str, Any]:
    """Positions, and a mask [1, 1, Q, Q] of what is added to scores; one for each kind of layer,
    where some see no further back than a window."""
    positions_Q, mask_QQ = (one.to(model.device) for one in visible(segments, count))
    window = getattr(model.config, "sliding_window", None) or count + int(positions_Q.max())
    near_QQ = mask_QQ & (positions_Q[:, None] - positions_Q[None] < window)

    def added(seen_QQ: Tensor) -> Tensor:
        none_QQ = torch.zeros(seen_QQ.shape, dtype=model.dtype, device=model.device)
        return none_QQ.masked_fill(~seen_QQ, torch.finfo(model.dtype).min)[None, None]

    mask: Any = added(near_QQ if model.config.model_type == "mistral" else mask_QQ)
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        mask = {"full_attention": added(mask_QQ), "sliding_attention": added(near_QQ)}
    return {"position_ids": positions_Q[None], "attention_mask": mask}


def grammar_of(branch: Branch) -> Any:
    """What an answer was written under (states.grammar.Matcher), at its beginning, or None."""
    new = branch.request.new_matcher
    return new() if new is not None and branch.matcher is not None else None


def _only_legal(matcher: Any, start: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A logits processor that leaves the tokens that a grammar allows; start: ids before it."""

    def process(ids_1Q: Tensor, scores_1V: Tensor) -> Tensor:
        for token in ids_1Q[0, start + matcher.consumed :].tolist():
            matcher.advance(token)
        legal_V = torch.from_numpy(matcher.legal_mask()).to(scores_1V.device)
        return scores_1V.masked_fill(~legal_V, -torch.inf)

    return process


@dataclass(frozen=True, slots=True)
class Bench:
    """One graph under test.

    job: the graph as it was given; reference: its target; drafter: the folder of its drafter.
    shelf: its models, by dtype. tell: shows what goes on.
    """

    job: Job
    reference: Transformers
    drafter: Path | None
    extent: Extent
    tell: Callable[[str], None]
    shelf: SharedModels = field(default_factory=SharedModels)
    table: OpTable = field(default_factory=op_table)

    @property
    def dtype(self) -> str:
        return self.job.options.dtype

    def show(self, text: str, share: float) -> None:
        """What goes on while prompts are answered."""
        self.tell(text)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return self.job.prompts[: self.extent.prompts]

    def changed(self, *sets: str, tokens: int | None = None, **others: Any) -> Job:
        """The graph with other settings. Finished parts that it combines are computed anew.

        Args:
            tokens: the most of each branch; fewer if the graph or the command line says so.
            others: options of `specsot run`.

        Raises:
            GraphError: the graph cannot be so.
        """
        source = deepcopy(self.job.program.source)
        skeleton = self.job.program.graph.skeleton
        options = self.job.options
        # A blended fold is an approximation: transformers has nothing to hold it to.
        if skeleton is not None and skeleton.merge == "blend":
            sets = ("skeleton.merge=plain", *sets)
        program = load_program(source, self.table, sets=sets)
        own = options.max_new_tokens or program.graph.limits.max_new_tokens
        most = own if tokens is None else min(own, tokens)
        options = replace(options, max_new_tokens=most, **others)
        return replace(self.job, program=program, options=options)

    def side(self, job: Job, letter: str = "A") -> Side:
        """A job with its models, loaded when they are first asked for; raises ModelError."""
        drafter = self.drafter if job.program.graph.drafter.has_model else None
        return self.shelf.side(letter, job, self.reference.folder, drafter)
