"""Figures from made-up events, each worked out by hand."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from specsot.engine.record.metrics import (
    MIN_BRANCH_ROUNDS,
    Meter,
    counted_figures,
    drafter_warnings,
    held_figures,
)
from specsot.ops.forward import HostReader
from specsot.ops.kv.pool import KVCache
from specsot.states.graph.plugins import drafter_class
from specsot.states.machine import Moved, OpRan
from specsot.states.round import RoundSummary


def summary(names: str, committed: tuple[int, ...], accepted: tuple[int, ...], drafted: int):
    return RoundSummary(tuple(names.split()), committed, accepted, drafted, 10, 0, 5)


@pytest.fixture
def meter() -> Meter:
    """Two requests; `b/x` has a slash in its key."""
    made = Meter()
    made.forward_done(summary("a/outline b/x/1", (1, 1), (-1, -1), 0), 5_000)
    made.forward_done(summary("a/outline b/x/1", (3, 1), (2, 0), 20), 10_000)
    made.forward_done(summary("a/outline b/x/1", (0, 2), (0, 1), 20), 20_000)
    made.forward_done(summary("b/x/1 a/1", (2, 1), (1, -1), 10), 30_000)
    return made


def test_figures_of_made_up_rounds(meter: Meter) -> None:
    assert meter.tau_step == pytest.approx((3 + 1 + 0 + 2 + 2) / 5)
    assert counted_figures(meter)["tau_request"] == pytest.approx(
        ((3 + 0) / 2 + (1 + 2 + 2) / 3) / 2
    )
    assert meter.acceptance_rate == pytest.approx((2 + 0 + 0 + 1 + 1) / 50)
    assert (meter.tokens, meter.forwards, meter.rounds) == (11, 4, 3)
    assert meter.per_forward == pytest.approx(11 / 4)
    assert dict(meter.lengths) == {3: 1, 1: 1, 0: 1, 2: 2}
    assert meter.marks["a"].first_token == 5_000
    assert meter.marks["a"].last_token == meter.marks["b/x"].last_token == 30_000


def test_padding_is_a_share_of_all_query_rows(meter: Meter) -> None:
    assert (meter.rows, counted_figures(meter)["padding_waste"]) == (20, 0.0)
    padded = replace(summary("a/1", (1,), (0,), 4), rows=12, padding=8)
    meter.forward_done(padded, 40_000)
    assert counted_figures(meter)["padding_waste"] == pytest.approx(8 / 32)


def test_overhead_is_what_ops_do_not_explain() -> None:
    made = Meter()
    names = ("tau_step", "tau_request", "acceptance_rate", "overhead_share", "padding_waste")
    assert [counted_figures(made)[name] for name in names] == [0.0] * 5
    made.moved(Moved("start", "verify", None, 1, 0))
    made.op_ran(OpRan("verify", "target.forward_", 60, {}))
    made.op_ran(OpRan("verify", "branch.commit_", 20, {}))
    made.moved(Moved("verify", "done", "all_finished", 2, 100))
    assert made.overhead_share == pytest.approx(0.2)
    assert made.visits == {"verify": 1, "done": 1}
    assert made.nanos["verify"] == 100


def test_document_has_the_documented_names(meter: Meter) -> None:
    pool, host = KVCache(2, 1, 4, 16, block_size=2), HostReader()
    pool.append_([0, 0, 0], [0, 1, 2])
    pool.ledger.add("compact", 64)
    host.reads = 4
    branches = SimpleNamespace(blend=None, prefixes=None)
    board = {"host": host, "kv": pool, "kv_draft": None, "branches": branches}
    found = {**counted_figures(meter), **held_figures(meter, board)}
    for name in ("tau_step", "tau_request", "acceptance_rate", "tokens_per_target_forward"):
        assert isinstance(found[name], float)
    assert found["host_reads"] == {"total": 4, "full": 0, "per_round": 1.0}
    assert found["kv"]["target"]["peak_bytes"] == 3 * 2 * 2 * 1 * 4 * 4
    assert found["kv"]["target"]["moved_bytes"] == {"compact": 64}
    wasted = {"size": 2, "count": 8, "peak": 2, "peak_wasted_slots": 1}
    assert found["kv"]["target"]["blocks"] == wasted
    assert found["kv"]["drafter"] is None and found["blend"] is None
    assert found["accepted_lengths"] == {"0": 1, "1": 1, "2": 2, "3": 1}


def test_a_run_that_is_halted_within_a_state_counts_what_was_done_there() -> None:
    made = Meter()
    made.moved(Moved("start", "a", None, 1, 0), 0)
    made.op_ran(OpRan("a", "x", 6_000, {}))
    made.moved(Moved("a", "b", None, 2, 10_000), 10_000)
    assert made.overhead_share == pytest.approx(0.4)
    made.op_ran(OpRan("b", "y", 30_000, {}))
    assert made.seconds == pytest.approx(40e-6)
    assert made.overhead_share == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("kind", "tau", "draft", "rounds", "drafted", "says"),
    [
        ("eagle3", 1.05, 1.0, MIN_BRANCH_ROUNDS, 9, "tau_step 1.05 in 24 rounds.*another model"),
        ("ngram", 1.0, 1.0, MIN_BRANCH_ROUNDS, 9, "repeats too little"),
        ("recycle", 1.0, 1.0, MIN_BRANCH_ROUNDS, 9, "repeats too little"),
        ("adaptive", 1.0, 1.0, MIN_BRANCH_ROUNDS, 9, "another model"),
        ("vanilla", 1.5, 5.1, MIN_BRANCH_ROUNDS, 9, r"fewer tokens \(--set drafter.gamma=N\) or"),
        ("eagle1", 1.5, 5.1, MIN_BRANCH_ROUNDS, 9, "; omit the drafter"),
        ("eagle3", 1.5, 4.9, MIN_BRANCH_ROUNDS, 9, ""),
        ("eagle3", 1.5, 5.1, MIN_BRANCH_ROUNDS, 9, r"drafter.num_draft_tokens=N\)"),
        ("eagle3", 3.0, 5.1, MIN_BRANCH_ROUNDS, 9, ""),
        ("eagle3", 1.0, 1.0, MIN_BRANCH_ROUNDS - 1, 9, ""),
        ("none", 1.0, 1.0, MIN_BRANCH_ROUNDS, 0, ""),
    ],
)
def test_a_drafter_that_does_not_help_is_named(
    kind: str, tau: float, draft: float, rounds: int, drafted: int, says: str
) -> None:
    states = {name: {"milliseconds": ms} for name, ms in (("grow_tree", draft), ("verify", 10.0))}
    metrics = {"tau_step": tau, "branch_rounds": rounds, "drafted": drafted, "states": states}
    settings = drafter_class(kind).Settings(kind=kind)
    lines = drafter_warnings(metrics, settings)
    assert len(lines) == bool(says) and all(re.search(says, line) for line in lines)
