"""What one request may ask for instead of what the graph says, and how its tokens came."""

import json
from collections.abc import Callable

import pytest

from specsot.engine.events import AnswerReady, Committed
from specsot.engine.prepare.inputs import Prompt, RequestSettings
from specsot.engine.run.engine import Engine
from specsot.engine.run.session import Session
from specsot.ops.sampling.settings import SamplingRules
from specsot.states.phases.merge import Answer
from specsot.states.text.grammar import GrammarError

BEES = "Tell me about honey bees."


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


def test_schemas_hold_answers_and_bad_ones_are_refused(make: Callable[[str], Engine]) -> None:
    schema = json.dumps(
        {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        }
    )
    with make("bim_eagle") as engine:
        held = engine.submit(Prompt("1", BEES), settings=RequestSettings(schema=schema)).result()
        assert json.loads(held.text)["a"] in (1, 2)
        deep = '{"allOf": [' * 40 + "{}" + "]}" * 40
        for wrong in ("{", '{"type": "no"}', deep, json.dumps({"enum": ["x" * 20_000]})):
            with pytest.raises(GrammarError):
                engine.submit(Prompt("2", BEES), settings=RequestSettings(schema=wrong))


def test_every_token_says_how_it_came(make: Callable[[str], Engine]) -> None:
    with make("bim_eagle") as engine:
        handle = engine.submit(Prompt("1", BEES))
        handle.result()
        noted = handle.since(0)
    written: dict[int, str] = {}
    for one in noted:
        if isinstance(one, Committed):
            assert len(one.origins) == len(one.tokens)
            written[one.branch] = written.get(one.branch, "") + one.origins
    last = noted[-1]
    assert isinstance(last, AnswerReady)
    assert last.usage.answer == len(tokens(last.answer))
    assert last.usage.outline == len(last.answer.outline_tokens) == len(written[-1])
    assert last.usage.prompt > 0 == last.usage.cached
    for origins in written.values():
        assert origins[0] == "p" and "p" not in origins[1:]
    assert set("".join(written.values())) >= set("pdt")


def test_what_is_kept_of_another_prompt_is_counted(make: Callable[[str], Engine]) -> None:
    with make("eagle") as engine:
        usages = []
        for _ in range(2):
            handle = engine.submit(Prompt("1", BEES * 16))
            handle.result()
            last = handle.since(0)[-1]
            assert isinstance(last, AnswerReady)
            usages.append(last.usage)
    assert usages[0].cached == 0 < usages[1].cached < usages[1].prompt == usages[0].prompt


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
