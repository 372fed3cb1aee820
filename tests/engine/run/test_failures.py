"""One request can only fail itself: the others' tokens stay as they are."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.embedded import Embedded, given_outline
from helpers.support import taking_turns

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.engine import Engine, EngineError, Handle
from specsot.engine.run.session import Session
from specsot.states import policies
from specsot.states.policies import Policy
from specsot.states.request import Stage
from specsot.states.text.grammar import OutlineMatcher

BEES, TEA, RAIN = "Tell me about honey bees.", "How do I make tea?", "What is rain?"
BAD = "How do bees make honey?"
LAYOUTS = ("bim", "batching", "paged")


def ids(handle: Handle) -> list[list[int]]:
    answer = handle.result()
    return [list(answer.outline_tokens), *(list(s.tokens) for s in answer.sections)]


def served(made: Session, *texts: str) -> tuple[Engine, dict[str, Handle]]:
    engine = Engine(made, threaded=False)
    handles = {text: engine.submit(text, seed=7) for text in texts}
    for handle in handles.values():
        handle.result()
    engine.manager.kv.check_integrity()
    assert engine.manager.kv.needed_length == 0 and not engine.manager.requests
    return engine, handles


Wanted = dict[str, Handle]


def well(made: Session) -> Wanted:
    return served(made, BEES, TEA, RAIN)[1]


def check(made: Session, wanted: Wanted, why: str, *, recovered: int = 0) -> Handle:
    engine, handles = served(made, BEES, BAD, TEA, RAIN)
    for text, handle in wanted.items():
        assert ids(handles[text]) == ids(handle) and handles[text].finish == handle.finish
    assert handles[BAD].finish == "failed"
    notes = [s.note for s in handles[BAD].result().sections if s.finish == "failed"]
    assert notes and all(why in note for note in notes)
    assert engine.stats().ended["failed"] == 1 and engine.stats().recovered == recovered
    again = engine.submit(TEA, seed=7)
    assert ids(again) == ids(wanted[TEA]), "the engine goes on"
    engine.close()
    return handles[BAD]


class Wrapped:
    """A model or a builder of prompts with a fault."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class Poisoned(Wrapped):
    """A target that writes NaN into the cache once a request's text is there: from then on its
    scores are no numbers, and whatever reads its rows would be poisoned too."""

    def __init__(self, model: Any, late: int) -> None:
        super().__init__(model)
        self.late = late
        self.book: Any = None

    def forward(
        self, tokens_BQ: Any, positions_BQ: Any, slots_BQ: Any, *others: Any, **named: Any
    ) -> Any:
        kv = named["kv"]
        for request in self.book.table.open.values() if self.book is not None else ():
            if request.question == BAD:
                for branch in request.all_branches():
                    if branch.stage is Stage.RUNNING and len(branch.tokens) >= self.late:
                        kv.data[:, :, :, np.flatnonzero(kv.owner == branch.owner)] = torch.nan
        return self.own.forward(tokens_BQ, positions_BQ, slots_BQ, *others, **named)


POISONED = (
    ("bim_eagle", ()),
    ("bim_plain", ("sampling.temperature=0.8",)),
    ("eagle", ("sampling.temperature=0.8", "sampling.top_k=20")),
    ("speculative", ("drafter.kind=ngram",)),
)


