"""Beam search: the tokens and the scores of transformers, whoever else is there."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.beams import FAMILIES, LAYOUTS, PROMPTS, Rig, check_beams, finish, rigs
from helpers.support import SEED, Graphs, branches_of, drive, pairwise, requests_of, tokens_of

from specsot.engine.prepare.inputs import Prompt
from specsot.states.machine import Run
from specsot.states.request import Branch, Finish, Stage

FACTORS: dict[str, Sequence[Any]] = {
    "family": tuple(FAMILIES),
    "layout": LAYOUTS,
    "num_beams": (1, 2, 3, 4, 5),
    "length_penalty": (0.0, 0.7, 1.0, 2.0, 3.0, -1.0),
    "early_stopping": (False, True, "never"),
    "stops": (0, 1, 2, 4),
    "budget": (1, 2, 3, 7, 12, 20),
}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, graphs: Graphs) -> Callable[..., Rig]:
    return rigs(tmp_path_factory, graphs)


def answer_of(branch: Branch, stops: Sequence[int], answer: Sequence[int]) -> None:
    """The branch's tokens are the reference's, and it ended as the reference did."""
    stopped = bool(answer) and answer[-1] in stops
    assert branch.tokens == list(answer[: len(answer) - stopped])
    assert branch.finish is (Finish.STOP if stopped else Finish.LENGTH)


CASES = pairwise(FACTORS, SEED)
CASES += [  # where every setting of early_stopping leads elsewhere
    {"family": "llama", "layout": "bim", "num_beams": 4, "length_penalty": penalty}
    | {"early_stopping": early, "stops": 2, "budget": 20}
    for penalty in (1.0, 2.0)
    for early in FACTORS["early_stopping"]
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_scores_are_those_of_transformers(case: dict[str, Any], rig: Any) -> None:
    """Several requests in one run; each is what it is alone, in transformers."""
    case = dict(case)
    made: Rig = rig(case.pop("family"))
    layout = case.pop("layout")
    run = finish(made.start(list(PROMPTS), layout=layout, **case))
    assert run.board["kv"].needed_length == 0 and not run.board["kv"].ledger.bytes
    for branch, text in zip(branches_of(run), PROMPTS, strict=True):
        tokens, score = made.expected(text, **case)
        answer_of(branch, made.likely[: case["stops"]], tokens)
        assert branch.score is not None and branch.note == f"score {branch.score:.6g}"
        if score is not None:
            assert branch.score == pytest.approx(score, rel=1e-6, abs=1e-6)


def test_the_cases_end_in_every_way(rig: Any) -> None:
    """The test of the test: by stop and by length, early and late, and every setting matters."""
    made: Rig = rig()
    found = {}
    for settings in ((1, 1.0, False), (4, 1.0, False), (4, 2.0, False), (4, 2.0, True)):
        found[settings] = _answers(made, *settings)
    found[4, 2.0, "never"] = _answers(made, 4, 2.0, "never")
    assert len(set(map(str, found.values()))) == len(found)
    ends = [end for answers in found.values() for end, _ in answers]
    assert ends.count(Finish.STOP) > 20 and ends.count(Finish.LENGTH) > 3
    assert len({len(tokens) for answers in found.values() for _, tokens in answers}) > 8


def _answers(made: Rig, beams: int, penalty: float, early: bool | str) -> list[Any]:
    case = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early}
    run = finish(made.start(list("abcdefgh"), stops=2, **case))
    return [(branch.finish, branch.tokens) for branch in branches_of(run)]


def test_one_beam_is_greedy_decoding(rig: Any) -> None:
    """Whatever the other settings are; and its score is what it says."""
    made: Rig = rig()
    for stopping, penalty in ((False, 1.0), ("never", 2.0), (True, -1.0)):
        run = finish(
            made.start(["a", "b"], num_beams=1, early_stopping=stopping, length_penalty=penalty)
        )
        for branch, text in zip(branches_of(run), "ab", strict=True):
            case = {"num_beams": 1, "stops": 3, "budget": 20}
            tokens, _ = made.expected(text, early_stopping=False, length_penalty=1.0, **case)
            answer_of(branch, made.likely[:3], tokens)
            logits = made.reference.logits([*made.prompt(text), *tokens], torch.float64)
            log = logits[len(made.prompt(text)) - 1 : -1].log_softmax(-1)
            total = float(log.gather(1, torch.tensor(tokens)[:, None]).sum())
            assert branch.score == pytest.approx(total / len(tokens) ** penalty, rel=1e-5)


# -- several requests ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_side_by_side_are_what_they_are_alone(layout: str, rig: Any) -> None:
    """Budgets differ, so searches end at different times and newcomers join a forward."""
    made: Rig = rig()
    prompts = [Prompt(text, text, max_new_tokens=5 + 3 * i) for i, text in enumerate("abcdef")]
    run = made.start(prompts, layout=layout, max_num_branches=3)
    seen = set()
    drive(run, check=False, until=lambda run: bool(seen.add(run.state)) or check_beams(run))
    assert "continuous_decode" in seen
    for prompt in prompts:
        alone = finish(made.start([prompt], layout=layout))
        (one,), (other,) = branches_of(alone), _branches(run, prompt.key)
        assert (one.tokens, one.finish, one.score) == (other.tokens, other.finish, other.score)


def _branches(run: Run, key: str) -> list[Branch]:
    return [b for r in requests_of(run) if r.key == key for b in r.branches]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_may_come_late(layout: str, rig: Any) -> None:
    made: Rig = rig()
    alone = tokens_of(finish(made.start(["a", "b"], layout=layout)))
    for state in ("expand_beams", "select_beams", "merge"):
        run = made.start(["a"], layout=layout)
        (late,) = requests_of(made.start(["b"], layout=layout))
        drive(run, check=False, until=lambda run, state=state: run.state == state)
        run.board["branches"].lifecycle.submit(late)
        assert tokens_of(finish(run)) == alone


def test_what_is_shown_while_it_runs_is_never_taken_back(rig: Any) -> None:
    """Tokens are committed once no hypothesis can change them; the sum is the answer."""
    made: Rig = rig()
    run, before, early = made.start(list("abcdef"), stops=1), {}, 0
    while not run.finished:
        run.advance()
        for branch in branches_of(run):
            known = before.get(branch.name, [])
            assert branch.tokens[: len(known)] == known
            early += branch.stage is Stage.RUNNING and len(branch.tokens) > len(known)
            before[branch.name] = list(branch.tokens)
    assert early > 5, "some tokens are known before the end"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cancelled_search_gives_everything_back(layout: str, rig: Any) -> None:
    made: Rig = rig()
    run = made.start(["a", "b"], layout=layout, stops=0)
    drive(run, check=False, until=lambda run: run.steps == 17)
    book = run.board["branches"]
    known = list(branches_of(run)[0].tokens)
    book.table.cancel("a")
    finish(run)
    first, second = branches_of(run)
    assert first.finish is Finish.CANCELLED and first.tokens[: len(known)] == known
    assert second.finish is Finish.LENGTH and len(second.tokens) == 20
    assert run.board["kv"].needed_length == 0 and not book.beams.searches
