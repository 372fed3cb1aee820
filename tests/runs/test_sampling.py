"""Sampled text depends on the seed alone, not on layout, drafter or order; `limits.n` answers."""

import re
from typing import Any

import pytest
import torch
from helpers import support
from helpers.axes import REJECTING, Case, play, session_of, target_of, tokens_by_branch
from helpers.drafters import SETTINGS, drafting
from helpers.support import Tiny, graphs, outline_of
from helpers.toy_graph import told

from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import Session
from specsot.states.request import Stage
from specsot.states.yaml.source import GraphError


def test_another_seed_is_another_text(tiny: support.Make) -> None:
    made = tiny("llama")
    session = graphs.session(
        "bim_plain",
        made.models,
        made.book(),
        outline=outline_of(3),
        sets=["sampling.temperature=1"],
    )
    found = [
        support.tokens_of(support.run_all(session, [Prompt("a", "hello", seed=seed)]))
        for seed in (1, 2, 1, 3)
    ]
    assert found[0] == found[2]
    assert found[0] != found[1] != found[3]
    branches = found[0]["a"]
    assert len({tuple(branch) for branch in branches}) == len(branches), "branches share coins"


@pytest.mark.parametrize("kind", ["dflash", "vanilla"])
def test_drafting_with_the_targets_coins_helps_where_no_token_is_likely(
    kind: str, tiny: support.Make
) -> None:
    made = tiny("llama")
    found = []
    for draws in ("best", "sampled"):
        session = graphs.session(
            "bim_plain",
            drafting(made, kind),
            made.book(stop_ids=()),
            outline=outline_of(6),
            budget=30,
            sets=[f"drafter.kind={kind}", f"drafter.draws={draws}", "sampling.temperature=1.0"],
        )
        run = support.run_all(session, ["hello"])
        found.append((support.tokens_of(run), sum(sum(b) for b in support.accepted_of(run)["0"])))
    assert found[0][0] == found[1][0], "what is drafted changes no token"
    assert found[1][1] > found[0][1]


@pytest.mark.parametrize("drafter", REJECTING, ids=str)
def test_rejection_at_temperature_0_is_greedy(drafter: tuple[str, int], tiny: support.Make) -> None:
    made, (rule, draws) = tiny("llama"), REJECTING[drafter]

    def answer(kind: str, *sets: str) -> dict[str, list[list[int]]]:
        models = made.models if kind == "none" else drafting(made, kind)
        outline, book = outline_of(3), made.book(stop_ids=())
        sets = (f"drafter.kind={kind}", *sets)
        session = graphs.session("bim_plain", models, book, outline=outline, budget=20, sets=sets)
        return support.tokens_of(support.run_all(session, ["hello"]))

    rejecting = ["sampling.accept=rejection", f"sampling.rule={rule}"]
    rejecting += [f"drafter.draws={draws}"] if draws else []
    # a penalty that changes nothing keeps the row from being the plain best token
    for extra in ((), ("sampling.logit_bias={0: 0.0}",)):
        found = answer(drafter[0], *SETTINGS[drafter[0]][drafter[1]], *rejecting, *extra)
        assert found == answer("none")


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["temperature=-1"], "sampling.temperature: must be at least 0.0"),
        (["temperature=.nan"], "sampling.temperature"),
        (["top_k=-1"], "sampling.top_k"),
        (["top_p=0"], "sampling.top_p"),
        (["top_p=1.5"], "sampling.top_p"),
        (["min_p=2"], "sampling.min_p"),
        (["repetition_penalty=0"], "sampling.repetition_penalty"),
        (["logit_bias={a: 1.0}"], "a token id is an integer"),
        (["banned=[-1]"], "sampling.banned"),
        (["accept=sometimes"], "sampling.accept"),
        (["accept=rejection", "rule=chain"], "rule 'chain' does not fit: eagle3 drafts trees of"),
        (["accept=rejection", "rule=without_replacement"], "best tokens, which takes topk"),
        (["skip_sample_adjustment=true"], "skip_sample_adjustment needs accept: rejection"),
    ],
)
def test_wrong_settings_are_said_before_anything_runs(
    sets: list[str], message: str, tiny: support.Make
) -> None:
    made = tiny("llama")
    own = ["drafter.kind=eagle3", *(f"sampling.{one}" for one in sets)]
    with pytest.raises(GraphError, match=re.escape(message)):
        graphs.session("bim_plain", made.models, made.book(), outline=outline_of(1), sets=own)


