"""Training of the target on a small scale: samples, stages, checkpoints, the tokenizer."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specsot.engine.prepare.job import embedded_folder
from specsot.engine.train.data import Packer, pack
from specsot.models.load.weights import load_target
from tools.embedded.corpus import Corpus
from tools.embedded.pieces import Sample, given, gold
from tools.embedded.samples import corpus_source, encode_sample
from tools.embedded.stages import STAGES, stage_at
from tools.embedded.target import TargetTraining, batch_loss, new_model, train_target
from tools.embedded.tokenizer_training import CHAT_TEMPLATE, SPECIAL, rough_count

EMBEDDED = embedded_folder("target")


def encode(text: str) -> list[int]:
    return [ord(c) % 97 + 5 for c in text]


def tree() -> Sample:
    return Sample("outline", given("ab") + gold("cd"), (given("x") + gold("y"), gold("z")))


def test_branches_continue_the_trunk_and_do_not_see_each_other() -> None:
    tokens = encode_sample(tree(), encode)
    end = tokens.segments.count(0)
    assert tokens.positions[:end] == list(range(end))
    assert tokens.positions[tokens.segments.index(2)] == end
    batch = pack([[tokens, tokens]], 2 * len(tokens.ids) + 3)
    mask, size = batch.mask[0, 0], len(tokens.ids)
    first, second = tokens.segments.index(1), tokens.segments.index(2)
    assert mask[second, :end].all() and not mask[second, first:second].any()
    assert not mask[size:, :size].any()
    assert mask.diagonal().all()
    # labels are the next ids, and starts of branches do not count
    batch = pack([[tokens]], size)
    assert batch.labels[0, :-1].tolist() == tokens.ids[1:]
    assert not any(batch.weights[0, at - 1] for at in (first, second, size))


def test_a_branch_in_a_tree_has_the_same_loss_as_alone() -> None:
    model = new_model(TargetTraining(out=Path(), layers=1, hidden=128, intermediate=64))
    model.float().eval()
    whole = encode_sample(tree(), encode)
    alone = encode_sample(Sample("outline", tree().trunk + tree().branches[1]), encode)
    logits = []
    for tokens in (whole, alone):
        batch = pack([[tokens]], len(tokens.ids))
        out = model(input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions)
        logits.append(out.logits[0, -1])
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)
    assert batch_loss(model, pack([[whole]], len(whole.ids))).isfinite()


def test_a_packer_goes_on_where_another_stopped_and_stages_follow_one_another() -> None:
    packer = Packer(corpus_source(Corpus(rough_count), encode), 4096, 2048)
    batches = packer.batches()
    next(batches)
    again = replace(packer)
    torch.testing.assert_close(next(batches).ids, next(again.batches()).ids)
    assert [stage_at(STAGES, done) for done in (0.0, 0.2, 0.6, 0.9, 1.0)] == [*STAGES, STAGES[-1]]


def test_a_target_is_trained_loads_in_both_worlds_and_resumes(tmp_path: Path) -> None:
    sizes = {"batch_tokens": 3072, "layers": 6, "hidden": 128, "intermediate": 64}
    out, run = tmp_path / "target", tmp_path / "run"
    config = TargetTraining(out=out, run=run, tokens=2 * 3072, **sizes)
    run.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (run / name).write_bytes((EMBEDDED / name).read_bytes())
    for more, steps in ((config, 2), (replace(config, tokens=3 * 3072, resume=True), 3)):
        train_target(more)
        log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        assert [row["step"] for row in log] == [*range(1, steps + 1)] and log[-1]["done"] == 1.0
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert load_target(out).config.vocab_size == theirs.config.vocab_size == 4096
    assert theirs.generation_config.eos_token_id == [2, 0]


def test_the_embedded_tokenizer_has_the_agreed_ids_and_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    assert len(tokenizer) == 4096
    assert tokenizer.convert_ids_to_tokens(list(range(16))) == list(SPECIAL)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (0, 2, 3)
    text = "Zoë pays 1,234 €\n\tfor 漢字 🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("4096", add_special_tokens=False)) == 4
    assert tokenizer.chat_template == CHAT_TEMPLATE
    turn = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
