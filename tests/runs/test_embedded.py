"""The embedded models through the shipped graphs: lossless, and as good as promised."""

import pytest
from helpers.embedded import PLAIN, Embedded, given_outline, titles_named
from helpers.support import accepted_of, requests_of, tokens_of

from tools.embedded.heldout import probes

QUESTIONS = [p.question for p in [*probes("outline", 2, 3), *probes("unseen", 1, 3)]]


@pytest.fixture(scope="module")
def embedded() -> Embedded:
    return Embedded()


@pytest.mark.parametrize("graph", ["autoregressive", "eagle", "bim_plain", "bim_eagle"])
def test_every_token_is_the_targets_own(embedded: Embedded, graph: str) -> None:
    run = embedded.run(graph, QUESTIONS, budget=60)
    assert embedded.check(run, graph) > (20 if graph in PLAIN else 200)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_given_outlines_too(embedded: Embedded, count: int) -> None:
    outline = given_outline(count, deps=count > 1)
    run = embedded.run("bim_eagle", QUESTIONS[:1], outline=outline, budget=24)
    assert len(requests_of(run)[0].branches) == count
    assert embedded.check(run, "bim_eagle") >= count


def test_speculation_changes_no_token_and_saves_forwards(embedded: Embedded) -> None:
    plain = embedded.run("bim_plain", QUESTIONS[:1])
    eagle = embedded.run("bim_eagle", QUESTIONS[:1])
    assert tokens_of(plain) == tokens_of(eagle)
    assert eagle.board["host"].reads < 0.7 * plain.board["host"].reads


def test_the_drafter_agrees_with_the_target(embedded: Embedded) -> None:
    trees = ("drafter.num_draft_tokens=6", "drafter.draft_depth=4", "drafter.top_k=3")
    run = embedded.run("bim_eagle", [p.question for p in probes("outline", 4, 5)], sets=trees)
    accepted = [n for branches in accepted_of(run).values() for b in branches for n in b]
    assert 1 + sum(accepted) / len(accepted) > 2.0


def test_outlines_name_aspects_of_the_subject(embedded: Embedded) -> None:
    right, total = titles_named(embedded, probes("outline", 6, 11), budget=8)
    assert right >= 0.9 * total
