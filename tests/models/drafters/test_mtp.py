"""MiMo as a target, and its MTP layer against the published arithmetic in plain torch."""

import json
import logging
from dataclasses import replace
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import support
from helpers.sequences import Pooled, causal, pool
from helpers.tiny import drop, write_tiny_mtp, write_tiny_target, write_tiny_tokenizer
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2ForCausalLM

from specsot.engine.certify import reference, texts
from specsot.engine.certify.certificate import bench_of, prepared_job
from specsot.engine.cli.main import main
from specsot.engine.errors import Code
from specsot.engine.prepare.options import RunOptions
from specsot.engine.run.session import open_session
from specsot.models.codes import FULL
from specsot.models.files import ModelError
from specsot.models.load.inspect import inspect_model
from specsot.models.load.reference import as_reference
from specsot.models.load.weights import load_mtp, load_target

Patch = pytest.MonkeyPatch
IDS = torch.tensor([5, 17, 40, 0, 99, 3, 64, 12])
OWN_CODE = {"AutoConfig": "configuration_mimo.MiMoConfig", "AutoModelForCausalLM": "m.MiMo"}
EPS = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiMo: its config.json names code of its own."""
    root = tmp_path_factory.mktemp("mimo")
    extra = {"auto_map": OWN_CODE, "num_nextn_predict_layers": 1}
    return write_tiny_mtp(root / "mtp", write_tiny_target(root / "plain", "mimo", extra=extra))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def turned(x_hQd: Tensor, theta: float = 10000.0) -> Tensor:
    half = x_hQd.shape[-1] // 2
    angle_Qf = torch.arange(x_hQd.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    first, second = x_hQd[..., :half], x_hQd[..., half:]
    cos, sin = angle_Qf.cos(), angle_Qf.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def published(w: dict[str, Tensor], tokens_Q: Tensor, hidden_QH: Tensor) -> Tensor:
    """One MTP layer: the target's states before its final norm, with the tokens after them."""
    at = {n.removeprefix("model.mtp_layers.0."): v for n, v in w.items()}
    embedded_QH = norm(w["model.embed_tokens.weight"][tokens_Q], at["token_layernorm.weight"])
    hidden_QH = norm(hidden_QH, at["hidden_layernorm.weight"])
    x_QH = torch.cat((hidden_QH, embedded_QH), -1) @ at["input_proj.weight"].t()
    normed_QH = norm(x_QH, at["input_layernorm.weight"])

    def heads(name: str) -> Tensor:
        bias = at[f"self_attn.{name}_proj.bias"]
        rows_QI = normed_QH @ at[f"self_attn.{name}_proj.weight"].t() + bias
        return rows_QI.unflatten(-1, (-1, 16)).transpose(0, 1)

    q, k, v = turned(heads("q")), turned(heads("k")), heads("v")
    groups = len(q) // len(k)
    k, v = (part.repeat_interleave(groups, 0) for part in (k, v))
    mask_QQ = torch.ones(len(x_QH), len(x_QH)).tril().log()
    seen = ((q @ k.mT) / 16**0.5 + mask_QQ).softmax(-1) @ v
    x_QH = x_QH + seen.transpose(0, 1).flatten(1) @ at["self_attn.o_proj.weight"].t()
    normed_QH = norm(x_QH, at["post_attention_layernorm.weight"])
    inner_QI = F.silu(normed_QH @ at["mlp.gate_proj.weight"].t())
    inner_QI = inner_QI * (normed_QH @ at["mlp.up_proj.weight"].t())
    return norm(x_QH + inner_QI @ at["mlp.down_proj.weight"].t(), at["final_layernorm.weight"])


def test_the_layer_is_the_published_one(folder: Path) -> None:
    target = load_target(folder)
    drafter = load_mtp(folder, target)
    tensors = load_file(folder / "model.safetensors")
    out = Pooled(target, torch.arange(len(IDS))).forward(IDS, 0, drafter.tap_ids)
    assert out.taps_QF is not None
    # The tap is the state before the target's norm: the norm of it is what the head reads.
    normed_QH = norm(out.taps_QF, tensors["model.norm.weight"])
    assert torch.allclose(normed_QH @ tensors["lm_head.weight"].t(), out.logits_RV, atol=1e-4)
    slots, tokens = torch.arange(len(IDS) - 1)[None], IDS[1:]
    with torch.inference_mode():
        kv = pool(drafter, len(tokens), drafter.dtype)
        hidden = drafter.fuse(out.taps_QF[:-1])[None]
        (next_QH,) = drafter(tokens[None], hidden, slots, slots, causal(len(tokens)), kv)
        logits_QV = drafter.logits(next_QH)
    expected_QH = published(tensors, tokens, out.taps_QF[:-1])
    assert torch.allclose(next_QH, expected_QH, atol=1e-4)
    assert torch.allclose(logits_QV, expected_QH @ tensors["lm_head.weight"].t(), atol=1e-3)


