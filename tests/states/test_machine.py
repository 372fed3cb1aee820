"""Running a graph: order, blackboard, events, errors, and what `transitions` must not do."""

import gc
import logging
import weakref
from contextlib import closing
from typing import Any

import pytest
from helpers.toy_graph import GIVEN, GRAPH, changed, load

from specsot.states import machine
from specsot.states.graph.graph import PREFIXES, RESERVED, RUN_KEYS
from specsot.states.machine import START, Event, Moved, OpRan, Run, RunError, describe


def start(text: str = GRAPH, n: int = 0) -> tuple[Run, list[Event]]:
    events: list[Event] = []
    return Run(load(text), {"counter": {"n": n}}, events.append), events


def drive(run: Run) -> Run:
    while not run.finished:
        run.advance()
    return run


def test_states_in_order_and_events_of_every_op_and_move() -> None:
    run, events = start()
    assert run.state == START and not run.finished and run.steps == 0
    drive(run)
    moves = [e for e in events if isinstance(e, Moved)]
    assert [m.target for m in moves] == [
        "prefill", "draft", "verify", "draft", "verify", "draft", "verify", "done",
    ]  # fmt: skip
    assert [m.source for m in moves][:2] == [START, "prefill"]
    assert [m.step for m in moves] == list(range(1, 9)) and run.steps == 8
    assert [m.guard for m in moves][-2:] == [None, "toy_done"]
    assert moves[0].nanos == 0 and all(m.nanos > 0 for m in moves[1:])
    ran = [(e.state, e.op) for e in events if isinstance(e, OpRan)]
    assert ran[:3] == [("prefill", "toy.open"), ("draft", "toy.draft"), ("verify", "toy.verify_")]
    assert all(e.nanos > 0 for e in events if isinstance(e, OpRan))
    kinds = [type(e) for e in events]
    assert kinds[:4] == [Moved, OpRan, Moved, OpRan], "a move comes before the ops behind it"
    with pytest.raises(RunError, match="cannot continue from 'done': it is over"):
        run.advance()


def test_results_are_stored_and_drops_are_gone() -> None:
    run, events = start()
    run.advance()
    run.advance()
    assert run.board["proposal"] == [0, 1, 2, 3, 4]
    run.advance()
    assert "proposal" not in run.board
    assert (run.board["accepted"], run.board["committed"]) == (5, 1)
    written = [e.shapes for e in events if isinstance(e, OpRan)]
    assert written == [
        {"rows": "list[1]"},
        {"proposal": "list[5]"},
        {"accepted": "5", "committed": "1"},
    ]


def test_settings_reach_the_op() -> None:
    run, _ = start(changed(("[toy.draft]", "[{op: toy.draft, with: {levels: 2, extra: 1}}]")))
    run.advance()
    run.advance()
    assert len(run.board["proposal"]) == 3


def test_a_guard_may_return_anything_truthy() -> None:
    text = changed(("to: verify}", "to: done, when: toy_any}\n  - {from: draft, to: verify}"))
    run, _ = start(text, n=1)
    assert [drive(run).state, run.steps] == ["done", 3]


def test_the_first_open_way_is_taken() -> None:
    text = changed(
        ("to: done, when: toy_done}", "to: prefill, when: toy_never}\n"
         "  - {from: verify, to: done, when: toy_any}"),
    )  # fmt: skip
    run, events = start(text)
    drive(run)
    guards = [e.guard for e in events if isinstance(e, Moved)]
    assert guards[-1] == "toy_any" and "toy_never" not in guards


def test_a_stuck_run_says_where() -> None:
    run, _ = start()
    run.take_transition = lambda: False
    with pytest.raises(RunError, match="stuck in 'start': no transition is open"):
        run.advance()
    with pytest.raises(RunError, match="it is stuck"):
        run.advance()


