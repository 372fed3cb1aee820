"""Sampled text is the same for one seed, whatever the layout, the drafter and the order are."""

import re

import pytest
import torch
from helpers.axes import REJECTING, Case, Make, play, session_of, target_of, tokens_by_branch
from helpers.drafters import SETTINGS, drafting
from helpers.support import Graphs, accepted_of, outline_of, run_all, tokens_of

from specsot.engine.prepare.inputs import Prompt
from specsot.states.yaml.source import GraphError


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


@pytest.mark.parametrize("drafter", REJECTING, ids=str)
def test_rejection_at_temperature_0_is_greedy(
    drafter: tuple[str, int], tiny: Make, graphs: Graphs
) -> None:
    made, (rule, draws) = tiny("llama"), REJECTING[drafter]

    def answer(kind: str, *sets: str) -> dict[str, list[list[int]]]:
        models = made.models if kind == "none" else drafting(made, kind)
        outline, book = outline_of(3), made.book(stop_ids=())
        sets = (f"drafter.kind={kind}", *sets)
        session = graphs.session("bim_plain", models, book, outline=outline, budget=20, sets=sets)
        return tokens_of(run_all(session, ["hello"]))

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
    found = []
    for dtype in ("float32", "float64"):
        case = Case(drafter=("eagle3", 0), temperature=1.0, dtype=dtype, budget=30)
        run, _ = play(session_of(case, target_of(case, tiny), graphs), case)
        found.append(tokens_by_branch(run))
    one, two = found
    same = sum(a == b for key in one for a, b in zip(one[key], two[key], strict=True))
    assert same >= sum(map(len, one.values())) - 1
    assert torch.get_default_dtype() == torch.float32
