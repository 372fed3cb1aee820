"""Outlines with a drafter of their own: the tokens stay the target's, and both drafters draft."""

import pytest

from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.api import open_session, token_digest
from specsot.engine.run.session import perform
from specsot.states.request import Branch
from specsot.states.yaml.source import GraphError

PROMPTS = [Prompt("1", "Tell me about honey bees."), Prompt("2", "Plan a weekend camping trip.")]
PAIRS = [
    ("eagle3", "ngram"),
    ("eagle3", "dflash"),
    ("vanilla", "eagle3"),
    ("dflash", "vanilla"),
    ("none", "eagle3"),
    ("vanilla", "none"),
    ("recycle", "ngram"),
]


def answered(*sets: str) -> tuple[str, list[Branch], int]:
    session = open_session("bim_plain", sets=sets, threads=1, max_new_tokens=20)
    run, recorder, _ = perform(session, PROMPTS)
    branches = [b for r in run.requests for b in r.all_branches()]
    return token_digest(run.answers), branches, recorder.meter.rounds


@pytest.fixture(scope="module")
def plain() -> tuple[str, list[Branch], int]:
    return answered()


@pytest.mark.parametrize("layout", ["bim", "batching"])
@pytest.mark.parametrize(("parts", "outline"), PAIRS)
def test_the_tokens_are_those_of_plain_decoding(
    parts: str, outline: str, layout: str, plain: tuple[str, list[Branch], int]
) -> None:
    sets = (f"drafter.kind={parts}", f"skeleton.drafter.kind={outline}", f"layout.kind={layout}")
    digest, branches, rounds = answered(*sets)
    assert digest == plain[0] and rounds <= plain[2] + (layout == "batching") * 50
    for kind, own in (
        (parts, [b for b in branches if not b.is_root]),
        (outline, [b for b in branches if b.is_root]),
    ):
        accepted = sum(sum(branch.accepted) for branch in own)
        assert (accepted > 0) == (kind != "none"), f"{kind} drafts for {[b.name for b in own]}"


def test_a_mixed_tree_has_a_second_drafter(plain: tuple[str, list[Branch], int]) -> None:
    mixed = "drafter={kind: eagle3, with: [recycle, suffix], num_draft_tokens: 6}"
    digest, branches, _ = answered(mixed, "skeleton.drafter={kind: vanilla, gamma_policy: egag}")
    assert digest == plain[0] and all(sum(branch.accepted) for branch in branches)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["skeleton.drafter.kind=egle3"], "no drafter 'egle3'; did you mean 'eagle3'?"),
        (["skeleton.drafter={kind: eagle3, gamma: 3}"], "'gamma' belongs to the drafter vanilla"),
        (["skeleton.drafter={num_draft_tokens: 3}"], "the key 'kind' is missing"),
        (
            ["skeleton.drafter.kind=eagle3", "drafter.rows_per_round=4"],
            "drafter.rows_per_round: must be omitted if outlines have another drafter",
        ),
        (
            ["skeleton.drafter.kind=recycle"],
            "the target's candidates (filler_top_k) are for the graph's drafter only",
        ),
        (
            ["skeleton.drafter.kind=eagle3", "sampling={accept: rejection, temperature: 1}"],
            "a second drafter needs `sampling.accept: match`",
        ),
    ],
)
def test_what_cannot_be_is_said(sets: list[str], message: str) -> None:
    with pytest.raises(GraphError) as error:
        open_graph("bim_eagle", sets)
    assert message in str(error.value)


def test_a_second_drafter_needs_its_model(tmp_path: object) -> None:
    with pytest.raises(Exception, match=r"nowhere"):
        open_session("bim_plain", sets=["skeleton.drafter={kind: eagle3, model: ./nowhere}"])