@pytest.mark.parametrize(
    ("change", "moves", "kind", "place"),
    [
        (("[toy.draft]", "[toy.draft, toy.fail]"), 1, ValueError, "8: in op 'toy.fail' of state"),
        (("when: toy_done", "when: toy_breaks"), 3, KeyError, "14: in guard 'toy_breaks'"),
        (("[toy.open]", "[toy.two, toy.open]"), 0, ValueError, "7: in op 'toy.two' of state"),
        (("[toy.open]", "[toy.loud, toy.open]"), 0, TypeError, "7: in op 'toy.loud' of state"),
    ],
)
def test_an_error_in_an_op_or_a_guard_keeps_its_type_and_says_where(
    change: tuple[str, str], moves: int, kind: type[Exception], place: str
) -> None:
    run, events = start(changed(change))
    for _ in range(moves):
        run.advance()
    with pytest.raises(kind) as caught:
        run.advance()
    where = f" {run.state!r}" if place.endswith("state") else ""
    assert caught.value.__notes__ == [f"g.yaml:{place}{where}"]
    with pytest.raises(RunError, match=f"continue from {run.state!r}: it died of {kind.__name__}"):
        run.advance()
    assert not any(isinstance(e, OpRan) and f"'{e.op}'" in place for e in events)


def test_an_interrupt_is_not_swallowed() -> None:
    def sink(event: Event) -> None:
        if isinstance(event, OpRan):
            raise KeyboardInterrupt

    run = Run(load(), {"counter": {"n": 0}}, sink)
    with pytest.raises(KeyboardInterrupt):
        run.advance()
    with pytest.raises(RunError, match="died of KeyboardInterrupt"):
        run.advance()


def test_a_closed_run_is_over_and_holds_nothing() -> None:
    class Big:
        pass

    big = Big()
    seen = weakref.ref(big)
    run, _ = start()
    run.board["big"] = big
    del big
    with closing(run):
        run.advance()
    assert run.board == {} and run.state == "prefill"
    gc.collect()
    assert seen() is None
    with pytest.raises(RunError, match="it was closed"):
        run.advance()


def test_the_board_starts_with_exactly_the_given_keys() -> None:
    for board in ({}, {"counter": {"n": 0}, "other": 1}):
        with pytest.raises(ValueError, match=r"starts with other keys: (counter|other)$"):
            Run(load(), board, lambda event: None)
    assert load().given == GIVEN and "branches" in RUN_KEYS


def test_two_runs_of_one_program_are_apart() -> None:
    program = load()
    runs = [Run(program, {"counter": {"n": n}}, lambda event: None) for n in (0, 2)]
    assert [drive(run).steps for run in runs] == [8, 4]


def test_the_machine_binds_no_name_that_a_run_has_itself() -> None:
    run, _ = start()
    bound = {name for name in vars(run) if callable(getattr(run, name))} - {"sink"}
    assert {"take_transition", "may_take_transition", "trigger", "is_verify"} <= bound
    assert not bound & set(dir(Run))
    other = {n for n in bound if n not in RESERVED and not n.startswith(PREFIXES)}
    assert other == {"take_transition"}


def test_logging_of_transitions_is_off_even_under_a_loud_root(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    drive(start()[0])
    assert not [r for r in caplog.records if r.name.startswith("transitions")]
    assert machine.logging.getLogger("transitions").level == logging.WARNING


def test_values_are_described_without_reading_them() -> None:
    class Device:
        """As a tensor looks; reading an element would fail."""

        def __init__(self, *shape: int) -> None:
            self.shape, self.dtype = shape, "torch.int64"

        def __getattr__(self, name: str) -> Any:
            assert name.startswith("_") or name in ("shape", "dtype"), f"{name} was read"
            raise AttributeError(name)

    from dataclasses import dataclass
    from typing import NamedTuple

    @dataclass(frozen=True)
    class Rows:
        tokens_BQ: Device
        trees: int

    class Pair(NamedTuple):
        a: Device
        b: Device | None

    assert describe(Device(1, 5)) == "int64[1,5]"
    assert describe(Device()) == "int64[]"
    assert describe(Rows(Device(1, 5), 2)) == "Rows(tokens_BQ=int64[1,5], trees=2)"
    assert describe(Pair(Device(2), None)) == "Pair(a=int64[2], b=None)"
    assert describe([1, 2]) == "list[2]" and describe("abc") == "str[3]"
    assert describe(True) == "True" and describe(object()) == "object"
