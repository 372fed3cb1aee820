"""The engine that stays: requests from any thread with settings of their own, events in order, and
nothing that grows."""

import asyncio
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from helpers.clusters import BEES as FIRST
from helpers.clusters import CAMPING, session_of
from helpers.many import sizes
from helpers.support import SEED, taking_turns, tokens_of

from specsot.engine.events import (
    OUTLINE,
    AnswerReady,
    BranchFinished,
    BranchOpened,
    Committed,
    OutlineRead,
    StreamEvent,
    TextWritten,
)
from specsot.engine.prepare.inputs import Prompt, RequestSettings
from specsot.engine.run.core import EngineCore
from specsot.engine.run.engine import Engine, EngineError, Handle
from specsot.engine.run.session import Session
from specsot.engine.run.writer import output_digest
from specsot.ops.sampling.settings import SamplingRules
from specsot.states.phases.merge import Answer
from specsot.states.text.grammar import GrammarError, schema_grammar
from specsot.states.text.tokens import PromptError

BEES, TEA, RAIN = "Tell me about honey bees.", "How do I make tea?", "What is rain?"
PATIENCE = 120.0


@pytest.fixture
def engine(session: Callable[..., Session]) -> Iterator[Engine]:
    with Engine(session(budget=16)) as made:
        yield made


def texts_of(events: list[StreamEvent]) -> dict[int, str]:
    texts: dict[int, str] = defaultdict(str)
    for event in events:
        if isinstance(event, TextWritten):
            texts[event.index] += event.text
    return texts


def run_of(session: Session, *prompts: str) -> EngineCore:
    """What `specsot run` makes of prompts."""
    run = session.start([Prompt(str(i), p) for i, p in enumerate(prompts, 1)], lambda event: None)
    while not run.finished:
        run.advance()
    return run


def alone(session: Session, *prompts: str) -> dict[str, list[list[int]]]:
    return tokens_of(run_of(session, *prompts))


def ids(answer: Answer) -> list[list[int]]:
    outline = [list(answer.outline_tokens)] if answer.outline_finish else []
    return [*outline, *(list(section.tokens) for section in answer.sections)]


def test_events_come_in_order_and_their_texts_are_the_answer(engine: Engine) -> None:
    handle = engine.submit(BEES)
    events = list(handle.stream())
    answer = handle.result(timeout=PATIENCE)
    assert events[0] == BranchOpened(OUTLINE, "outline")
    (outline,) = [one for one in events if isinstance(one, OutlineRead)]
    assert outline.titles == tuple(section.title for section in answer.sections)
    assert len(outline.titles) > 1
    opened = [one.index for one in events if isinstance(one, BranchOpened)]
    finished = [one for one in events if isinstance(one, BranchFinished)]
    assert opened[0] == OUTLINE and sorted(opened) == [OUTLINE, *range(len(outline.titles))]
    assert {one.index: one.finish for one in finished} == {
        OUTLINE: "stop",
        **{section.index: section.finish for section in answer.sections},
    }
    for section in answer.sections:
        assert texts_of(events)[section.index].strip() == section.text
    assert events[-1] == AnswerReady(answer, "length") and handle.finish == "length"
    steps = [one.step for one in events if isinstance(one, TextWritten)]
    assert steps == sorted(steps) and len(set(steps)) > 5
    assert list(handle.stream()) == events, "it can be read again"


@pytest.mark.parametrize("graph", ["bim_eagle", "batching_dflash", "eagle", "beam"])
def test_an_answer_is_that_of_a_run(graph: str, session: Callable[..., Session]) -> None:
    sets = ("drafter.kind=ngram",) if graph == "batching_dflash" else ()
    made = session(graph, *sets, budget=10)
    run = run_of(made, BEES, TEA)
    with Engine(made) as engine:
        answers = [engine.submit(text).result(PATIENCE) for text in (BEES, TEA)]
    assert {answer.key: ids(answer) for answer in answers} == tokens_of(run)
    assert output_digest(answers) == output_digest(run.answers)


