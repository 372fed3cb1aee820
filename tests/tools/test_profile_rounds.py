"""tools/bench/profile_rounds.py: what it says of kernels, ops and the host is so."""

from pathlib import Path
from time import perf_counter_ns, sleep
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.profiler import ProfilerActivity, profile, record_function

from specsot.engine.run.session import open_session
from tools.bench import profile_rounds as tool
from tools.bench.round_floor import rounds_of, weight_bytes, write_random

SMALL = torch.ones(2, 2)


def _mark(name: str) -> None:
    with record_function(name):
        pass


def test_kernels_belong_to_the_op_that_ends_behind_them() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        SMALL.add(1)  # before any round: nobody's
        for number in (0, 0, 1):
            with record_function(f"{tool.MARK}{number}"):
                SMALL.mul(SMALL)
                SMALL.mm(SMALL)
                _mark(tool.OP + "verify one")
                _mark(tool.OP + "verify none")
                torch.ones_like(SMALL)  # one kernel, with others in it
    first, second = tool.kernels_of(watched.events(), 2, 0.0)
    assert first.calls == {"verify one": 4, "verify none": 0, tool.OUTSIDE: 2}
    assert second.calls == {"verify one": 2, "verify none": 0, tool.OUTSIDE: 1}
    assert set(second.names) == {"aten::mul", "aten::mm", "aten::ones_like"}
    assert sum(second.names.values()) == pytest.approx(sum(second.nanos.values()))


def test_only_inner_calls_cost_the_time_of_the_profiler() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as watched, record_function(f"{tool.MARK}0"):
        SMALL.mul(SMALL)
        torch.ones_like(SMALL)
    events = watched.events()
    (whole,), (less,) = (tool.kernels_of(events, 1, cost) for cost in (0.0, 100.0))
    inside = sum(1 for one in events if one.name == "aten::ones_like" for _ in tool.inner(one))
    assert inside and less.names["aten::mul"] == whole.names["aten::mul"]
    taken = whole.names["aten::ones_like"] - less.names["aten::ones_like"]
    assert taken == pytest.approx(min(100.0 * inside, whole.names["aten::ones_like"]))


def test_a_kernel_takes_what_it_took_and_no_time_of_the_host() -> None:
    many = torch.rand(300, 300)
    clocked = []
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        for number in range(30):
            with record_function(f"{tool.MARK}{number}"):
                began = perf_counter_ns()
                many.mm(many)
                clocked.append(perf_counter_ns() - began)
                sleep(0.002)  # the host's
    assert tool.profiler_cost() >= 0
    rounds = tool.kernels_of(watched.events(), 30, 0.0)
    noted = [one.nanos[tool.OUTSIDE] for one in rounds]
    # The profiler's clock is another one: it may differ a little.
    assert all(0 < kernel < 1.1 * clock for kernel, clock in zip(noted, clocked, strict=True))
    # Of thirty calls some are not interrupted between the clock and the kernel.
    assert max(kernel / clock for kernel, clock in zip(noted, clocked, strict=True)) > 0.5


@pytest.mark.parametrize("graph", ["autoregressive", "eagle"])
def test_a_round_is_its_ops_and_what_is_outside(graph: str) -> None:
    found = tool.shares_of(open_session(graph, threads=1, max_new_tokens=24), 1)
    ops: dict[str, Any] = found.parts
    assert {"verify target.forward_", "verify branch.commit_", tool.OUTSIDE} <= ops.keys()
    assert "prefill target.forward_" not in ops
    # The kernels are of one run, the wall time of another, while other tests run.
    assert 0 < found.kernels < 2 * found.wall and found.host == 1 - found.kernels / found.wall
    assert found.wall == sum(wall for wall, _, _ in ops.values())
    forward, plan = ops["verify target.forward_"], ops["schedule schedule.plan_"]
    assert forward[2] > 20 and forward[1] > forward[0] / 4
    assert plan[1:] == (0, 0)
    text = list(tool.lines(graph, found, 2))
    assert len(text) == 1 + len(ops) + 2 and all(line.count("|") == 7 for line in text[:-2])


# -- tools/bench/round_floor.py -------------------------------------------------------------------


def test_a_round_reads_all_weights_but_the_embedding(tmp_path: Path) -> None:
    target, head = write_random(tmp_path, "tiny", torch.float32)
    session = open_session(
        "eagle", model=str(target), drafter_model=str(head), threads=1, max_new_tokens=8
    )
    with safe_open(target / "model.safetensors", "pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    read = [size for name, size in sizes.items() if "embed" not in name and len(size) == 2]
    assert weight_bytes(session.models.target) == 4 * sum(torch.Size(one).numel() for one in read)
    assert 0 < weight_bytes(session.models.drafter) < weight_bytes(session.models.target)
    seconds, drafts, tau = rounds_of(session)
    assert len(seconds) >= 5 and min(seconds) > 0 and drafts >= 1 and tau >= 1
