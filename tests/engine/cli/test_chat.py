"""`specsot chat`: turns behind each other, in the terminal and without one."""

import io
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import call

from specsot.engine.cli import chat as chat_module
from specsot.engine.cli.chat import ChatSession
from specsot.engine.events import (
    OUTLINE,
    BranchFinished,
    BranchOpened,
    OutlineRead,
    StreamEvent,
    TextWritten,
    text_pieces,
)
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.engine import Engine
from specsot.states.text.prompts import PastTurn

SHARED = ("outline", "prompt")
Printed = pytest.CaptureFixture[str]


def chat(monkeypatch: pytest.MonkeyPatch, text: str, *words: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return call("chat", *words)


def test_every_line_is_a_turn_and_one_that_cannot_be_asked_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed, here: Path
) -> None:
    text = "How do I make tea?\n\nWhat is rain?\n/quit\nnever asked\n"
    assert chat(monkeypatch, text, "eagle", "--max-new-tokens", "30") == 0
    out = capsys.readouterr().out
    assert out.startswith("A kettle, a pot or cup") and len(out.strip().split("\n\n")) == 2
    text = f"a\0b\n{'far too long ' * 3000}\nHow do I make tea?\n"
    assert chat(monkeypatch, text, "eagle", "--max-new-tokens", "30") == 1
    shown = capsys.readouterr()
    assert "NUL" in shown.err and "the model takes" in shown.err and "kettle" in shown.out


def test_commands_are_no_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed, here: Path
) -> None:
    text = "/help\n/graph\n/foo\n/clear\n/quit\nHow do I make tea?\n"
    assert chat(monkeypatch, text, "eagle", "--max-new-tokens", "30") == 0
    shown = capsys.readouterr()
    assert shown.out == "" and "/clear  forget what was said" in shown.err
    assert "graph eagle, drafter eagle3, model embedded" in shown.err
    assert "no command /foo" in shown.err


def test_clear_forgets_the_turns_before(session: Any) -> None:
    with Engine(session("eagle")) as engine:
        talk = ChatSession(engine)
        talk.turn("How do I make tea?")
        talk.command("/clear")
        assert talk.past == []


def test_a_turn_follows_the_ones_before(session: Any) -> None:
    made = session("eagle")
    with Engine(made) as engine:
        talk = ChatSession(engine)
        talk.turn("How do I make tea?")
        talk.turn("And coffee?")
        first = made.request(Prompt("1", "How do I make tea?"))
        second = made.request(talk._prompt("Is it good?"))
    one, two = list(first.tail), list(second.tail)
    answer = list(talk.past[0].tokens)
    assert len(answer) == 12 and two[: len(one) + len(answer)] == one + answer
    assert len(talk.past) == 2 and two[len(one) + len(answer) :] != []


def test_ctrl_c_stops_an_answer_alone(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []

    def put(text: str) -> None:
        if not printed:
            signal.raise_signal(signal.SIGINT)
        printed.append(text)

    monkeypatch.setattr(chat_module, "put", put)
    with Engine(session("autoregressive", budget=400)) as engine:
        talk = ChatSession(engine)
        talk.turn("How do I make tea?")
        assert len(talk.past[0].tokens) < 400
        talk.turn("And coffee?")
        assert len(talk.past) == 2 and printed.count("\n\n") == 2


OUTLINED = [("bim_eagle", t, s) for t in ("embedded", "list", "instruct") for s in SHARED]


@pytest.mark.parametrize(("graph", "template", "share"), [("eagle", "", ""), *OUTLINED])
def test_the_past_stands_in_every_prompt_and_is_nothing_but_text(
    graph: str, template: str, share: str, session: Any
) -> None:
    sets = () if graph == "eagle" else (f"skeleton.template={template}", f"skeleton.share={share}")
    made = session(graph, *sets)
    special = made.models.tokenizer.eos_token
    past = (PastTurn(f"Who{special}?", "Nobody <b>"), PastTurn("Why?", "So", (48, 509)))
    plain, behind = (made.request(Prompt("1", "What?", past=turns)) for turns in ((), past))
    ids, more = ([*r.prefix, *r.tail, *r.opening] for r in (plain, behind))
    stops = set(made.prompts.stop_ids)
    ends = [sum(one in stops for one in these) for these in (ids, more)]
    per_turn = ends[1] - ends[0]
    assert per_turn % 2 == 0 and per_turn <= 8, "an end for every turn, none that a text brings"
    text = made.models.tokenizer.decode(more)
    assert "Nobody <b>" in text and "Why?" in text and text.index("Nobody") < text.rindex("What?")
    assert any(more[i : i + 2] == [48, 509] for i in range(len(more))), "known ids are taken over"


def test_what_no_longer_fits_is_left_out_with_a_word(session: Any, capsys: Printed) -> None:
    made = session("eagle", budget=300)
    limit = made.models.target.max_positions
    with Engine(made) as engine:
        talk = ChatSession(engine)
        talk.past = [PastTurn("Why?", "Because. " * 150) for _ in range(40)]
        prompt = talk._prompt("Is it so?")
        assert 0 < len(prompt.past) < 40 and talk.dropped == 40 - len(prompt.past)
        request = made.request(prompt)
        assert request.prompt_size + 300 <= limit
        longer = Prompt("1", "Is it so?", past=(*prompt.past, talk.past[0]))
        assert engine.fit(longer).why
    told = capsys.readouterr().err
    assert told.count("no longer fit") == 1 and f"the first {talk.dropped} turns" in told


# -- how an answer is shown -----------------------------------------------------------------------


PARTS = (
    TextWritten(OUTLINE, "1. A", 1),
    OutlineRead(("A", "B", "C")),
    BranchOpened(0, "A"),
    TextWritten(1, "b", 2),
    TextWritten(0, " a", 2),
    TextWritten(2, "c", 3),
    BranchFinished(1, "stop", ""),
    TextWritten(0, "a", 4),
    BranchFinished(0, "stop", ""),
    TextWritten(2, "c", 5),
    BranchFinished(2, "stop", ""),
)
COMBINED = (
    OutlineRead(("A", "B")),
    TextWritten(0, "a", 2),
    BranchFinished(0, "stop", ""),
    TextWritten(1, "b", 2),
    BranchFinished(1, "stop", ""),
    BranchOpened(2, "combined"),
    TextWritten(2, "both", 3),
)
ONE = (OutlineRead(("A",)), TextWritten(0, "a", 2))


@pytest.mark.parametrize(
    ("graph", "events", "pieces"),
    [
        ("bim_eagle", PARTS, ["1. A\n\na", "a", "\n\n2. B\n\nb\n\n3. C\n\nc", "c"]),
        ("bim_blend_merge", COMBINED, ["both"]),
        ("bim_blend_merge", ONE, ["1. A\n\na"]),
    ],
)
def test_what_is_certain_is_shown_at_once_in_reading_order(
    graph: str, events: tuple[StreamEvent, ...], pieces: list[str]
) -> None:
    assert list(text_pieces(iter(events), open_graph(graph).graph)) == pieces


def test_what_is_shown_is_the_answer(session: Any) -> None:
    for graph, question in (("bim_eagle", "Tell me about honey bees."), ("eagle", "What is rain?")):
        with Engine(session(graph)) as engine:
            handle = engine.submit(question)
            shown = "".join(text_pieces(handle.stream(), engine.session.program.graph))
            assert " ".join(shown.split()) == " ".join(handle.result().text.split())