def test_what_is_refused_where_it_is_submitted_and_a_wait_that_ends(engine: Engine) -> None:
    with pytest.raises(EngineError, match="threaded=False"):
        engine.step()
    with pytest.raises(PromptError, match="blank"):
        engine.submit("  ")
    refused = engine.submit("far too long " * 3000).result(PATIENCE)
    assert [section.finish for section in refused.sections] == ["refused"]
    assert engine.stats().ended == {"refused": 1}
    handle = engine.submit(BEES)
    with pytest.raises(TimeoutError, match="request"):
        handle.result(timeout=0.0)
    assert handle.result(PATIENCE).text, "the request goes on"


def test_requests_from_many_threads_give_what_each_gives_alone(
    session: Callable[..., Session],
) -> None:
    made, found, lock = session("eagle", budget=8), {}, threading.Lock()
    texts = [f"{text} ({number})" for number in range(4) for text in (BEES, TEA, RAIN)]
    wanted = alone(made, *texts)

    def ask(engine: Engine, number: int) -> None:
        for at in range(number, len(texts), 4):
            answer = engine.submit(texts[at], key=str(at + 1)).result(PATIENCE)
            with lock:
                found[answer.key] = ids(answer)

    with Engine(made) as engine:
        threads = [threading.Thread(target=ask, args=(engine, n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert found == wanted


def test_many_requests_leave_nothing_behind(session: Callable[..., Session]) -> None:
    made = session("autoregressive", "layout.max_num_branches=4", budget=2)
    with Engine(made, threaded=False) as engine:
        held, steps = [], []
        for _ in range(4):
            handles = [engine.submit(f"{text} {n}") for n in range(25) for text in (TEA, RAIN)]
            began = engine.stats().steps
            while engine.step():
                pass
            assert all(handle.done for handle in handles)
            del handles
            branches = engine.manager
            branches.kv.check_integrity()
            assert not branches.requests and not engine._handles
            assert len(branches.table.segments.parent) == len(branches.prefixes.nodes)
            held.append(sizes(branches))
            steps.append(engine.stats().steps - began)
        grown = {k: (held[0][k], held[-1][k]) for k in held[-1] if held[0][k] != held[-1][k]}
        assert not grown
        assert steps[1] == steps[2] == steps[3]
        assert engine.stats().ended.keys() <= {"length", "stop"}
        assert sum(engine.stats().ended.values()) == engine.stats().submitted == 200


def test_a_timeout_ends_a_request_with_what_it_has(session: Callable[..., Session]) -> None:
    made = session("autoregressive", "layout.max_num_branches=1", budget=300)
    with Engine(made, threaded=False) as engine:
        first, waits = engine.submit(BEES, timeout=0.5), engine.submit(TEA, timeout=0.2)
        last = engine.submit(RAIN, max_new_tokens=3)
        time.sleep(0.2)
        answer = first.result()
        assert first.finish in ("timeout", "stop")
        assert waits.finish == "timeout" and not waits.result().sections[0].tokens
        assert waits.result().sections[0].note == "its time was up"
        assert answer.sections[0].finish in ("timeout", "stop")
        last.result()
        assert last.finish in ("length", "stop"), "its own time has no end"


def test_an_idle_engine_uses_no_processor(engine: Engine) -> None:
    engine.submit(TEA, max_new_tokens=2).result(PATIENCE)
    time.sleep(0.1)
    steps, used = engine.stats().steps, time.process_time()
    time.sleep(0.6)
    assert time.process_time() - used < 0.06 and engine.stats().steps == steps
    assert engine.submit(TEA, max_new_tokens=2).result(PATIENCE).text


def test_closing_waits_for_all_answers_and_takes_no_more(session: Callable[..., Session]) -> None:
    engine = Engine(session(budget=6))
    handles = [engine.submit(text) for text in (BEES, TEA)]
    engine.close()
    assert all(handle.done and handle.finish in ("stop", "length") for handle in handles)
    with pytest.raises(EngineError, match="takes no more requests"):
        engine.submit(TEA)
    engine.close()
    assert engine.stats().ended.keys() <= {"stop", "length"}


def test_closing_at_once_or_after_an_error_cancels_whoever_is_there(
    session: Callable[..., Session],
) -> None:
    engine = Engine(session(budget=200))
    handles = [engine.submit(text) for text in (BEES, TEA, RAIN) * 4]
    engine.close(cancel=True)
    finishes = Counter(handle.finish for handle in handles)
    assert finishes["cancelled"] >= 8 and sum(finishes.values()) == 12
    assert not engine._thread.is_alive()
    with pytest.raises(KeyError), Engine(session("autoregressive", budget=4000)) as engine:
        handles = [engine.submit(BEES) for _ in range(8)]
        raise KeyError
    assert all(handle.done for handle in handles)


@pytest.mark.parametrize("threaded", [True, False])
def test_events_and_results_can_be_awaited(threaded: bool, session: Callable[..., Session]) -> None:
    async def ask(engine: Engine, text: str) -> tuple[list[Any], Answer]:
        handle: Handle = engine.submit(text)
        events = [event async for event in handle.astream()]
        return events, await handle.aresult()

    async def both(engine: Engine) -> list[tuple[list[Any], Answer]]:
        return await asyncio.gather(ask(engine, BEES), ask(engine, TEA))

    made = session(budget=8)
    with Engine(made, threaded=threaded) as engine:
        found = asyncio.run(both(engine))
    wanted = alone(made, BEES, TEA)
    for events, answer in found:
        assert ids(answer) == wanted[answer.key]
        assert events[-1] == AnswerReady(answer, events[-1].finish)
        for section in answer.sections:
            assert texts_of(events)[section.index].strip() == section.text


# -- what one request may ask for instead of what the graph says ----------------------------------

WARM = ("sampling.temperature=0.8",)
OBJECT = schema_grammar(
    {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
)
GRAPHS = (
    ("bim_plain", ()),
    ("bim_eagle", ()),
    ("bim_dflash", WARM),
    ("bim_ngram", WARM),
    ("bim_vanilla", ()),
    ("bim_two_drafters", WARM),
    ("bim_eagle", ("skeleton.share=prompt",)),
    ("paged_eagle", WARM),
    ("batching_eagle", ()),
    ("batching_dflash", WARM),
    ("eagle2", ()),
    ("ddtree", WARM),
    ("autoregressive", WARM),
)


@pytest.fixture
def make(session: Callable[..., Session]) -> Callable[[str], Engine]:
    return lambda graph: Engine(session(graph), threaded=False)


def tokens(answer: Answer) -> list[int]:
    return [token for section in answer.sections for token in section.tokens]


def test_requests_of_one_engine_have_settings_of_their_own(make: Callable[[str], Engine]) -> None:
    rules = SamplingRules(temperature=1.5, logit_bias=((5, 100.0),))
    wanted = [
        RequestSettings(),
        RequestSettings(skeleton=False),
        RequestSettings(rules, skeleton=False),
        RequestSettings(token_ids=(5, 6, 7)),
        RequestSettings(skeleton=False, ignore_eos=True),
    ]
    with make("bim_eagle") as together, make("bim_eagle") as apart, make("eagle") as plain:
        handles = [
            together.submit(Prompt(str(n), BEES, seed=3), settings=one)
            for n, one in enumerate(wanted)
        ]
        answers = [handle.result() for handle in handles]
        for n, one in enumerate(wanted):
            alone = apart.submit(Prompt(str(n), BEES, seed=3), settings=one).result()
            assert tokens(answers[n]) == tokens(alone)
            if one.plain:
                same = plain.submit(Prompt(str(n), BEES, seed=3), settings=one).result()
                assert tokens(alone) == tokens(same) and not alone.outline_tokens
    assert answers[0].outline_tokens and len(answers[0].sections) > 1
    assert tokens(answers[2]) != tokens(answers[1])


def test_stops_and_ignored_ends(make: Callable[[str], Engine]) -> None:
    with make("eagle") as engine:
        usual = tokens(engine.generate(Prompt("1", BEES)))
        stop = RequestSettings(stop_ids=(usual[4],))
        first = usual.index(usual[4])
        assert tokens(engine.submit(Prompt("2", BEES), settings=stop).result()) == usual[:first]
        ends = engine.session.prompts.stop_ids
        bias = SamplingRules(logit_bias=tuple((one, 100.0) for one in ends))
        ended = engine.submit(Prompt("3", BEES), settings=RequestSettings(bias)).result()
        assert tokens(ended) == [] and ended.sections[0].finish == "stop"
        on = RequestSettings(bias, ignore_eos=True)
        endless = engine.submit(Prompt("4", BEES), settings=on).result()
        assert len(tokens(endless)) == 12 and set(tokens(endless)) <= set(ends)


def test_grammars_hold_answers_and_bad_ones_are_refused(make: Callable[[str], Engine]) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    with make("bim_eagle") as engine:
        bound = RequestSettings(grammar=schema_grammar(schema))
        held = engine.submit(Prompt("1", BEES), settings=bound).result()
        assert held.text in ('{"a":1}', '{"a":2}')
        for wrong in ("{", schema_grammar({"type": "no"}), "start: /(/"):
            with pytest.raises(GrammarError):
                engine.submit(Prompt("2", BEES), settings=RequestSettings(grammar=wrong))


def test_every_token_says_how_it_came(make: Callable[[str], Engine]) -> None:
    with make("bim_eagle") as engine:
        handle = engine.submit(Prompt("1", BEES))
        _, last = committed(handle)
    written: dict[int, str] = {}
    for one in handle.since(0):
        if isinstance(one, Committed):
            assert len(one.origins) == len(one.tokens)
            written[one.branch] = written.get(one.branch, "") + one.origins
    assert last.usage.answer == len(tokens(last.answer))
    assert last.usage.outline == len(last.answer.outline_tokens) == len(written[-1])
    assert last.usage.prompt > 0 == last.usage.cached
    for origins in written.values():
        assert origins[0] == "p" and "p" not in origins[1:]
    assert set("".join(written.values())) >= set("pdt")


def test_rules_stand_before_everything_that_is_said(make: Callable[[str], Engine]) -> None:
    for graph in ("bim_eagle", "eagle"):
        session = make(graph).session
        special = session.models.tokenizer.eos_token
        rules = f"Be brief{special}."
        asked = session.request(Prompt("1", "Why?", rules=rules))
        bare = session.request(Prompt("1", "Why?"))
        text = session.models.tokenizer.decode([*asked.prefix, *asked.tail])
        assert text.index("Be brief") < text.index("Why?")
        stops = session.prompts.stop_ids
        ends = [sum(one in stops for one in [*r.prefix, *r.tail]) for r in (asked, bare)]
        assert ends[0] - ends[1] in (0, 1), "a turn of its own at most, none from its text"


def committed(handle: Handle) -> tuple[dict[int, list[int]], AnswerReady]:
    handle.result()
    tokens: dict[int, list[int]] = {}
    *notes, last = handle.since(0)
    assert isinstance(last, AnswerReady)
    for one in notes:
        if isinstance(one, Committed):
            tokens.setdefault(one.branch, []).extend(one.tokens)
    return tokens, last


ASKED = ((FIRST, None), (CAMPING, OBJECT), (FIRST, OBJECT), (CAMPING, None))
SHUFFLED = random.Random(SEED).sample(GRAPHS, len(GRAPHS))


@pytest.mark.parametrize(("case", "asked"), taking_turns(SHUFFLED, ASKED))
def test_a_begun_request_goes_on(case: Any, asked: tuple[Prompt, str | None]) -> None:
    (graph, sets), (prompt, grammar) = case, asked
    dice = random.Random(graph)
    with Engine(session_of(graph, *sets, budget=16), threaded=False) as engine:
        settings = RequestSettings(grammar=grammar)
        wanted = committed(engine.submit(prompt, settings=settings))
        for salt in ("", "another"):
            cuts = {index: ids[: dice.randrange(len(ids))] for index, ids in wanted[0].items()}
            again = replace(prompt, cache_salt=salt)
            begun = replace(settings, resumed=cuts)
            assert committed(engine.submit(again, settings=begun)) == wanted, cuts