def test_ids_that_the_model_does_not_have_are_refused(tiny: support.Make) -> None:
    made = tiny("llama")
    size = made.models.target.vocab_size
    with pytest.raises(GraphError, match=f"no token {size}: the model has {size} of them"):
        graphs.session(
            "bim_plain",
            made.models,
            made.book(),
            outline=outline_of(1),
            sets=[f"sampling.banned=[1, {size}]"],
        )


def test_noise_is_the_same_in_float32_but_for_ties(tiny: support.Make) -> None:
    found = []
    for dtype in ("float32", "float64"):
        case = Case(drafter=("eagle3", 0), temperature=1.0, dtype=dtype, budget=30)
        run, _ = play(session_of(case, target_of(case, tiny)), case)
        found.append(tokens_by_branch(run))
    one, two = found
    same = sum(a == b for key in one for a, b in zip(one[key], two[key], strict=True))
    assert same >= sum(map(len, one.values())) - 1
    assert torch.get_default_dtype() == torch.float32


LAYOUTS = ("layout.kind=bim", "layout.kind=batching")
DRAWN = ("sampling.temperature=2.0", "limits.n=4")
PROMPTS = {"long": [3 + n % 11 for n in range(90)], "one": [7], "two": [9, 8]}


@pytest.fixture
def made(tiny: support.Make) -> Tiny:
    return tiny("llama", context=2.0)


def session_of_samples(made: Tiny, *sets: str, kind: str = "none", budget: int = 12) -> Session:
    models = made.models if kind == "none" else drafting(made, kind)
    book, sets = support.FixedBook(PROMPTS), (*DRAWN, f"drafter.kind={kind}", *sets)
    return graphs.session("autoregressive", models, book, budget=budget, sets=sets)


def test_the_prompt_is_computed_once_and_its_rows_are_held_once(made: Tiny) -> None:
    run = support.start(session_of_samples(made), ["long"])
    kv, computed = run.manager.kv, []
    append = kv.append_

    def counting(owner: Any, *more: Any) -> Any:
        computed.append(len(owner))
        return append(owner, *more)

    kv.append_ = counting
    support.drive(run, until=lambda run: len(run.branches) == 4)
    support.check_rows(run)
    (request,) = support.requests_of(run)
    rows = sum(b.length - b.start for b in request.branches)
    assert kv.current_length == len(PROMPTS["long"]) - 1 + rows
    # one forward read the prompt; one went on with the first sample, and began the other three
    assert computed == [len(PROMPTS["long"]), 1 + 3]
    assert not sum(kv.ledger.moves.values())
    support.drive(run)
    assert all(branch.stage is Stage.DONE for branch in request.branches)


def test_in_rows_of_their_own_the_prompt_is_copied(made: Tiny) -> None:
    run = support.run_all(session_of_samples(made, LAYOUTS[1]), ["long"])
    kv = run.manager.kv
    assert kv.ledger.bytes["fork"] == 3 * (len(PROMPTS["long"]) - 1) * kv.slot_bytes


def test_the_answer_shows_all_of_them(made: Tiny) -> None:
    run = support.run_all(session_of_samples(made), ["long"])
    (answer,), (request,) = run.answers, support.requests_of(run)
    book = run.board["prompts"]
    assert answer.samples == tuple(book.decode(b.tokens) for b in request.branches)
    assert all(text in answer.text for text in answer.samples)
    assert [s.title for s in answer.sections] == ["sample"] * 4


@pytest.mark.parametrize(
    ("graph", "sets", "why"),
    [
        ("eagle", (), "temperature 0 gives the same answer every time"),
        ("bim_eagle", ("sampling.temperature=1",), "`skeleton` answers each prompt once"),
        ("beam", ("sampling.temperature=1",), "`beam` draws no tokens"),
    ],
)
def test_where_nothing_is_drawn_there_are_no_samples(
    graph: str, sets: tuple[str, ...], why: str
) -> None:
    with pytest.raises(GraphError) as caught:
        open_graph(graph, (*sets, "limits.n=3"))
    assert any(f"3 samples, but {why}" in line for line in told(caught.value))
