"""Sampled text is the same for one seed, whatever the layout, the drafter and the order are."""

import random
import re
from typing import Any

import pytest
import torch
from helpers.drafters import SETTINGS, drafting
from helpers.sampled import FACTORS, Make, check_own, drawn, plain, texts
from helpers.support import (
    SEED,
    Graphs,
    accepted_of,
    branches_of,
    drive,
    named,
    outline_of,
    pairwise,
    requests_of,
    run_all,
    start,
    tokens_of,
)

from specsot.engine.prepare.inputs import Prompt
from specsot.states.yaml.source import GraphError

CASE: dict[str, Any] = {
    "drafter": ("eagle3", 0),
    "layout": "bim",
    "blocks": 1,
    "attention": "auto",
    "parts": 3,
    "temperature": 1.0,
    "rules": "all",
    "order": "fcfs",
    "max_num_branches": 8,
    "share": "outline",
    "stops": (2,),
}


# tests/full/test_sampling_grid.py runs them all
PART = random.Random(SEED).sample(pairwise(FACTORS, SEED), 16)


@pytest.mark.parametrize("case", PART, ids=named)
def test_one_seed_is_one_text(case: dict[str, Any], tiny: Make, graphs: Graphs) -> None:
    made = tiny("llama", dtype="float64")
    alone = drawn(plain(case), made, graphs)
    assert texts(drawn(case, made, graphs)) == texts(alone)


