"""Training of every kind of drafter: one loop, loadable results, held-out acceptance."""

import json
import resource
import shutil
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.interrupted import EMBEDDED, KINDS, check_equal, log_of, train_twice, write_inputs
from helpers.sequences import DFLASH_GOLDEN, EAGLE_GOLDEN, Pair, golden_pair
from helpers.tiny import write_tiny_eagle3, write_tiny_target, write_tiny_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from specsot.engine.cli.train import train
from specsot.engine.errors import message_of
from specsot.engine.train import loop, settings
from specsot.engine.train.data import Tokens, TrainingBatch, pack
from specsot.engine.train.dataset import HeldOutPrompt, held_out_tau, rounds
from specsot.engine.train.dflash import DFlashTrainer
from specsot.engine.train.eagle import Eagle2Trainer, Eagle3Trainer, EagleInputs
from specsot.engine.train.teacher import Teacher
from specsot.engine.train.vanilla import VanillaTrainer
from specsot.models.drafters.eagle import Eagle3
from specsot.models.load import weights as loading
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.kv.pool import KVCache

Patch = pytest.MonkeyPatch
SMALL = "--batch-tokens 256 --length 128 --threads 1 --steps 4 --held-out 2"
LOADERS = {
    "eagle2": loading.load_eagle,
    "eagle3": loading.load_eagle3,
    "dflash": loading.load_dflash,
    "medusa": loading.load_medusa,
    "vanilla": loading.load_vanilla,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def teacher(inputs: list[str]) -> Teacher:
    return Teacher(Path(inputs[1]))


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(train, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_trained_and_loads(kind: str, inputs: list[str], tmp_path: Path) -> None:
    out = tmp_path / kind
    words = [kind, *inputs, "--out", str(out), *SMALL.split(), *KINDS[kind].split()]
    code, output = run(*words)
    assert code == 0 and "far too few for a useful drafter" in output
    log = log_of(tmp_path / f"{kind}.run")
    assert [line["step"] for line in log] == [1, 2, 3, 4]
    assert {"loss", "accuracy", "tokens", "done"} <= log[0].keys()
    assert log[-1]["done"] == 1.0 and log[-1]["held_tau"] == log[-1]["held_prompt"] >= 1.0
    target = loading.load_target(Path(inputs[1]))
    loaded: Any = LOADERS[kind](out, target)
    assert not any("unexpected tensors" in note for note in loaded.notes)
    state = torch.load(tmp_path / f"{kind}.run" / "state.pt")
    assert state["progress"].keys() == {"step", "tokens", "seconds", "index"}
    stored = {n.removeprefix("model."): p for n, p in state["model"].items()}
    if kind != "vanilla":
        finished = deepcopy(loaded)
        finished.load_state_dict(state["model"])
        stored = finished.published()
    for name, value in loaded.published().items():
        trained = stored[name.removeprefix("model.")]
        if value.is_floating_point():
            trained = trained.bfloat16().float()
        assert torch.equal(value, trained), name
    if kind == "vanilla":
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (out / name).read_bytes() == (Path(inputs[1]) / name).read_bytes()
        config = json.loads((out / "config.json").read_text())
        assert config["dtype"] == "bfloat16" and config["eos_token_id"] == 2


@pytest.mark.parametrize("writer", ["torch", "safetensors"])
def test_a_full_disk_leaves_the_earlier_files_and_is_told(writer: str, tmp_path: Path) -> None:
    path = tmp_path / "out" / "state.pt"

    def save(value: float) -> None:
        tensors = {"a": torch.full((100_000,), value)}
        if writer == "torch":
            loop.save_atomically(tensors, path)
        else:
            with loop.replace_files(path.parent) as folder:
                save_file(tensors, folder / path.name)

    save(1.0)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            save(2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = message_of(caught.value)
    assert message.startswith(f"{path.parent}: ") and "File too large" in message
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path.parent]


def test_medusas_heads_learn_the_tokens_after_the_next(inputs: list[str], tmp_path: Path) -> None:
    """They start as the target's own head, which knows the next token alone."""
    settings = [*SMALL.split(), *KINDS["medusa"].split(), "--lr", "0.03", "--steps", "12"]
    for own in ([], ["--own-heads"]):
        out = tmp_path / f"medusa{len(own)}"
        assert run("medusa", *inputs, "--out", str(out), *settings, *own)[0] == 0
        losses = [line["loss"] for line in log_of(tmp_path / f"{out.name}.run")]
        assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
        names = load_file(out / "model.safetensors").keys()
        assert ("1.1.weight" in names) == bool(own) and "1.0.linear.bias" in names


def test_the_embedded_drafters_are_what_the_documents_say() -> None:
    teacher = Teacher(EMBEDDED)
    vanilla = VanillaTrainer(settings.VanillaTraining(out=Path()), teacher).model
    assert sum(p.numel() for p in vanilla.parameters()) <= 1_500_000
    dflash = DFlashTrainer(settings.DFlashTraining(out=Path()), teacher).model
    shape = dflash.config
    assert (shape.block_size, len(shape.reaches), shape.mask_token_id) == (8, 2, 3)
    assert shape.layer_ids == (1, 5)
    assert 2 * sum(p.numel() for p in dflash.parameters()) <= 7_000_000


def test_mistakes_are_told_with_their_exit_codes(inputs: list[str], tmp_path: Path) -> None:
    """And a resumed training has the same texts, or is forced."""
    file = Path(shutil.copy(inputs[3], tmp_path / "asked.jsonl"))
    given, out = [*inputs[:3], str(file)], ["--out", str(tmp_path / "d"), *SMALL.split()]
    out += ["--held-out", "0"]
    first = ["dflash", *given, *out, *KINDS["dflash"].split()]
    assert run(*first)[0] == 0
    for words, said in {
        ("dflash", *given, *out): "holds a training",
        ("dflash", *given, *out, "--resume", "--layers", "2"): "with other settings",
        ("dflash", *given, *out, "--resume", "--seed", "6"): "with other settings (seed 5 then, 6",
        ("dflash", *given, *out, "--resume", "--target-layer-ids", "1,9"): "has 8 layers",
        ("dflash", *given, *out, "--resume", "--target-layer-ids", "a"): "numbers with commas",
        ("dflash", *given, *out, "--resume", "--mask-token-id", "5000"): "has 4096 tokens",
        ("eagle3", *given, *out, "--draft-vocabulary", "5000"): "the target has 4096",
        ("eagle3", *given, *out, "--resume"): "drafts 0 different ids",
        ("vanilla", *given, *out, "--device", "nowhere"): "--device nowhere",
        ("vanilla", *out): "Missing option '--prompts'",
    }.items():
        code, output = run(*words)
        assert code == 2 and said in output, (words, output)
    code, output = run("vanilla", "--target", str(tmp_path), *given[2:], *out)
    assert code == 4 and "config.json" in output
    before = (tmp_path / "d" / "model.safetensors").read_bytes()
    file.write_text(file.read_text().replace("no more", "no less"))
    code, output = run(*first, "--resume", "--steps", "6")
    assert code == 2 and "with other settings (texts " in output and "--force continues" in output
    assert (tmp_path / "d" / "model.safetensors").read_bytes() == before
    assert run(*first, "--resume", "--force", "--steps", "6")[0] == 0
    assert [line["step"] for line in log_of(tmp_path / "d.run")] == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: Patch) -> None:
    target = write_tiny_target(tmp_path / "target")
    drafter = loading.load_eagle3(
        write_tiny_eagle3(tmp_path / "draft", target), loading.load_target(target)
    )
    out = tmp_path / "out"
    loop.export_drafter(drafter, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(tensors: Any, path: Path, **rest: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(loop, "save_file", full)
        loop.export_drafter(drafter, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    loop.export_drafter(drafter, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"target", "draft", "out"}


def test_the_end_and_the_chance_and_the_learning_rate_of_a_step() -> None:
    """Minutes are not looked at when steps are given."""
    training, spent = settings.DrafterTraining(out=Path(), steps=10), loop.Progress(4, 10**9, 300.0)
    assert spent.done(training) == 0.4
    assert spent.done(replace(training, tokens=10**10, minutes=10)) == 0.5
    assert spent.done(settings.DrafterTraining(out=Path())) == 0.2

    def coins(seed: int, step: int) -> list[float]:
        return [float(x) for x in torch.rand(4, generator=loop.step_generator(seed, step))]

    assert coins(1, 2) == coins(1, 2)
    assert coins(1, 2) != coins(1, 3) != coins(2, 3)
    for done, rate in ((0.01, 0.5), (0.02, 1.0), (1.0, 0.05), (2.0, 0.05)):
        assert loop.learning_rate(done, 1.0) == pytest.approx(rate), "up, and down to the floor"


def test_rounds_of_a_chain() -> None:
    hits = torch.tensor([[0, 0], [1, 1], [1, 1], [0, 1], [1, 0], [0, 0], [1, 1]]).bool()
    assert rounds(hits, 1) == [3, 2]  # root 1 takes 2, 3 and the target's 4; root 4 takes 5 and 6
    assert rounds(hits, 2) == [3, 1]  # nothing follows the last token
    assert rounds(hits, 0) == [1, 3, 2]
    samples = [HeldOutPrompt("a", (0,) * 7, 0), HeldOutPrompt("b", (0,) * 7, 1)]
    tau = held_out_tau(samples, lambda held: hits)
    assert tau == {"held_a": 2.0, "held_b": 2.5, "held_tau": pytest.approx(11 / 5)}


def golden_teacher(source: Path, folder: Path) -> Teacher:
    """A recorded target, which has no tokenizer, with one."""
    return Teacher(write_tiny_tokenizer(Path(shutil.copytree(source, folder / "golden")), 128))


def answered(teacher: Teacher, prompt: list[int], new: int) -> HeldOutPrompt:
    (answer,) = teacher.answer([prompt], new)
    return HeldOutPrompt("prompt", (*prompt, *answer), len(prompt))


def test_held_out_rounds_of_dflash_are_those_of_a_run(tmp_path: Path) -> None:
    prompt = [5, 9, 3, 70, 31, 8]
    made = Pair(*golden_pair()).generate(prompt, 60, [], 8)
    teacher = golden_teacher(DFLASH_GOLDEN / "target", tmp_path)
    course = DFlashTrainer(settings.DFlashTraining(out=tmp_path), teacher)
    course.model = golden_pair()[1]
    held = HeldOutPrompt("prompt", tuple(made.ids), len(prompt))
    found = rounds(course.draft_hits(held), len(prompt))
    assert found[:-1] == made.accepted[: len(found) - 1] and max(found) > 3 > min(found)
    assert sum(found) == len(made.ids) - len(prompt) - 1


def chain(drafter: Eagle3, taps_SF: Tensor, ids: list[int], root: int, steps: int) -> list[int]:
    """What a run drafts behind the root token: its rows, then its own guesses one by one."""
    size = root + steps
    kv = KVCache(1, drafter.kv_heads, drafter.head_dim, size)
    tokens, hidden, drafts, start = ids[1 : root + 1], drafter.fuse(taps_SF[:root]), [], 0
    for _ in range(steps):
        rows = torch.arange(start, start + len(tokens))[None]
        keys = torch.arange(size)[None]
        visible = AttentionPlan.dense(keys[:, None] <= rows[..., None], keys)
        out = drafter(torch.tensor([tokens]), hidden[None], rows, rows, visible, kv)[0]
        hidden, start = out[-1:], start + len(tokens)
        tokens = [int(drafter.to_target(drafter.logits(hidden).argmax(-1)))]
        drafts += tokens
    return drafts


def test_held_out_rounds_of_eagle3_are_those_of_a_run(teacher: Teacher, tmp_path: Path) -> None:
    write_tiny_eagle3(tmp_path, teacher.folder)
    steps = 3
    drafter = loading.load_eagle3(tmp_path, loading.load_target(teacher.folder))
    config = settings.Eagle3Training(out=tmp_path, draft_vocabulary=32, unroll=steps)
    course = Eagle3Trainer(config, teacher, torch.arange(32))
    course.model = drafter
    held = answered(teacher, [5, 9, 3, 70, 31, 8], 40)
    taps = teacher.read(held.batch(teacher.device), drafter.config.taps, exact=True).features_BSF
    hits, ids = course.draft_hits(held), list(held.ids)
    lengths = []
    for root in range(held.first, len(ids) - steps):
        with torch.no_grad():
            drafts = chain(drafter, taps[0], ids, root, steps)
        wanted = ids[root + 1 : root + 1 + steps]
        right = next((k for k in range(steps) if drafts[k] != wanted[k]), steps)
        assert hits[root].long().cumprod(0).sum() == right
        lengths.append(right)
    assert {0, 1, 2} <= set(lengths)


def test_held_out_rounds_of_a_vanilla_drafter(teacher: Teacher, tmp_path: Path) -> None:
    course = VanillaTrainer(settings.VanillaTraining(out=tmp_path, gamma=3), teacher)
    course.model = teacher.model
    held = answered(teacher, [5, 9, 3, 70, 31, 8], 21)
    size = len(held.ids) - held.first - 1
    whole, rest = divmod(size, 4)
    assert rounds(course.draft_hits(held), held.first) == [4] * whole + [rest] * (rest > 0)
    other = list(held.ids)
    other[held.first + 2] = 4000
    wrong = HeldOutPrompt("prompt", tuple(other), held.first)
    assert rounds(course.draft_hits(wrong), held.first)[0] == 2


@pytest.mark.parametrize("same", [True, False])
def test_new_drafters_begin_as_layers(same: bool, teacher: Teacher, tmp_path: Path) -> None:
    hidden, layers = teacher.config.hidden_size, teacher.model.base_model.layers
    wide = teacher.config.intermediate_size + (0 if same else 8)
    config = settings.Eagle3Training(out=tmp_path, draft_vocabulary=32, intermediate=wide)
    eagle = Eagle3Trainer(config, teacher, torch.arange(32)).model
    blocks = settings.DFlashTraining(out=tmp_path, layers=2, intermediate=wide)
    dflash = DFlashTrainer(blocks, teacher).model
    pairs = [(eagle.midlayer, layers[-1]), *zip(dflash.stack, layers[-2:], strict=True)]
    for mine, theirs in pairs:
        own, other = mine.published(), dict(theirs.named_parameters())
        if mine is eagle.midlayer:
            assert torch.equal(mine.hidden_norm.weight, theirs.input_layernorm.weight)
            for name in (f"self_attn.{name}_proj.weight" for name in "qkv"):
                assert own[name].shape[1] == 2 * hidden
                assert not torch.equal(own[name][:, :hidden], own[name][:, hidden:])
                own[name] = own[name][:, hidden:]
        equal = {name for name in own if name in other and torch.equal(own[name], other[name])}
        mlp = {name for name in own if name.startswith("mlp.")}
        assert equal >= {f"self_attn.{name}_proj.weight" for name in "qkvo"}
        assert equal >= mlp if same else not equal & mlp
    for drafter in (eagle, dflash):
        assert torch.equal(drafter.fc.weight[:, -hidden:].diagonal(), torch.ones(hidden))


def test_new_drafters_do_not_copy_norms_after_attention(tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path / "target", "olmo2", layers=4)
    teacher = Teacher(write_tiny_tokenizer(folder))
    dflash = DFlashTrainer(settings.DFlashTraining(out=tmp_path, layers=2), teacher).model
    config = settings.Eagle3Training(out=tmp_path, draft_vocabulary=32)
    eagle = Eagle3Trainer(config, teacher, torch.arange(32)).model
    assert torch.equal(dflash.norm.weight, teacher.model.base_model.norm.weight)
    for norm in (
        dflash.hidden_norm,
        dflash.stack[1].post_attention_layernorm,
        eagle.midlayer.hidden_norm,
    ):
        assert torch.equal(norm.weight, torch.ones_like(norm.weight))
    last = teacher.model.base_model.layers[-1]
    assert torch.equal(eagle.midlayer.o.weight, last.self_attn.o_proj.weight)


def test_norms_of_new_drafters_are_what_those_of_gemma_multiply_by(tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path / "target", "gemma3_text", layers=4)
    teacher = Teacher(write_tiny_tokenizer(folder))
    drafter = DFlashTrainer(settings.DFlashTraining(out=tmp_path, layers=2), teacher).model
    last = teacher.model.base_model.layers[-1]
    pairs = [
        (drafter.norm.weight, teacher.model.base_model.norm.weight),
        (drafter.hidden_norm.weight, last.input_layernorm.weight),
        (drafter.stack[1].post_attention_layernorm.weight, last.pre_feedforward_layernorm.weight),
        (drafter.stack[1].qk_norm[0], last.self_attn.q_norm.weight),
    ]
    for mine, theirs in pairs:
        assert torch.equal(mine, 1.0 + theirs)


def test_a_head_of_eagle2_learns_features_and_what_the_target_makes_of_them(
    teacher: Teacher, tmp_path: Path
) -> None:
    course = Eagle2Trainer(
        settings.Eagle2Training(out=tmp_path, intermediate=32, unroll=1), teacher
    )
    ids, first = list(answered(teacher, [5, 9, 3, 70, 31, 8], 12).ids), 6
    weights = [0.0] * first + [1.0] * (len(ids) - first)
    batch = pack([[Tokens.linear(ids, weights)]], len(ids))
    lesson = course.inputs(batch, exact=True)
    features_SH = teacher.read(batch, course.model.config.taps, exact=True).features_BSF[0]
    assert torch.equal(lesson.taps_BSF[0], features_SH), "behind the target's last norm"
    noisy = course.inputs(batch, exact=True, noise=loop.step_generator(1, 1)).taps_BSF[0]
    off = (noisy - features_SH).abs().max()
    assert 0.05 < float(off) * features_SH.shape[0] / 512 <= 0.1
    ((found_SH,),) = course.unroll(lesson)
    loss, accuracy = course.score(lesson, found_SH[None], 0)
    losses, right = [], []
    for row in range(first - 2, len(ids) - 2):
        wanted_H = features_SH[row + 1]
        near = torch.nn.functional.smooth_l1_loss(found_SH[row], wanted_H)
        said, meant = (course.model.logits(x[None])[0] for x in (found_SH[row], wanted_H))
        losses.append(near - 0.1 * (meant.softmax(-1) * said.log_softmax(-1)).sum())
        right.append(said.argmax() == meant.argmax())
    torch.testing.assert_close(loss * len(ids), torch.stack(losses).sum())
    torch.testing.assert_close(accuracy, torch.stack(right).float().mean())


# -- optimizers, and a training that is killed -----------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 32), (32, 8)])
def test_matrices_move_by_orthogonal_steps_and_the_rest_by_adams(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    rows, columns = shape
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(columns, rows)})
    layer = model["layer"]
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    optimizer = loop.MuonAdamW(model, lr=1e-2, head_lr=2e-2)
    layer(torch.randn(5, columns)).square().sum().backward()
    optimizer.step(0.02)  # the peak of the learning rates
    moved = {name: before[name] - p.detach() for name, p in layer.named_parameters()}
    step = (moved["weight"] - 1e-2 * 0.02 * before["weight"]) / (1e-2 * 0.2 * max(shape) ** 0.5)
    values = torch.linalg.svdvals(step)
    assert values[:5].min() > 0.5 and values.max() < 1.4
    torch.testing.assert_close(moved["bias"].abs(), torch.full((rows,), 2e-2), rtol=1e-3, atol=0)


@pytest.mark.timeout(120)
def test_a_training_killed_twice_is_the_unbroken_one(tmp_path: Path) -> None:
    """Five times, and every kind: tests/full/test_long.py."""
    check_equal(tmp_path, "dflash", 16, train_twice("dflash", tmp_path, 16, kills=2), count=2)


# -- EAGLE-3's loss against one step of the published trainer


def test_losses_accuracies_and_gradients_of_eagle3(tmp_path: Path, monkeypatch: Patch) -> None:
    step = load_file(EAGLE_GOLDEN / "e3_llama_training" / "ttt_step.safetensors")
    facts = json.loads((EAGLE_GOLDEN / "e3_llama_training" / "ttt_step.json").read_text())
    folder = EAGLE_GOLDEN / "targets" / "llama"
    model = loading.load_eagle3(
        EAGLE_GOLDEN / "drafts" / "llama_eagle3", loading.load_target(folder)
    )
    size = model.config.draft_vocab_size
    config = settings.Eagle3Training(out=tmp_path, draft_vocabulary=size, unroll=7, decay=0.8)
    course = Eagle3Trainer(config, golden_teacher(folder, tmp_path), torch.arange(size))
    course.model = model
    rows, length = step["input_ids"].shape
    batch = TrainingBatch(
        ids=step["input_ids"],
        labels=step["input_ids_shifted"].long(),
        positions=torch.arange(length).expand(rows, -1),
        weights=step["loss_mask"],
        samples=step["attention_mask"].long() - 1,
        segments=torch.zeros(rows, length),
    )
    inputs = EagleInputs(
        batch=batch,
        taps_BSF=step["aux_hidden"],
        goals_BSG=step["target_logits_shifted"][..., model.t2d].softmax(-1),
        best_BS=step["target_logits_shifted"].argmax(-1),
        counted_BS=step["loss_mask"].float(),
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != "embed_tokens.weight")
    scores = [course.score(inputs, hidden, k) for k, hidden in enumerate(course.unroll(inputs))]
    losses, accuracies = (torch.stack(part) for part in zip(*scores, strict=True))
    torch.testing.assert_close(losses, step["plosses"], atol=2e-6, rtol=2e-6)
    expected = torch.tensor(facts["accuracies"])
    torch.testing.assert_close(accuracies, expected, atol=1e-5, rtol=0)
    monkeypatch.setattr(course, "inputs", lambda batch, noise: inputs)
    monkeypatch.setattr(course.teacher, "low_precision", nullcontext)
    total = course.loss(batch, torch.Generator())[0] * inputs.counted_BS.mean()
    torch.testing.assert_close(total[None], step["loss"], atol=2e-5, rtol=2e-6)
    total.backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == ["embed_tokens.weight"]
    views = model.published(lambda p: p if p.grad is None else p.grad)
    found = {f"grad.{n}": view for n, view in views.items() if view.is_floating_point()}
    assert found.keys() == {name for name in step if name.startswith("grad.")}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, step[name], atol=2e-6, rtol=2e-5, msg=name)
