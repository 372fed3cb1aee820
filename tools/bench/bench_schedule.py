"""What a step of the scheduler costs on the host, by how many requests wait.

    python -m tools.bench.bench_schedule

Plans of a manager without models; eight branches run, so nobody can start. Microseconds of
processor time, the median of many.
"""

import argparse
from statistics import median
from time import process_time_ns

from specsot.ops.kv.pool import KVCache
from specsot.states.graph.drafters import DRAFTERS
from specsot.states.graph.graph import LAYOUTS, SchedulerBlock
from specsot.states.manager import BranchStateManager
from specsot.states.policies import POLICIES
from specsot.states.request import Request, Stage
from specsot.states.request_table import RunLimits
from specsot.states.scheduler import Inbox
from specsot.states.text.tokens import PromptTokens

RUNNING = 8


def manager(policy: str) -> BranchStateManager:
    layout = LAYOUTS["bim"](kind="bim", kv_slots=4096, max_num_branches=RUNNING)  # type: ignore[call-arg]
    limits = RunLimits(
        layout,  # type: ignore[arg-type]
        DRAFTERS["none"](kind="none"),  # type: ignore[arg-type]
        True,
        10_000,
        100,
        None,
        SchedulerBlock(policy=policy),
    )
    return BranchStateManager(KVCache(1, 1, 2, 4096), None, limits, lambda branch: branch.prompt)


def request(number: int) -> Request:
    tail = PromptTokens(tuple(range(8 + number * 7 % 50)))
    return Request(str(number), 0, "?", PromptTokens(), tail, frozenset({2}), 10, 0)


def cost(policy: str, waiting: int, steps: int) -> tuple[float, float]:
    """Microseconds of a step, and of taking one request in."""
    made, inbox = manager(policy), Inbox()
    for number in range(RUNNING):
        one = request(number)
        made.submit(one)
        made.table.begin(one)
        branch = made.table.new_branch(one, 0, 10)
        one.branches, one.stage = [branch], Stage.RUNNING
        branch.prompt, branch.stage, branch.tokens = one.tail, Stage.RUNNING, [1]
        made.table.active.append(branch)
    for number in range(RUNNING, RUNNING + waiting):
        made.submit(request(number))
    began = process_time_ns()
    made.plan_(inbox)
    taken = (process_time_ns() - began) / 1e3 / max(waiting, 1)
    times = []
    for _ in range(steps):
        began = process_time_ns()
        made.plan_(inbox)
        times.append((process_time_ns() - began) / 1e3)
    return median(times), taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10, 1000, 100_000])
    args = parser.parse_args()
    for policy in POLICIES:
        for waiting in args.waiting:
            step, taken = cost(policy, waiting, args.steps)
            print(
                f"{policy:14} {waiting:7} wait: {step:6.1f} us a step, {taken:5.1f} us a newcomer"
            )


if __name__ == "__main__":
    main()
