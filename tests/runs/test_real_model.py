"""A model that somebody uses: SmolLM2, which writes outlines it has never seen."""

from pathlib import Path

import pytest

from specsot.engine.run.api import Prompt, open_session

pytestmark = pytest.mark.real_model
QUESTION = "How can I improve my time management skills?"


def test_an_outline_and_its_parts(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the packaged profiles, and nobody's own
    session = open_session(
        "bim_eagle", profile="smollm2", dtype="bfloat16", max_new_tokens=16, threads=1
    )
    assert session.models.target.config.path.parent == smollm2
    assert session.program.graph.skeleton.share == session.prompts.share == "prompt"
    run = session.start([Prompt("1", QUESTION)], lambda event: None)
    while not run.finished:
        run.advance()
    (answer,) = run.answers
    titles = [section.title for section in answer.sections]
    assert answer.outline.status == "ok" and 2 <= len(titles) <= 8
    assert len(set(titles)) == len(titles) and QUESTION not in titles
    assert all(len(section.text.split()) > 5 for section in answer.sections)