@pytest.mark.parametrize("rules", FACTORS["rules"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_text_is_the_targets_own(family: str, rules: str, tiny: Make, graphs: Graphs) -> None:
    made = tiny(family, dtype="float64")
    run = drawn(CASE | {"rules": rules, "temperature": 1.5}, made, graphs)
    check_own(run, made.book("outline", (2,)), made.reference)


def test_another_seed_is_another_text(tiny: Make, graphs: Graphs) -> None:
    made = tiny("llama")
    session = graphs.session(
        "bim_plain",
        made.models,
        made.book(),
        outline=outline_of(3),
        sets=["sampling.temperature=1"],
    )
    found = [
        tokens_of(run_all(session, [Prompt("a", "hello", seed=seed)])) for seed in (1, 2, 1, 3)
    ]
    assert found[0] == found[2]
    assert found[0] != found[1] != found[3]
    branches = found[0]["a"]
    assert len({tuple(branch) for branch in branches}) == len(branches), "branches share coins"


def test_a_request_does_not_depend_on_who_else_is_there(tiny: Make, graphs: Graphs) -> None:
    made = tiny("llama", dtype="float64")
    sets = ["sampling.temperature=1.0", "sampling.repetition_penalty=1.2", "drafter.kind=eagle3"]
    session = graphs.session(
        "bim_plain", made.models, made.book(), outline=outline_of(4), budget=14, sets=sets
    )
    mine, other = Prompt("mine", "hello", seed=3), Prompt("other", "something else", seed=4)
    alone = tokens_of(run_all(session, [mine]))["mine"]
    assert tokens_of(run_all(session, [other, mine]))["mine"] == alone
    late = drive(start(session, [other]), until=lambda run: run.steps > 12)
    late.board["branches"].lifecycle.submit(session.request(mine))
    assert tokens_of(drive(late))["mine"] == alone


def test_filters_and_bans_hold(tiny: Make, graphs: Graphs) -> None:
    made = tiny("llama")

    def answer(*sets: str) -> list[list[int]]:
        session = graphs.session(
            "bim_plain",
            made.models,
            made.book(),
            outline=outline_of(4),
            budget=14,
            sets=["drafter.kind=eagle3", *(f"sampling.{one}" for one in sets)],
        )
        return [b.tokens for b in branches_of(run_all(session, ["hello"]))]

    free = answer("temperature=1.5")
    common = max((t for b in free for t in b), key=[t for b in free for t in b].count)
    assert answer("temperature=1.5", "top_k=1") == answer("temperature=0.0")
    assert answer("temperature=1.5", "top_p=1e-6") == answer("temperature=0.0")
    assert all(common not in b for b in answer("temperature=1.5", f"banned=[{common}]"))
    assert all(b[:3] == [8, 8, 3] for b in answer("temperature=1.5", "forced=[8, 8, 3]"))
    assert {t for b in answer("logit_bias={17: 1000.0}") for t in b} == {17}
    stops = answer("temperature=1.5", "logit_bias={2: 1000.0}")
    assert all(b == [] for b in stops)
    held = answer("temperature=1.5", "logit_bias={2: 1000.0}", "min_new_tokens=6")
    assert all(len(b) == 6 for b in held)


@pytest.mark.parametrize("kind", ["dflash", "vanilla"])
def test_drafting_with_the_targets_coins_helps_where_no_token_is_likely(
    kind: str, tiny: Make, graphs: Graphs
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
        run = run_all(session, ["hello"])
        found.append((tokens_of(run), sum(sum(b) for b in accepted_of(run)["0"])))
    assert found[0][0] == found[1][0], "what is drafted changes no token"
    assert found[1][1] > found[0][1]


REJECTING = [
    ("vanilla", 0, "chain"),
    ("vanilla", 4, "block"),
    ("dflash", 0, "chain"),
    ("dflash", 0, "block"),
    ("dflash", 1, "topk"),
    ("eagle3", 0, "topk"),
    ("eagle1", 0, "topk"),
    ("eagle1", 0, "with_replacement"),
    ("eagle1", 0, "without_replacement"),
    ("ngram", 1, "topk"),
]
DRAWS = dict.fromkeys(("chain", "block", "with_replacement"), "sampled")
DRAWS["without_replacement"] = "distinct"


@pytest.mark.parametrize(("kind", "number", "rule"), REJECTING)
def test_rejection_gives_both_layouts_the_same_text(
    kind: str, number: int, rule: str, tiny: Make, graphs: Graphs
) -> None:
    """It is drawn by keys of its own, which the layout does not enter either."""
    made = tiny("llama", dtype="float64")
    found = []
    for layout in ("bim", "batching", "paged"):
        sets = [f"drafter.kind={kind}", *SETTINGS[kind][number], f"layout.kind={layout}"]
        sets += [f"drafter.draws={DRAWS[rule]}"] if rule in DRAWS else []
        sets += ["sampling.temperature=1.0", "sampling.accept=rejection", f"sampling.rule={rule}"]
        session = graphs.session(
            "bim_plain",
            drafting(made, kind),
            made.book(stop_ids=()),
            outline=outline_of(4),
            budget=20,
            sets=sets,
        )
        run = run_all(session, ["hello"])
        found.append((tokens_of(run), accepted_of(run)))
    assert found[0] == found[1]
    assert sum(sum(b) for b in found[0][1]["0"]) > 0, "nothing was ever accepted"


@pytest.mark.parametrize(("kind", "number", "rule"), REJECTING)
def test_rejection_at_temperature_0_is_greedy(
    kind: str, number: int, rule: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")

    def answer(kind: str, *sets: str) -> dict[str, list[list[int]]]:
        models = made.models if kind == "none" else drafting(made, kind)
        session = graphs.session(
            "bim_plain",
            models,
            made.book(stop_ids=()),
            outline=outline_of(3),
            budget=20,
            sets=(f"drafter.kind={kind}", *sets),
        )
        return tokens_of(run_all(session, ["hello"]))

    draws = [f"drafter.draws={DRAWS[rule]}"] if rule in DRAWS else []
    rejecting = ("sampling.accept=rejection", f"sampling.rule={rule}")
    # a penalty that changes nothing keeps the row from being the plain best token
    for extra in ((), ("sampling.logit_bias={0: 0.0}",)):
        own = (*SETTINGS[kind][number], *draws, *rejecting, *extra)
        assert answer(kind, *own) == answer("none")


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
    sets: list[str], message: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")
    own = ["drafter.kind=eagle3", *(f"sampling.{one}" for one in sets)]
    with pytest.raises(GraphError, match=re.escape(message)):
        graphs.session("bim_plain", made.models, made.book(), outline=outline_of(1), sets=own)


def test_ids_that_the_model_does_not_have_are_refused(tiny: Make, graphs: Graphs) -> None:
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


def test_noise_is_the_same_in_float32_but_for_ties(tiny: Make, graphs: Graphs) -> None:
    """Coins are float64 in both: hardly a token depends on how scores are rounded."""
    runs = [drawn(CASE, tiny("llama", dtype=kind), graphs, 30) for kind in ("float32", "float64")]
    one, two = (texts(run) for run in runs)
    same = sum(a == b for key in one for a, b in zip(one[key], two[key], strict=True))
    assert same >= sum(map(len, one.values())) - 1
    assert requests_of(runs[0])[0].seed == requests_of(runs[1])[0].seed
    assert torch.get_default_dtype() == torch.float32
