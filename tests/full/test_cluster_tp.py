"""Workers that compute together, in full: every drafter, layout and grouping, and ranks that die.

Prints what it has shown; docs/cluster.md and docs/tensor_parallel.md have the figures."""

import json
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from time import monotonic

import pytest
from helpers import clusters
from helpers.commands import ended
from helpers.ray_clusters import BUDGET, DEADLINE, GRAPH, SAMPLED, disturbed, ray_cluster
from helpers.support import outline_of

from specsot.engine.prepare.files import graph_names
from specsot.states.text.outline import Outline

DRAFTERS = ("bim_eagle", "bim_dflash", "bim_vanilla", "bim_ngram", "bim_plain")
GROUPS = ((2, 2, 1), (2, 2, 2), (2, 1, 2), (4, 4, 1), (4, 4, 2), (4, 2, 1), (3, 2, 1))
ALONE = ("beam", "bim_attend_merge", "bim_blend_eagle", "bim_blend_merge", "blend_eagle")
SHIPPED = [graph for graph in graph_names() if graph not in ALONE]
COINS = {"greedy": (), "sampled": SAMPLED}


@pytest.mark.parametrize("coins", COINS)
@pytest.mark.parametrize("layout", ["bim", "paged"])
@pytest.mark.parametrize("graph", DRAFTERS)
def test_every_grouping_writes_what_one_engine_writes(graph: str, layout: str, coins: str) -> None:
    sets = f"layout.kind={layout}", *COINS[coins]
    session = clusters.session_of(graph, *sets, budget=12, packed=False)
    expected = clusters.alone(session, [clusters.CAMPING])
    for workers, skeleton, branches in GROUPS:
        sizes = {"workers": workers, "skeleton": skeleton, "branches": branches}
        ran = clusters.on_workers(session, [clusters.CAMPING], **sizes, deadline=60.0)
        assert ran.digest == expected, sizes
        assert not ran.director.workers.losses and not ran.told("group_lost"), sizes


@pytest.mark.parametrize("coins", COINS)
@pytest.mark.parametrize("graph", SHIPPED)
def test_every_shipped_graph(graph: str, coins: str) -> None:
    asked = {"budget": 12, "packed": False}
    session = clusters.session_of(graph, *COINS[coins], **asked)
    halves = [
        clusters.session_of(graph, *COINS[coins], **asked, part=(index, 2)) for index in range(2)
    ]
    expected = clusters.alone(session, [clusters.CAMPING])
    for skeleton, branches in ((1, 1), (1, 2), (2, 2)):
        source = clusters.ThreadWorkers(*(halves if skeleton == 2 else [session])).source
        sizes = {"skeleton": skeleton, "branches": branches}
        ran = clusters.on_workers(
            session, [clusters.CAMPING], source=source, **sizes, deadline=60.0
        )
        assert ran.digest == expected, sizes


DEPS = {2: (1,), 3: (1,), 4: (2, 3)}


@pytest.mark.parametrize("layout", ["bim", "paged"])
@pytest.mark.parametrize("outline", [*map(outline_of, range(1, 9)), outline_of(4, deps=DEPS)])
def test_any_number_of_branches(outline: Outline, layout: str) -> None:
    sets = (f"layout.kind={layout}", *SAMPLED)
    session = clusters.session_of("bim_eagle", *sets, budget=12, outline=outline, packed=False)
    for workers, skeleton, branches in ((2, 2, 1), (4, 4, 2)):
        sizes = {"workers": workers, "skeleton": skeleton, "branches": branches}
        clusters.checked_run(session, [clusters.CAMPING, clusters.BEES], **sizes, deadline=60.0)


def test_a_run_on_ranks_is_held_to_transformers(tmp_path: Path) -> None:
    """The commands of docs/cluster.md."""
    (tmp_path / "specsot.yaml").write_text("cluster: {skeleton: {tp: 2}}\n")
    (tmp_path / "note.txt").write_text(clusters.CAMP)
    asked = "--document", "note.txt", "Tell me about honey bees."
    commands = ["run", "bim_dflash", "--workers", "2", *asked], ["verify-run", "--json"]
    told = [ended(words, tmp_path, {}).stdout for words in commands]
    branches = json.loads(told[1])["branches"]
    assert len(branches) > 2 and not any(one["wrong"] for one in branches)
    metrics = json.loads((tmp_path / "runs" / "latest" / "metrics.json").read_text())
    assert metrics["cluster"]["regroup"]["bytes"] > 0


def test_a_certificate_on_workers(tmp_path: Path) -> None:
    (tmp_path / "specsot.yaml").write_text("cluster: {skeleton: {tp: 2}}\n")
    words = ["certify", "bim_eagle", "--quick", "--workers", "2", "--threads", "1", "--json"]
    (one,) = json.loads(ended(words, tmp_path, {}).stdout)["certificates"]
    found = [
        check for part in one["parts"] if part["name"] == "workers" for check in part["checks"]
    ]
    assert [check["passed"] for check in found] == [True, True]
    assert all(check["figures"]["regroup_bytes"] and check["figures"]["tokens"] for check in found)


@pytest.mark.parametrize("branches", [1, 2])
def test_ranks_that_die_or_hang_change_nothing(
    branches: int, report: Callable[[str], None]
) -> None:
    session = clusters.session_of(GRAPH, *SAMPLED, budget=BUDGET, packed=False)
    expected = clusters.alone(session, [clusters.BEES])
    with ray_cluster(together=2, branches=branches) as source:
        assert source.parts == branches
        for number, when in product(
            (signal.SIGKILL, signal.SIGSTOP), (clusters.outline_begun, clusters.mid_branch)
        ):
            began, sizes = monotonic(), {"skeleton": 2, "branches": branches}
            ran, took = disturbed(
                source, session, [clusters.BEES], when, clusters.last, number, **sizes
            )
            whole = monotonic() - began
            assert ran.digest == expected and ran.director.workers.losses == 1
            if number is signal.SIGSTOP:
                (lost,) = ran.told("lost")
                assert lost["why"] in (f"has not answered for {DEADLINE:g} s", "has ended")
            moment = f"{number.name}, branches by {branches}, {when.__name__}"
            report(f"{moment}: {took:.1f} s of {whole:.1f}")
