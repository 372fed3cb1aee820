"""What is said of a model folder, and that it is what the loaders think of it."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.sequences import DFLASH_GOLDEN as DFLASH
from helpers.sequences import EAGLE_GOLDEN as EAGLE
from helpers.tiny import drop, edit, put, write_tiny_target, write_tiny_tokenizer

import specsot
from specsot.models.config import DecoderConfig
from specsot.models.decoder import Decoder
from specsot.models.load import inspect
from specsot.models.load.inspect import inspect_model

EMBEDDED = Path(specsot.__file__).parent / "models" / "embedded"


def facts(folder: Path) -> dict[str, str]:
    return inspect_model(folder).facts


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_tiny_tokenizer(write_tiny_target(tmp_path / "target", "qwen3", layers=2))


def test_a_target(target: Path) -> None:
    seen = inspect_model(target)
    assert (seen.kind, seen.family) == ("target", "qwen3")
    assert seen.kinds == ("none", "ngram", "recycle", "suffix", "vanilla")
    assert (seen.assumed, seen.problems) == ((), [])
    said = seen.facts
    assert said["layers"] == "2" and said["hidden size"] == "32 (4 heads, 2 for keys, of 16)"
    assert said["vocabulary"] == "130" and said["tokenizer"] == "130 tokens"
    assert said["context"] == "1024 positions, RoPE default 10000"
    assert (said["dtype"], said["chat template"]) == ("float32", "none")
    assert said["stop ids"].startswith("2 '") and said["stored as"] == "F32"


def test_what_is_assumed_of_a_target(target: Path) -> None:
    edit(target, rope_theta=None, max_position_embeddings=None, eos_token_id=None)
    (target / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    theta, positions, *stops = inspect_model(target).assumed
    assert theta == "`rope_theta` is not given: 10000 assumed"
    assert positions == "`max_position_embeddings` is not given: 32768 assumed"
    assert stops == ["no stop ids: answers end where their budget does"]
    edit(target, rope_theta=10.0, rope_parameters={"rope_theta": 20.0, "rope_type": "default"})
    assert "is 10.0 at the top and 20.0 below: 20.0 is used" in inspect_model(target).assumed[0]


def test_a_switch_for_thinking(target: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }}"
    (target / "chat_template.jinja").write_text(template)
    assert facts(target)["chat template"] == "yes with a switch for thinking (used: off)"


def test_a_model_without_a_tokenizer_can_only_draft() -> None:
    seen = inspect_model(EMBEDDED / "vanilla")
    assert seen.kinds == ("vanilla",) and not seen.problems


@pytest.mark.parametrize(
    ("folder", "family", "kinds", "layout"),
    [
        (EAGLE / "drafts" / "llama_eagle2", "eagle", ("eagle2",), "SafeAILab"),
        (EAGLE / "drafts" / "llama_eagle3", "eagle3", ("eagle3",), "SafeAILab"),
        (EAGLE / "drafts" / "llama_eagle3_speculators", "eagle3", ("eagle3",), "speculators"),
        (EAGLE / "drafts" / "qwen3_eagle3", "eagle3", ("eagle3",), "SafeAILab"),
        (DFLASH / "draft", "dflash", ("dflash",), "z-lab"),
        (EMBEDDED / "eagle3", "eagle3", ("eagle3",), "SafeAILab"),
        (EMBEDDED / "dflash", "dflash", ("dflash",), "z-lab"),
    ],
)
def test_drafters(folder: Path, family: str, kinds: tuple[str, ...], layout: str) -> None:
    seen = inspect_model(folder)
    assert (seen.kind, seen.family, seen.kinds) == ("drafter", family, kinds)
    assert seen.facts["layout"] == layout and not seen.problems


def test_which_states_a_drafter_reads(tmp_path: Path) -> None:
    draft = Path(shutil.copytree(EAGLE / "drafts" / "llama_eagle3", tmp_path / "draft"))
    assert any("by its kind's rule" in note for note in inspect_model(draft).assumed)
    edit(draft, num_hidden_layers=40, eagle_aux_hidden_state_layer_ids=[2, 16, 29])
    seen = inspect_model(draft)
    assert seen.facts["reads hidden states"] == "2, 16, 29"
    assert any("`num_hidden_layers` is 40" in note for note in seen.assumed) and not seen.problems
    assert facts(DFLASH / "draft")["block"] == "8, mask token 127"


def test_the_target_of_a_drafter_has_the_positions_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = []

    def decoder(config: DecoderConfig) -> Decoder:
        positions.append(config.rope.trained)
        return Decoder(config)

    monkeypatch.setattr(inspect, "Decoder", decoder)
    for number, folder in enumerate((EAGLE / "drafts" / "llama_eagle3", DFLASH / "draft")):
        draft = Path(shutil.copytree(folder, tmp_path / str(number)))
        edit(draft, max_position_embeddings=None)
        assert not inspect_model(draft).problems
    assert positions == [2048, 32768]


def test_what_is_wrong_with_a_drafter(tmp_path: Path) -> None:
    draft = Path(shutil.copytree(EAGLE / "drafts" / "llama_eagle3", tmp_path / "draft"))
    drop("midlayer.hidden_norm.weight")(draft)
    seen = inspect_model(draft)
    assert (seen.kind, seen.family, seen.kinds) == ("drafter", "eagle3", ())
    assert seen.problems == [f"{draft}: 1 tensor is missing: midlayer.hidden_norm.weight"]


def test_every_problem_is_told(target: Path) -> None:
    put("lm_head.weight", torch.ones(3))(target)
    (target / "tokenizer.json").write_text("{")
    first, second = inspect_model(target).problems
    assert "`lm_head.weight` has shape [3]" in first and "no usable tokenizer" in second


@pytest.mark.parametrize(
    ("name", "problem"),
    [("adapter_config.json", "it is a LoRA adapter"), ("x.gguf", "but x.gguf"), ("x", "no config")],
)
def test_what_is_no_model_folder(name: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    seen = inspect_model(tmp_path)
    assert (seen.kind, seen.family, seen.facts, seen.kinds) == ("unknown", "", {}, ())
    (said,) = seen.problems
    assert problem in said
    assert inspect_model(tmp_path / "y").problems == [f"{tmp_path / 'y'}: is not a folder"]