@pytest.mark.parametrize(("case", "layout"), taking_turns(POISONED, LAYOUTS))
def test_scores_that_are_no_numbers(
    case: Any, layout: str, session: Any, embedded: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, sets = case
    sets = (*sets, f"layout.kind={layout}", "layout.kv_slots=1024", "attention=grouped")
    target = Poisoned(embedded.models.target, 2)
    made = session(graph, *sets, target=target)
    board = made.board

    def watched(*inbox: Any) -> Any:
        found = board(*inbox)
        target.book = found["branches"]
        return found

    monkeypatch.setattr(made, "board", watched)
    failed = check(made, well(session(graph, *sets)), "NaN")
    assert any(len(tokens) for tokens in ids(failed)), "what it had written is kept"


@pytest.mark.parametrize("method", ["is_legal", "advance", "forced", "new"])
def test_a_grammar_that_fails(method: str, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, wanted, calls = session(), well(session()), 0

    def broken(matcher: Any, *given: Any) -> Any:
        nonlocal calls
        calls += matcher.doomed
        if matcher.doomed and calls > 0:
            raise ZeroDivisionError("no way on")
        return own(matcher, *given)

    new = made.new_matcher

    def matcher_of(question: str) -> Any:
        if method == "new" and question == BAD:
            raise ZeroDivisionError("no way on")
        matcher = new(question)
        matcher.__class__ = type("Watched", (OutlineMatcher,), {"doomed": question == BAD})
        return matcher

    monkeypatch.setattr(made, "new_matcher", matcher_of)
    if method != "new":
        own = getattr(OutlineMatcher, method)
        monkeypatch.setattr(OutlineMatcher, method, broken)
        if method == "forced":  # its chain is no draft; the next token ends it
            monkeypatch.setattr(OutlineMatcher, "is_legal", broken_after(OutlineMatcher.is_legal))
    check(made, wanted, "no way on", recovered=int(method == "new"))


def broken_after(own: Any) -> Any:
    def is_legal(matcher: Any, token: int) -> Any:
        if matcher.doomed and matcher.consumed > 0:
            raise ZeroDivisionError("no way on")
        return own(matcher, token)

    return is_legal


class Reading(Wrapped):
    """A builder of prompts that fails for the parts of one request."""

    def branch(self, one: Any) -> Any:
        if one.request.question == BAD:
            raise LookupError("no such part")
        return self.own.branch(one)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_that_cannot_be_asked_for(layout: str, session: Any) -> None:
    made, other = (
        session("bim_eagle", f"layout.kind={layout}", "layout.kv_slots=1024") for _ in range(2)
    )
    for one in (made, other):
        one.outline, one.new_matcher = given_outline(3), None
    made.reading = Reading(made.reading)
    check(made, well(other), "LookupError: no such part")


def question_ids(made: Session) -> list[int]:
    plain, other = (made.prompts.plain(text).ids for text in (BAD, BEES))
    first = next(at for at, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b)
    return list(plain[first : first + 4])


class Raising(Wrapped):
    """A target that raises while a certain text is in the forward, as a kernel might: nobody can
    tell from the error for whom."""

    def __init__(self, model: Any, rows: list[int]) -> None:
        super().__init__(model)
        self.rows = rows

    def forward(self, tokens_BQ: Any, *others: Any, **named: Any) -> Any:
        flat = tokens_BQ.flatten().tolist()
        size = len(self.rows)
        if any(flat[at : at + size] == self.rows for at in range(len(flat) - size + 1)):
            raise RuntimeError("a kernel failed\nwith many lines")
        return self.own.forward(tokens_BQ, *others, **named)


@pytest.mark.parametrize(("graph", "layout"), taking_turns(("bim_eagle", "eagle", "beam"), LAYOUTS))
def test_an_op_that_raises_in_a_forward_of_many(
    graph: str, layout: str, session: Any, embedded: Embedded
) -> None:
    sets = (f"layout.kind={layout}", "layout.kv_slots=1024", "limits.max_new_tokens=6")
    other = session(graph, *sets, budget=6)
    target = Raising(embedded.models.target, question_ids(other))
    made = session(graph, *sets, budget=6, target=target)
    check(made, well(other), "RuntimeError: a kernel failed", recovered=1)


def test_who_is_run_again_tells_its_events_once(session: Any, embedded: Embedded) -> None:
    target = Raising(embedded.models.target, question_ids(session("eagle")))
    engine = Engine(session("eagle", budget=30, target=target), threaded=False)
    first, second = engine.submit(BEES), engine.submit(TEA)
    for _ in range(6):
        engine.step()
    bad = engine.submit(BAD)
    while not engine.stats().recovered:
        engine.step()
    second.cancel()
    assert second.result().sections[0].finish == "cancelled"
    text = "".join(getattr(event, "text", "") for event in first.stream())
    assert text.strip() == first.result().text and engine.stats().recovered == 1
    assert bad.result().sections[0].finish == "failed"
    engine.close()


@pytest.mark.parametrize("threaded", [True, False])
def test_a_policy_that_throws_ends_the_engine_with_one_clear_error(
    threaded: bool, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(one: Any) -> Any:
        raise LookupError("no rank")

    monkeypatch.setattr(policies, "POLICIES", {"fcfs": Policy(rank)})
    engine = Engine(session(), threaded=threaded)
    handle = engine.submit(TEA)
    with pytest.raises(EngineError, match=r"scheduler\.policy 'fcfs': LookupError: no rank"):
        handle.result(60)
    with pytest.raises(EngineError, match="no rank"):
        list(handle.stream())
    with pytest.raises(EngineError, match="takes no more"):
        engine.submit(TEA)
    engine.close()


def test_a_tokenizer_that_fails_fails_its_own_answer(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, other = session("eagle"), session("eagle")
    wanted, decode = well(other), made.prompts.decode
    doomed = other.start([Prompt("1", BAD, seed=7)], lambda event: None)
    while not doomed.finished:
        doomed.advance()
    tokens = list(doomed.answers[0].sections[0].tokens)

    def failing(ids: Any) -> str:
        if list(ids) == tokens:
            raise UnicodeError("no text")
        return str(decode(ids))

    monkeypatch.setattr(made.prompts, "decode", failing)
    check(made, wanted, "UnicodeError: no text")
