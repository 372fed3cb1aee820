"""Beam searches on tiny models: a run of them, what must hold, and what transformers finds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.support import FixedBook, Graphs, Reference, drive, start, tiny_models
from helpers.tiny_models.tiny import likely_ids, write_tiny_target
from specsot.engine.models import Models
from specsot.engine.prepare.inputs import Prompt
from specsot.states.machine import Run

FLATTER = 0.2  # by so much the head is scaled: several continuations are likely everywhere
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {}, "mistral": {"sliding_window": 11}}
LAYOUTS = ("bim", "batching", "paged")
PROMPTS = {"a": 1, "b": 9, "c": 24}  # prompts by their lengths


@dataclass
class Rig:
    """A tiny model in float64 with its prompts, and what transformers makes of them."""

    models: Models
    reference: Reference
    likely: list[int]  # tokens that the model writes; the first of them serve as stop ids
    graphs: Graphs

    def prompt(self, key: str) -> list[int]:
        draw = np.random.default_rng(len(key) + ord(key[0]))
        return [int(one) for one in draw.choice(self.likely, PROMPTS.get(key, 6))]

    def start(self, texts: Sequence[str | Prompt], **case: Any) -> Run:
        """A run over prompts; `case` are settings of the graph, `stops` and `budget`."""
        stop_ids, budget = self.likely[: case.pop("stops", 3)], case.pop("budget", 20)
        prompts = [t if isinstance(t, Prompt) else Prompt(t, t) for t in texts]
        book = FixedBook({p.text: self.prompt(p.text) for p in prompts}, stop_ids)
        sets = [f"{_path(key)}={_yaml(value)}" for key, value in case.items()]
        made = self.graphs.session("beam", self.models, book, budget=budget, sets=sets)
        return start(made, prompts)

    def expected(self, text: str, **case: Any) -> tuple[list[int], float | None]:
        """What transformers finds: tokens with the stop token, and the score of beam search."""
        ids = torch.tensor([self.prompt(text)])
        with torch.inference_mode():
            found = self.reference.model(torch.float64).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=case["num_beams"],
                length_penalty=case["length_penalty"],
                early_stopping=case["early_stopping"],
                max_new_tokens=case["budget"],
                eos_token_id=self.likely[: case["stops"]] or None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        score = getattr(found, "sequences_scores", None)
        tokens = found.sequences[0, ids.shape[1] :].tolist()
        return tokens, None if score is None else float(score[0])


def _path(key: str) -> str:
    if key == "layout":
        return "layout.kind"
    return f"layout.{key}" if key in ("kv_slots", "max_num_branches") else f"beam.{key}"


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def make_rig(folder: Path, graphs: Graphs, family: str = "llama", max_positions: int = 1024) -> Rig:
    """A tiny model that is less sure of itself than the others, in float64."""
    settings = {"restrict": 12, "max_positions": max_positions, "extra": FAMILIES[family]}
    write_tiny_target(folder, family, **settings)
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    likely = likely_ids(tensors["lm_head.weight"]).tolist()
    tensors["lm_head.weight"] *= FLATTER
    save_file(tensors, file, metadata={"format": "pt"})
    models = tiny_models(folder, None, (), "float64")
    return Rig(models, Reference(folder, torch.float64), likely, graphs)


def rigs(places: pytest.TempPathFactory, graphs: Graphs) -> Callable[..., Rig]:
    """rig(family, max_positions): each made once."""

    @cache
    def rig(family: str = "llama", max_positions: int = 1024) -> Rig:
        return make_rig(places.mktemp(family) / "target", graphs, family, max_positions)

    return rig


def check_beams(run: Run) -> None:
    """The pool holds the prompts and the rows that live beams need; nothing else, nothing less."""
    book, pool = run.board["branches"], run.board["kv"]
    pool.check_integrity()
    assert set(book.beams.searches) == {b.owner for b in book.active}
    if run.state not in ("select_beams", "merge", "done"):
        return
    rows: dict[int, int] = {}
    for branch in book.active:
        search = book.beams.searches[branch.owner]
        width, length = search.tokens_Wn.shape
        assert width == len(search.ended) == book.beams.width
        assert search.owners_Wm.shape == (width, length - 1)
        rows |= dict.fromkeys(np.unique(search.owners_Wm).tolist(), 1)
        rows[branch.owner] = branch.length
        assert branch.length == len(branch.prompt) + search.trunk
        assert len({tuple(one) for one in search.tokens_Wn.tolist()}) == width, "beams differ"
        for owner, tokens in zip(search.owners_Wm.T, search.tokens_Wn.T[:-1], strict=True):
            pairs = set(zip(owner.tolist(), tokens.tolist(), strict=True))
            assert len(pairs) == len(set(owner.tolist())), "two tokens in one row"
    held = {o: int((pool.owner == o).sum()) for o in np.unique(pool.owner) if o >= 0}
    assert held == rows and pool.committed.sum() == sum(rows.values())


def finish(run: Run) -> Run:
    return drive(run, check=False, until=lambda run: check_beams(run) is not None)
