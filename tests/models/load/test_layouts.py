"""Two layouts of one drafter are one drafter: tensors, configuration, and every round of a run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.blocks import GOLDEN as DFLASH
from helpers.pooled import GOLDEN as EAGLE
from helpers.support import FixedBook, Graphs, start
from helpers.tiny_models.tiny import write_tiny_target
from helpers.tiny_models.tiny_dflash import write_tiny_dflash
from helpers.tiny_models.tiny_eagle import write_tiny_eagle
from safetensors.torch import load_file

from specsot.engine.models import Models, with_drafter
from specsot.models.files import ModelError
from specsot.models.load.convert import convert_layout
from specsot.models.load.weights import load_dflash, load_eagle3, load_target

WEIGHTS = "model.safetensors"
TARGET = EAGLE / "targets" / "llama"
SAFEAILAB, SPECULATORS = (EAGLE / "drafts" / f"llama_eagle3{end}" for end in ("", "_speculators"))
PAIRS = {
    "eagle3": (TARGET, SAFEAILAB, "safeailab", "eagle"),
    "dflash": (DFLASH / "target", DFLASH / "draft", "z-lab", "dflash"),
}


def convert(folder: Path, target: Path, layout: str, out: Path) -> Path:
    out.mkdir()
    convert_layout(folder, target, layout, out, "target")
    return out


def config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def edit(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config(folder) | changes))
    return folder


def told(folder: Path, kind: str, target: Path) -> Any:
    """What the public loader makes of it, layout and notes apart."""
    load: Any = load_eagle3 if kind == "eagle3" else load_dflash
    own = load(folder, load_target(target)).config
    return replace(own, path=Path(), speculators=False, notes=())


def run(kind: str, folder: Path, target: Path, graph: str, graphs: Graphs) -> list[Any]:
    """Everything that a drafter says in a run through its graph, and what is decoded with it."""
    plain = Models(load_target(target), None, None, (), torch.device("cpu"), torch.float32)
    models = with_drafter(plain, folder, kind)
    said: list[Any] = []
    models.drafter.norm.register_forward_hook(lambda module, given, out: said.append(out))
    session = graphs.session(graph, models, FixedBook({"p": range(3, 20)}), budget=40)
    steps = start(session, ["p"])
    while not steps.finished:
        steps.advance()
    branch = steps.board["branches"].requests[0].branches[0]
    return [branch.tokens, branch.accepted, *said]


@pytest.mark.parametrize("kind", PAIRS)
def test_there_and_back(kind: str, graphs: Graphs, tmp_path: Path) -> None:
    target, published, own, graph = PAIRS[kind]
    there = convert(published, target, "speculators", tmp_path / "there")
    back = convert(there, target, own, tmp_path / "back")
    before, after = load_file(published / WEIGHTS), load_file(back / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert config(there)["speculators_model_type"] == kind
    assert "speculators_model_type" not in config(back)
    assert told(published, kind, target) == told(there, kind, target) == told(back, kind, target)
    tokens, accepted, *said = run(kind, published, target, graph, graphs)
    assert len(tokens) >= 40 and max(accepted) > 0 and len(said) > 5
    for folder in (there, back):
        again = run(kind, folder, target, graph, graphs)
        assert again[:2] == [tokens, accepted]
        assert all(torch.equal(a, b) for a, b in zip(said, again[2:], strict=True))


def test_the_recorded_twin_is_what_conversion_makes(tmp_path: Path) -> None:
    there = convert(SAFEAILAB, TARGET, "speculators", tmp_path / "there")
    ours, theirs = load_file(there / WEIGHTS), load_file(SPECULATORS / WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    mine, recorded = config(there), config(SPECULATORS)
    layer = mine["transformer_layer_config"].keys() - recorded["transformer_layer_config"].keys()
    assert mine.keys() <= recorded.keys()
    for key in ("architectures", "draft_vocab_size", "target_hidden_size", "norm_output"):
        assert mine[key] == recorded[key]
    assert mine["speculators_config"].keys() == recorded["speculators_config"].keys()
    assert (
        mine["speculators_config"]["proposal_methods"]
        == (recorded["speculators_config"]["proposal_methods"])
    )
    assert layer == {"tie_word_embeddings"}


def test_copies_of_the_targets_ends_are_made_and_dropped(tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target", layers=7)
    draft = write_tiny_dflash(tmp_path / "draft", target, window=16)
    there = convert(draft, target, "speculators", tmp_path / "there")
    ends = load_file(there / WEIGHTS).keys() - load_file(draft / WEIGHTS).keys()
    assert ends == {"embed_tokens.weight", "lm_head.weight"}
    assert config(there)["aux_hidden_state_layer_ids"] == [1, 4]
    assert config(there)["sliding_window_non_causal"] is False
    back = convert(there, target, "z-lab", tmp_path / "back")
    assert config(back) == config(draft)


def test_angles_and_taps_are_carried(tmp_path: Path) -> None:
    draft = Path(shutil.copytree(SAFEAILAB, tmp_path / "draft"))
    scaling = {"rope_type": "linear", "factor": 2.0}
    edit(draft, rope_scaling=scaling, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 5]})
    there = convert(draft, TARGET, "speculators", tmp_path / "there")
    assert config(there)["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]
    assert config(there)["transformer_layer_config"]["rope_scaling"] == scaling
    back = convert(there, TARGET, "safeailab", tmp_path / "back")
    assert told(back, "eagle3", TARGET) == told(draft, "eagle3", TARGET)


def test_what_cannot_be_converted_is_named(tmp_path: Path) -> None:
    switched = edit(Path(shutil.copytree(SPECULATORS, tmp_path / "on")), norm_before_residual=True)
    causal = edit(Path(shutil.copytree(DFLASH / "draft", tmp_path / "causal")), is_causal=True)
    target = write_tiny_target(tmp_path / "tiny", layers=7)
    for folder, goal, layout, says in [
        (switched, TARGET, "safeailab", r"in the layout 'safeailab': norm_before_residual$"),
        (causal, DFLASH / "target", "speculators", "'speculators': full layers that are causal"),
        (SAFEAILAB, TARGET, "safeailab", "has the layout 'safeailab' already"),
        (SPECULATORS, TARGET, "speculators", "has the layout 'speculators' already"),
        (SAFEAILAB, TARGET, "z-lab", "is an EAGLE-3 drafter, which has no layout 'z-lab'"),
        (write_tiny_eagle(tmp_path / "e", target), target, "speculators", "EAGLE-2 drafter, which"),
        (TARGET, TARGET, "speculators", "is a language model, which has no layout"),
        (SAFEAILAB, target, "speculators", "drafts for another target: a vocabulary of 128"),
    ]:
        with pytest.raises(ModelError, match=says) as caught:
            convert_layout(folder, goal, layout, tmp_path, "target")
        assert not (tmp_path / WEIGHTS).exists() and str(folder) in str(caught.value)