def test_mimo_computes_what_qwen2_does(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen2"}
    del raw["auto_map"]
    theirs = Qwen2ForCausalLM(Qwen2Config(**raw)).eval()
    tensors = load_file(folder / "model.safetensors")
    left = theirs.load_state_dict(tensors, strict=False)
    assert not left.missing_keys and all("mtp_layers" in name for name in left.unexpected_keys)
    target = load_target(folder)
    assert not target.notes
    ours = Pooled(target, torch.arange(len(IDS))).forward(IDS, 0, ()).logits_RV
    with torch.no_grad():
        assert torch.allclose(theirs(IDS[None]).logits[0], ours, atol=1e-4)


def test_as_a_reference_it_is_loaded_without_a_report_of_its_layer(folder: Path) -> None:
    told = BufferingHandler(1000)
    logger = logging.getLogger("transformers")
    logger.addHandler(told)
    level = logger.level
    as_reference(folder, torch.float32, FULL)
    logger.removeHandler(told)
    assert not told.buffer and logger.level == level


def test_a_run_reads_it_from_the_targets_folder(folder: Path) -> None:
    write_tiny_tokenizer(folder)
    found = []
    for kind in ("mtp", "none"):
        session = open_session(
            "eagle",
            sets=(f"drafter.kind={kind}",),
            model=str(folder),
            threads=1,
            max_new_tokens=6,
            stop_ids=[],
        )
        assert (session.models.drafter is not None) == (kind == "mtp")
        run = support.drive(support.start(session, ["w5 w17 w40"]))
        found.append([branch.tokens for branch in support.branches_of(run)])
    assert found[0] == found[1] and len(found[0][0]) == 6


def test_greedy_and_drawn_texts_are_certified(folder: Path, monkeypatch: Patch) -> None:
    """The reference is transformers' Qwen2: the folder's own code is not executed."""
    write_tiny_tokenizer(folder)
    few = {"prompts": 2, "tokens": 8, "drawn_prompts": 1, "seeds": 1, "drawn_tokens": 6}
    monkeypatch.setattr(reference, "QUICK", replace(reference.QUICK, **few))
    (folder.parent / "q.txt").write_text("How do bees make honey?\nWhat is a lake?\n")
    asked = RunOptions(
        prompts=folder.parent / "q.txt",
        model=str(folder),
        sets=("drafter.kind=mtp",),
        threads=1,
    )
    bench = bench_of(prepared_job("eagle", asked), True, lambda text: None)
    checks = [*texts.greedy_checks(bench), *texts.sampled_checks(bench)]
    assert len(checks) == 7 and all(check.passed for check in checks)


def test_a_target_without_the_layer_is_an_error_with_the_code_of_models(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "eagle", "--set", "drafter.kind=mtp", "How?"])
    assert ended.value.code == Code.MODEL
    (line,) = capsys.readouterr().err.splitlines()
    assert "embedded/target: holds no MTP layer, `model.mtp_layers.0.*`, as the targets of" in line


def test_what_a_folder_can_draft_with(folder: Path) -> None:
    plain = folder.parent / "plain"
    for model in (folder, plain):
        write_tiny_tokenizer(model)
    assert "mtp" in inspect_model(folder).kinds
    assert "mtp" not in inspect_model(plain).kinds
    with pytest.raises(ModelError, match=r"holds no MTP layer, `model\.mtp_layers\.0\.\*`"):
        load_mtp(plain, load_target(plain))
    drop("model.mtp_layers.0.final_layernorm.weight")(folder)
    with pytest.raises(ModelError, match=r"missing: model\.mtp_layers\.0\.final_layernorm"):
        load_mtp(folder, load_target(folder))
