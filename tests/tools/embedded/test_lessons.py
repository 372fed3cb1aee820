"""Drafters of the embedded target learn from the corpus, by the same loop as all others."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.interrupted import log_of
from typer.testing import CliRunner

from specsot.engine.errors import UsageError
from specsot.engine.prepare.job import embedded_folder
from specsot.engine.train.settings import DrafterTraining
from specsot.engine.train.teacher import Teacher
from specsot.models.load.weights import load_target
from tools.embedded.lessons import corpus_lessons
from tools.embedded.train import app

SETTINGS = DrafterTraining(out=Path("out"), held_out=2)


def test_the_corpus_and_its_held_out_prompts() -> None:
    teacher = Teacher(embedded_folder("target"))
    lessons = corpus_lessons(SETTINGS, teacher)
    assert lessons.distinct is None and lessons.source(7) == lessons.source(7)
    assert {held.kind for held in lessons.held_out} == {"outline", "part", "reading"}
    for held in lessons.held_out:
        assert held.ids[-1] in teacher.stops and 0 < held.first < len(held.ids)
    outlines = [held for held in lessons.held_out if held.kind == "outline"]
    texts = [teacher.tokenizer.decode(held.ids[held.first :]) for held in outlines]
    assert any(text.startswith("PLAN\n1|") for text in texts)
    assert corpus_lessons(replace(SETTINGS, held_out=0), teacher).held_out == []
    teacher.encode = lambda text: [5, 6]  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="another tokenizer"):
        corpus_lessons(SETTINGS, teacher)


def test_a_drafter_of_the_embedded_target_is_trained(tmp_path: Path) -> None:
    small = "--steps 2 --batch-tokens 512 --length 256 --threads 1 --held-out 0 --layers 1"
    words = ["vanilla", "--out", str(tmp_path / "v"), *small.split(), "--hidden", "32"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0 and result.output.split()[-1] == str(tmp_path / "v")
    assert [line["step"] for line in log_of(tmp_path / "v.run")] == [1, 2]
    target = load_target(embedded_folder("target"))
    assert load_target(tmp_path / "v").config.vocab_size == target.config.vocab_size
