"""config.json: what is read from it, and every way in which it can be wrong."""

import gc
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers.support import FixedBook, Reference, graphs, start, tiny_models
from helpers.tiny import write_tiny_target

from specsot.models.config import DecoderConfig
from specsot.models.families import Family, decoder_config, families
from specsot.models.files import Fields, ModelError

GOOD = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def read(folder: Path, drop: str = "", **changes: Any) -> DecoderConfig:
    raw = {k: v for k, v in (GOOD | changes).items() if k != drop}
    (folder / "config.json").write_text(json.dumps(raw))
    return decoder_config(folder)


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.kv_heads, config.head_dim, config.eps) == (4, 8, 1e-6)
    assert (config.rope.kind, config.rope.theta, config.rope.limit) == ("default", 1e4, 2048)
    assert not (config.tied or config.qkv_bias or config.qk_norm or any(config.sliding))
    assert read(tmp_path, model_type="qwen3").head_dim == 128
    assert read(tmp_path, model_type="qwen2").qkv_bias
    assert not read(tmp_path, model_type="qwen2", attention_bias=True).o_bias
    assert read(tmp_path, model_type="olmo2").eps == 1e-5
    smollm3 = read(tmp_path, model_type="smollm3")
    assert (smollm3.rope.theta, smollm3.tied, smollm3.layer_ropes) == (2e6, True, (0, 0, 0, 1))


def test_windows(tmp_path: Path) -> None:
    mistral = read(tmp_path, model_type="mistral")
    assert (mistral.window, mistral.sliding) == (4096, (True,) * 4)
    assert not any(read(tmp_path, model_type="mistral", sliding_window=None).sliding)
    short = {"model_type": "mistral", "max_position_embeddings": 4096}
    assert not any(read(tmp_path, **short).sliding)
    qwen = {"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 3}
    assert not any(read(tmp_path, **qwen).sliding)
    assert read(tmp_path, **qwen, use_sliding_window=True).sliding == (False,) * 3 + (True,)
    types = ["sliding_attention", *["full_attention"] * 3]
    named = read(tmp_path, **qwen, use_sliding_window=True, layer_types=types)
    assert named.sliding == (True,) + (False,) * 3


def test_sliding_layers_of_gemma_have_their_own_rope(tmp_path: Path) -> None:
    gemma = {"model_type": "gemma3_text", "head_dim": 8}
    scaling = {"rope_type": "linear", "factor": 8}
    old = {"rope_theta": 5e5, "rope_local_base_freq": 50.0, "rope_scaling": scaling}
    full = scaling | {"rope_theta": 5e5}
    types = ["sliding_attention", "full_attention"] * 2
    new = {"full_attention": full, "sliding_attention": {"rope_theta": 50.0}}
    found = [
        read(tmp_path, **gemma, **old, sliding_window_pattern=2),
        read(tmp_path, **gemma, rope_parameters=new, layer_types=types, sliding_window=4096),
    ]
    assert found[0] == found[1]
    assert (found[0].rope.theta, found[0].ropes[0].theta) == (5e5, 50.0)
    assert (found[0].sliding, found[0].layer_ropes) == ((True, False) * 2, (1, 0) * 2)
    wide = read(tmp_path, **gemma, sliding_window_pattern=2, sliding_window=131072)
    assert (wide.sliding, wide.layer_ropes) == ((False,) * 4, (1, 0) * 2)
    assert (wide.rope.theta, wide.ropes[0].theta, wide.query_scale) == (1e6, 1e4, 32**-0.5)


def test_drafters_of_a_partly_turned_target_turn_whole_heads(tmp_path: Path) -> None:
    long = LONG | {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    config = read(tmp_path, model_type="phi3", partial_rotary_factor=0.75, rope_scaling=long)
    assert config.rope.rotary_dim(config.head_dim) == 6
    assert config.sizes()["rope"].rotary_dim(config.head_dim) == 8


def test_stop_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert read(tmp_path).eos_ids == ()
    assert read(tmp_path, eos_token_id=2).eos_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 0]}')
    assert read(tmp_path, eos_token_id=2).eos_ids == (5, 0)
    (tmp_path / "generation_config.json").write_text('{"temperature": 1.0}')
    assert read(tmp_path, eos_token_id=2).eos_ids == (2,)


