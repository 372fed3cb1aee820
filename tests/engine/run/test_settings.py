"""What one request may ask for instead of what the graph says, and how its tokens came."""

import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.clusters import BEES as FIRST
from helpers.clusters import CAMPING, session_of

from specsot.engine.events import AnswerReady, Committed
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.request_settings import RequestSettings
from specsot.engine.run.engine import Engine, Handle
from specsot.engine.run.session import Session
from specsot.ops.sampling.settings import SamplingRules
from specsot.states.phases.merge import Answer
from specsot.states.text.grammar import GrammarError

BEES = "Tell me about honey bees."
WARM = ("sampling.temperature=0.8",)
OBJECT = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'
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


def test_what_is_kept_of_another_prompt_is_counted(make: Callable[[str], Engine]) -> None:
    with make("eagle") as engine:
        usages = [committed(engine.submit(Prompt("1", BEES * 16)))[1].usage for _ in range(2)]
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


def committed(handle: Handle) -> tuple[dict[int, list[int]], AnswerReady]:
    handle.result()
    tokens: dict[int, list[int]] = {}
    *notes, last = handle.since(0)
    assert isinstance(last, AnswerReady)
    for one in notes:
        if isinstance(one, Committed):
            tokens.setdefault(one.branch, []).extend(one.tokens)
    return tokens, last


@pytest.mark.parametrize("schema", [None, OBJECT], ids=["free", "bound"])
@pytest.mark.parametrize("prompt", [FIRST, CAMPING], ids=["bees", "camping"])
@pytest.mark.parametrize(("graph", "sets"), GRAPHS)
def test_a_begun_request_goes_on(
    graph: str, sets: tuple[str, ...], prompt: Prompt, schema: str | None
) -> None:
    dice = random.Random(graph)
    with Engine(session_of(graph, *sets, budget=16), threaded=False) as engine:
        asked = RequestSettings(schema=schema)
        wanted = committed(engine.submit(prompt, settings=asked))
        for salt in ("", "another"):
            cuts = {index: ids[: dice.randrange(len(ids))] for index, ids in wanted[0].items()}
            again = replace(prompt, cache_salt=salt)
            begun = replace(asked, resumed=cuts)
            assert committed(engine.submit(again, settings=begun)) == wanted, cuts
