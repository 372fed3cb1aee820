"""Calls have at most four positional arguments; a budget for those that have more."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("ops", "models", "states", "engine")
MAX_POSITIONAL = 4
LIBRARIES = ("torch", "np", "F")  # their functions have long signatures of their own

# Calls with more, by package; packages without any are not in the table. The numbers may only fall.
BUDGET = {
    "engine": 4,
    "engine/certify": 4,
    "engine/chunks": 2,
    "engine/cli": 7,
    "engine/prepare": 1,
    "engine/run": 4,
    "engine/simulate": 2,
    "engine/train": 1,
    "engine/view": 3,
    "models": 14,
    "models/drafters": 2,
    "models/load": 1,
    "ops": 6,
    "ops/attention": 8,
    "ops/draft": 8,
    "ops/sampling": 1,
    "ops/verify": 4,
    "states": 19,
    "states/drafters": 6,
    "states/graph": 3,
    "states/phases": 2,
    "states/text": 6,
}


def root_name(function: ast.expr) -> str | None:
    """`torch` of `torch.nn.functional.pad`; None if a call is what the attribute belongs to."""
    while isinstance(function, ast.Attribute):
        function = function.value
    return function.id if isinstance(function, ast.Name) else None


def long_calls(text: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or root_name(node.func) in LIBRARIES:
            continue
        if len(node.args) > MAX_POSITIONAL:
            yield node


PLACES = [
    (path.relative_to(ROOT), call.lineno)
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    for call in long_calls(path.read_text(encoding="utf-8"))
]
COUNTS = Counter(path.parent.as_posix() for path, _ in PLACES)


@pytest.mark.parametrize("package", sorted(BUDGET.keys() | COUNTS.keys()))
def test_calls_with_many_positional_arguments_become_fewer(package: str) -> None:
    calls = [f"{path}:{line}" for path, line in PLACES if path.parent.as_posix() == package]
    assert len(calls) <= BUDGET.get(package, 0), calls


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("f(1, 2, 3, 4)", 0),
        ("f(1, 2, 3, 4, 5)", 1),
        ("f(1, 2, 3, 4, e=5)", 0),
        ("a.b(f(1, 2, 3, 4, 5), 2, 3, 4, 5)", 2),
        ("torch.f(1, 2, 3, 4, 5)", 0),
        ("F.f(1, 2, 3, 4, 5)", 0),
        ("torch.cat(x).view(1, 2, 3, 4, 5)", 1),
    ],
)
def test_what_counts(text: str, count: int) -> None:
    assert len([*long_calls(text)]) == count
