"""Calls have at most four positional arguments."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("ops", "models", "states", "engine")
MAX_POSITIONAL = 4
LIBRARIES = ("torch", "np", "F", "ONEDNN")  # their functions have long signatures of their own
# functions of any number of like arguments
VARIADIC = {"view", "permute", "assemble", "column", "min", "takes"}


def root_name(function: ast.expr) -> str | None:
    """`torch` of `torch.nn.functional.pad`; None if a call is what the attribute belongs to."""
    while isinstance(function, ast.Attribute):
        function = function.value
    return function.id if isinstance(function, ast.Name) else None


def long_calls(text: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or root_name(node.func) in LIBRARIES:
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", None))
        if len(node.args) > MAX_POSITIONAL and name not in VARIADIC:
            yield node


def test_calls_have_at_most_four_positional_arguments() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    calls = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in paths
        for call in long_calls(path.read_text(encoding="utf-8"))
    ]
    assert len(paths) > 100 and calls == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("f(1, 2, 3, 4)", 0),
        ("f(1, 2, 3, 4, 5)", 1),
        ("f(1, 2, 3, 4, e=5)", 0),
        ("a.b(f(1, 2, 3, 4, 5), 2, 3, 4, 5)", 2),
        ("torch.f(1, 2, 3, 4, 5)", 0),
        ("F.f(1, 2, 3, 4, 5)", 0),
        ("torch.cat(x).f(1, 2, 3, 4, 5)", 1),
        ("x.view(1, 2, 3, 4, 5)", 0),
    ],
)
def test_what_counts(text: str, count: int) -> None:
    assert len([*long_calls(text)]) == count