def test_rope_in_both_spellings(tmp_path: Path) -> None:
    old = read(tmp_path, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2})
    new = read(tmp_path, rope_parameters={"rope_theta": 5e5, "rope_type": "linear", "factor": 2})
    assert old.rope == new.rope and old.rope.theta == 5e5
    both = read(tmp_path, rope_theta=1e6, rope_parameters={"rope_theta": 5e5})
    assert both.rope.theta == 5e5
    assert read(tmp_path, rope_theta=1e6, rope_scaling=None).rope.theta == 1e6
    yarn = read(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert yarn.rope.settings["original_max_position_embeddings"] == 2048


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"drop": "num_hidden_layers"}, "`num_hidden_layers` is missing"),
    "no vocabulary": ({"drop": "vocab_size"}, "`vocab_size` is missing"),
    "zero heads": ({"num_attention_heads": 0}, "`num_attention_heads` must be a positive"),
    "zero kv heads": ({"num_key_value_heads": 0}, "`num_key_value_heads` must be a positive"),
    "negative width": ({"hidden_size": -32}, "`hidden_size` must be a positive integer, not -32"),
    "a word for a number": ({"hidden_size": "32"}, "`hidden_size` must be a positive integer"),
    "true for a number": ({"num_hidden_layers": True}, "`num_hidden_layers` must be a positive"),
    "half a layer": ({"num_hidden_layers": 1.5}, "`num_hidden_layers` must be a positive"),
    "a gigantic width": ({"hidden_size": 10**15}, "`hidden_size` is 1000000000000000, more than"),
    "odd heads": ({"num_attention_heads": 5}, "32 is not a multiple of `num_attention_heads`"),
    "odd groups": ({"num_key_value_heads": 3}, "4 is not a multiple of `num_key_value_heads`"),
    "odd head_dim": ({"head_dim": 7}, "head_dim 7 is odd"),
    "theta 0": ({"rope_theta": 0}, "`rope_theta` must be positive and finite"),
    "theta inside 0": ({"rope_parameters": {"rope_theta": 0.0}}, "`rope_theta` must be positive"),
    "theta infinite": ({"rope_theta": float("inf")}, "`rope_theta` must be positive and finite"),
    "eps a word": ({"rms_norm_eps": "1e-6"}, "`rms_norm_eps` must be a number"),
    "unknown rope": ({"rope_scaling": {"type": "mrope"}}, "rope type 'mrope' is not supported"),
    "alibi": ({"rope_scaling": {"type": "alibi"}}, "rope type 'alibi' is not supported"),
    "rope a word": ({"rope_scaling": "linear"}, "`rope_scaling` must be an object"),
    "rope by layer": ({"rope_parameters": {"full_attention": {}}}, "per layer type"),
    "linear without factor": ({"rope_scaling": {"type": "linear"}}, "needs `factor`"),
    "negative factor": ({"rope_scaling": {"type": "linear", "factor": -1}}, "`factor` must be"),
    "llama3 incomplete": ({"rope_scaling": {"type": "llama3", "factor": 2}}, "low_freq_factor"),
    "short longrope": ({"rope_scaling": LONG | {"long_factor": [1.0]}}, "must hold 4 numbers"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` other than 1"),
    "odd partial rotation": (
        {"model_type": "phi3", "partial_rotary_factor": 0.4},
        "`partial_rotary_factor` 0.4 rotates 3 of 8 numbers of a head",
    ),
    "more than a head": (
        {"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 1.5}},
        "1.5 rotates 12 of 8 numbers",
    ),
    "no type": ({"drop": "model_type"}, "model_type None is not supported"),
    "unknown type": ({"model_type": "mamba"}, "'mamba' is not supported .*remote code is never"),
    "type a list": ({"model_type": ["llama"]}, "is not supported"),
    "auto_map": (
        {"auto_map": {"AutoModelForCausalLM": "evil.Model"}},
        "AutoModelForCausalLM is not supported .*remote code is never executed",
    ),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantised"),
    "activation": ({"hidden_act": "relu"}, "`hidden_act` 'relu'"),
    "tied maybe": ({"tie_word_embeddings": "yes"}, "must be true or false"),
    "eos a word": ({"eos_token_id": "</s>"}, "`eos_token_id` must hold token ids"),
    "layer types": (
        {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked"] * 4},
        "`layer_types` must name 4 layers",
    ),
    "window layers": (
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "x"},
        "`max_window_layers`",
    ),
    "too few no_rope_layers": (
        {"model_type": "smollm3", "no_rope_layers": [1]},
        "`no_rope_layers` must hold 0 or 1 for each of 4 layers",
    ),
    "layers without experts": (
        {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
        r"layers without experts \(`mlp_only_layers`",
    ),
    "more experts than there are": (
        {"model_type": "qwen3_moe", "num_experts": 4},
        "8 experts for a token, of 4",
    ),
    "capped logits": (
        {"model_type": "gemma3_text", "head_dim": 8, "final_logit_softcapping": 30.0},
        "`final_logit_softcapping` is not supported",
    ),
    "window 0": ({"model_type": "mistral", "sliding_window": 0}, "`sliding_window` must be"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_key_is_named_with_the_file(name: str, tmp_path: Path) -> None:
    changes, message = BAD[name]
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path, **changes)
    assert caught.value.path == tmp_path / "config.json"


def test_invalid_json_is_told_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n  "model_type": llama\n}')
    with pytest.raises(ModelError, match="line 2, column 17"):
        decoder_config(tmp_path)
    for text in ("", "[1]", '"x"', "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ModelError, match=r"config\.json"):
            decoder_config(tmp_path)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelError, match="cannot be read"):
        decoder_config(tmp_path)


def test_no_folder_and_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        decoder_config(tmp_path)
    with pytest.raises(ModelError, match="is not a folder"):
        decoder_config(tmp_path / "nowhere")


def test_reading_a_config_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, specsot.models.drafters.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- a family is one class

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


def test_a_toy_family_decodes_as_its_twin(toy: str, tmp_path: Path) -> None:
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
    with pytest.raises(ModelError, match=r"'toys' is not supported .*, toy\)"):
        decoder_config(folder)
