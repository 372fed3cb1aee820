"""Kinds of drafters that installed packages add."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_graph import OPS, Write, changed, install, problems

from specsot.engine.models import with_drafter
from specsot.engine.prepare.files import open_graph
from specsot.engine.view.diagram import describe_graph
from specsot.models.files import ModelError
from specsot.ops.registry import RegistryError
from specsot.states.graph.graph import Graph, json_schema
from specsot.states.graph.plugins import DRAFTERS, drafter_class
from specsot.states.yaml.source import GraphError

DRAFTER = """\
from typing import Literal
from specsot.states.drafter import Drafter
from specsot.states.graph.drafter_settings import DrafterSettings
from specsot.states.yaml.spec import Int

class ParrotSettings(DrafterSettings):
    kind: Literal["parrot"]
    has_model = True
    num_draft_tokens: Int = 4

class Parrot(Drafter):
    Settings = ParrotSettings

    @classmethod
    def load(cls, *args):
        from {module} import load
        return load(*args)

class Nameless(Drafter):
    Settings = DrafterSettings

NUMBER = 1
"""


@pytest.fixture
def parrot(write: Write) -> Path:
    """A drafter `parrot`, installed."""
    block = DRAFTER.format(module="own.model")
    folder = write({"own/block": block, "own/model": "load = print", "own/ops": OPS})
    install(folder, "specsot.drafters", "own.block:Parrot")
    return folder


def test_a_kind_of_an_installed_package(parrot: Path) -> None:
    program = open_graph("eagle", ["drafter.kind=parrot", "drafter.num_draft_tokens=7"])
    drafter = program.graph.drafter
    assert type(drafter).__name__ == "ParrotSettings" and drafter.has_model
    assert drafter.offered == 7
    assert program.graph.model_dump()["drafter"] == {"kind": "parrot", "num_draft_tokens": 7}
    again = Graph.model_validate(program.graph.model_dump(by_alias=True, exclude_none=True))
    assert again == program.graph
    assert "kind=parrot" in describe_graph(program)
    assert "own.model" not in sys.modules


def test_its_module_is_imported_only_for_its_kind(parrot: Path) -> None:
    open_graph("eagle")
    with pytest.raises(GraphError):
        open_graph("eagle", ["drafter.nods=1", "drafter.kind=ngram"])
    assert "own.block" not in sys.modules
    kinds = json_schema()["properties"]["drafter"]["discriminator"]["mapping"]
    assert set(kinds) == set(DRAFTERS)


def test_every_kind_has_its_settings() -> None:
    for kind, settings in DRAFTERS.items():
        assert settings.kind_name() == kind
        assert drafter_class(kind).Settings is settings
        assert settings.has_model == bool(drafter_class(kind).loader)


@dataclass
class Loaded:
    """What a loader needs of the models."""

    target: str = "target"
    dtype: str = "dtype"
    device: str = "device"
    drafter: Any = None


def test_its_loader_makes_the_model_of_a_run(parrot: Path, write: Write) -> None:
    write({"own/model": "def load(*args): return args"})
    models: Any = Loaded()
    made = with_drafter(models, Path("there"), "parrot").drafter
    assert made == (Path("there"), "target", "dtype", "device")
    with pytest.raises(ModelError, match="unknown drafter 'parot'"):
        with_drafter(models, Path("there"), "parot")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("", "cannot import name 'load' from 'own.model'"),
        ("import no_such_module", "No module named 'no_such_module'"),
    ],
)
def test_a_loader_that_is_not_there(model: str, message: str, parrot: Path, write: Write) -> None:
    write({"own/model": model})
    models: Any = Loaded()
    with pytest.raises(ModelError) as caught:
        with_drafter(models, Path("there"), "parrot")
    expected = f"there: the drafter 'parrot' has no loader: {message}"
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            "drafter.kind=parot",
            "no drafter 'parot'; did you mean 'parrot'?; there are: none,",
        ),
        ("drafter.kind=3", "must be one of: none, eagle3, eagle2, dflash, vanilla, ngram"),
        (
            "drafter.num_draft=3",
            "drafter.num_draft: unknown key 'num_draft'; did you mean 'num_draft_tokens'?",
        ),
        (
            "drafter.num_draft_tokens=x",
            "drafter.num_draft_tokens: must be an integer, not the string 'x'",
        ),
    ],
)
def test_mistakes_in_its_block(sets: str, message: str, parrot: Path) -> None:
    with pytest.raises(GraphError) as caught:
        open_graph("eagle", ["drafter.kind=parrot", sets])
    (problem,) = caught.value.problems
    assert message in str(problem) and problem.file == f"--set {sets}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("own.blok:Parrot", "ModuleNotFoundError: No module named 'own.blok'"),
        ("own.block:Parot", "AttributeError: module 'own.block' has no attribute 'Parot'"),
        ("own.ops:count", "RuntimeError: imported ({folder}/own/ops.py:1)"),
        ("own.block:NUMBER", "own.block:NUMBER is not a subclass of Drafter with Settings"),
        ("own.block", "own.block is not a subclass of Drafter with Settings"),
        ("own.block:Nameless", "the kind of own.block:Nameless is ''"),
        ("own.block:Parrot", "the kind of own.block:Parrot is 'parrot'"),
    ],
)
def test_a_drafter_that_cannot_be_used(value: str, message: str, write: Write) -> None:
    folder = write({"own/block": DRAFTER.format(module="own.model"), "own/ops": OPS})
    install(folder, "specsot.drafters", value, point="other")
    assert open_graph("eagle").graph.drafter.kind == "eagle3"
    text = changed(("kind: eagle3", "kind: other"))
    message = message.replace("{folder}", str(folder))
    assert problems(text) == [
        "g.yaml:4:17: drafter.kind: the drafter 'other': "
        f"entry point 'other' (specsot.drafters) of own 1.0: {message}"
    ]


def test_two_packages_with_one_kind(parrot: Path) -> None:
    install(parrot, "specsot.drafters", "own.block:Parrot", name="third")
    (problem,) = problems(changed(("kind: eagle3", "kind: parrot")))
    assert "more than one package has it: entry point 'parrot' (specsot.drafters) of" in problem
    with pytest.raises(RegistryError):
        drafter_class("parrot")


def test_what_specsot_has_itself_is_never_replaced(parrot: Path) -> None:
    install(parrot, "specsot.drafters", "own.block:Parrot", point="eagle3", name="third")
    assert drafter_class("eagle3").Settings is DRAFTERS["eagle3"]
    assert type(open_graph("eagle").graph.drafter) is DRAFTERS["eagle3"]
