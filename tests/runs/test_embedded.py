"""The embedded models through the shipped graphs: lossless, and as good as promised."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from helpers.embedded import PLAIN, Embedded, given_outline, titles_named
from helpers.support import accepted_of, requests_of, tokens_of

from specsot.engine.run.core import EngineCore
from tools.embedded.heldout import probes


@pytest.fixture(scope="module")
def embedded() -> Embedded:
    return Embedded()


@pytest.fixture(scope="module")
def questions() -> list[str]:
    return [probe.question for probe in [*probes("outline", 2, 3), *probes("unseen", 1, 3)]]


@pytest.fixture(scope="module")
def ran(embedded: Embedded, questions: list[str]) -> Callable[[str], EngineCore]:
    return cache(lambda graph: embedded.run(graph, questions, budget=40))


@pytest.mark.parametrize("graph", ["autoregressive", "eagle", "bim_plain", "bim_eagle"])
def test_every_token_is_the_targets_own(embedded: Embedded, ran: Any, graph: str) -> None:
    assert embedded.check(ran(graph), graph) > (20 if graph in PLAIN else 200)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_given_outlines_too(embedded: Embedded, questions: list[str], count: int) -> None:
    outline = given_outline(count, deps=count > 1)
    run = embedded.run("bim_eagle", questions[:1], outline=outline, budget=24)
    assert len(requests_of(run)[0].branches) == count
    assert embedded.check(run, "bim_eagle") >= count


def test_speculation_changes_no_token_and_saves_forwards(ran: Any) -> None:
    plain, eagle = ran("bim_plain"), ran("bim_eagle")
    assert tokens_of(plain) == tokens_of(eagle)
    assert eagle.board["host"].reads < 0.7 * plain.board["host"].reads


def test_the_drafter_agrees_with_the_target(embedded: Embedded) -> None:
    trees = ("drafter.num_draft_tokens=6", "drafter.draft_depth=4", "drafter.top_k=3")
    asked = [probe.question for probe in probes("outline", 2, 5)]
    run = embedded.run("bim_eagle", asked, sets=trees, budget=40)
    accepted = [n for branches in accepted_of(run).values() for b in branches for n in b]
    assert 1 + sum(accepted) / len(accepted) > 2.0


def test_outlines_name_aspects_of_the_subject(embedded: Embedded) -> None:
    right, total = titles_named(embedded, probes("outline", 6, 11), budget=8)
    assert right >= 0.9 * total
