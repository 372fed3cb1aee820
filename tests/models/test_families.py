"""A family of decoders is one class: a toy one is read, and decodes as its twin in transformers."""

import gc
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from helpers.support import FixedBook, Graphs, Reference, start, tiny_models
from helpers.tiny import write_tiny_target

from specsot.models.families import Family, decoder_config, families
from specsot.models.files import Fields, ModelError

PROMPT = range(3, 20)


@pytest.fixture
def toy() -> Iterator[str]:
    class Toy(Family):
        name = "toy"
        max_positions = 77
        head_dim = 16
        activation = "gelu"
        qkv_bias = True
        o_bias = True
        renamed: ClassVar[dict[str, str]] = {"d_model": "hidden_size"}

        def windows(self, fields: Fields, layers: int) -> tuple[int, tuple[bool, ...]]:
            return 900, (False,) * (layers - 1) + (True,)

    assert Toy().name in families()
    yield "toy"
    del Toy
    gc.collect()  # classes refer to themselves
    assert "toy" not in families()


def test_a_toy_family_decodes_as_its_twin(toy: str, graphs: Graphs, tmp_path: Path) -> None:
    extra = {"hidden_act": "gelu", "attention_bias": True}
    folder = write_tiny_target(tmp_path / "toy", toy, layers=3, context=3.0, extra=extra)
    shutil.copytree(folder, tmp_path / "twin")
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "twin" / "config.json").write_text(json.dumps(raw | {"model_type": "llama"}))
    raw["d_model"] = raw.pop("hidden_size")
    del raw["head_dim"]
    (folder / "config.json").write_text(json.dumps(raw))
    config = decoder_config(folder)
    assert (config.family, config.sliding, config.window) == ("toy", (False, False, True), 900)
    models = tiny_models(folder, None, (2,), "float32")
    session = graphs.session("ngram", models, FixedBook({"p": PROMPT}, (2,)), budget=40)
    run = start(session, ["p"])
    while not run.finished:
        run.advance()
    (branch,) = run.manager.requests[0].branches
    reference = Reference(tmp_path / "twin", torch.float32)
    assert [*branch.tokens, 2] == reference.generate(PROMPT, (2,), 40)
    assert len(set(branch.tokens)) > 2, "or nothing was decoded"


def test_what_a_family_does_not_have_is_refused(toy: str, tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path / "toy", toy, extra={"hidden_act": "gelu"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"hidden_act": "silu"}))
    with pytest.raises(ModelError, match="`hidden_act` 'silu' is not supported"):
        decoder_config(folder)
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": "toys"}))
    with pytest.raises(ModelError, match=r"'toys' is not supported .*, qwen3, toy"):
        decoder_config(folder)
