"""The lives of requests and branches: the table is what the code does, and nothing else."""

import ast
from pathlib import Path
from typing import Any

import pytest
from helpers.managers import manager, request
from transitions import MachineError

from specsot.states.request import (
    ENDED_STAGES,
    ENDING_OF,
    LIFECYCLES,
    LIVE_STAGES,
    Finish,
    Stage,
    move,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", LIFECYCLES)
def test_every_stage_is_reached_and_every_life_ends(kind: str) -> None:
    ways = LIFECYCLES[kind]
    reached = {Stage.WAITING}
    for _ in Stage:
        reached |= {way.target for way in ways if reached & {*way.sources}}
    assert reached == {stage for way in ways for stage in (*way.sources, way.target)}
    assert {way.name for way in ways} >= set(ENDING_OF.values())
    for stage in reached & {*LIVE_STAGES}:
        assert any(stage in way.sources and way.target in ENDED_STAGES for way in ways)
    for way in ways:
        left = {*way.sources} & {*ENDED_STAGES}
        assert not left or (way.name, left) == ("fail", {Stage.DONE})


def test_a_way_that_is_none_is_a_fault_of_ours() -> None:
    made, one = manager(), request()
    made.lifecycle.submit(one)
    with pytest.raises(MachineError, match="merge"):
        branch = made.table.new_branch(one, 0, 3)
        branch.end(Finish.STOP)
        move(one, "run")
        move(one, "finish")
        move(one, "merge")
    with pytest.raises(MachineError):
        branch.end(Finish.STOP)


@pytest.mark.parametrize(
    ("finish", "stage"),
    [
        (Finish.STOP, Stage.DONE),
        (Finish.LENGTH, Stage.DONE),
        (Finish.REFUSED, Stage.REFUSED),
        (Finish.CANCELLED, Stage.CANCELLED),
        (Finish.TIMEOUT, Stage.CANCELLED),
        (Finish.FAILED, Stage.FAILED),
    ],
)
def test_how_a_branch_and_its_request_end(finish: Finish, stage: Stage) -> None:
    made, one = manager(), request()
    made.lifecycle.submit(one)
    branch = made.table.new_branch(one, 0, 3)
    branch.end(finish)
    assert branch.ended and branch.stage is stage
    one.finish = finish
    if stage is Stage.DONE:
        move(one, "run")
    made.table.close(one)
    assert one.finished and one.stage is stage


def test_nothing_else_sets_a_stage() -> None:
    for path in [*ROOT.glob("states/**/*.py"), *ROOT.glob("engine/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets: list[Any] = node.targets if isinstance(node, ast.Assign) else []
            names = [n for target in targets for n in ast.walk(target)]
            wrong = [n for n in names if isinstance(n, ast.Attribute) and n.attr == "stage"]
            assert not wrong, f"{path}:{node.lineno}"  # type: ignore[attr-defined]
