"""The table that is read from source text is the truth about the functions."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest
from helpers.toy_graph import toy_table

from specsot.ops.registry import NOTE, OpEntry, RegistryError, read_table
from specsot.states.graph.graph import RUN_KEYS, VOCABULARY
from specsot.states.graph.load import rooms

TABLE = read_table(rooms())
ENTRIES = [*TABLE.ops.values(), *TABLE.guards.values()]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e.module}.{e.function}")
def test_the_table_says_what_the_function_is(entry: OpEntry) -> None:
    function = entry.load()
    assert inspect.isfunction(function) and vars(function)[NOTE] == entry.declared
    parameters = inspect.signature(function).parameters.values()
    reads = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    settings = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert tuple(p.name for p in reads) == entry.reads
    assert [(p.name, p.default is p.empty) for p in settings] == [
        (s.name, s.required) for s in entry.settings
    ]
    one = entry.declared
    assert {key.name for key in VOCABULARY} >= {*entry.reads, *one.writes, *one.drops}
    assert RUN_KEYS.isdisjoint((*one.writes, *one.drops)), "keys of the run are never replaced"
    assert entry.doc, "an op says in one line what it does"
    if one.commits and entry.name not in ("answer.merge", "schedule.wait"):
        assert entry.name.endswith("_"), "committing changes the branches in place"


def test_nothing_declared_is_missing_from_the_table() -> None:
    assert len({key.name for key in VOCABULARY}) == len(VOCABULARY)
    found = set()
    for package, place in rooms():  # a package, or one module
        for path in place.rglob("*.py") if place.is_dir() else [place]:
            inside = path.relative_to(place).with_suffix("").parts if place.is_dir() else ()
            module = importlib.import_module(".".join((package, *inside)))
            members = [m for m in vars(module).values() if inspect.isfunction(m)]
            found |= {(m.__module__, m.__name__) for m in members if NOTE in vars(m)}
    assert found == {(e.module, e.function) for e in ENTRIES}


def test_the_table_imports_nothing() -> None:
    sys.modules.pop("helpers.toy_ops", None)
    entry = toy_table().ops["toy.draft"]
    assert "helpers.toy_ops" not in sys.modules
    assert entry.load().__name__ == "draft"
    assert "helpers.toy_ops" in sys.modules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('@op("a")\ndef f(*x): ...', "without "),
        ('@op("a")\ndef f(**x): ...', "without "),
        ('@op("a")\ndef f(x=1): ...', "default"),
        ('class A:\n    @op("a")\n    def f(self): ...', "top level"),
        ('@op(NAME)\ndef f(x): ...\n"@op("', "malformed"),
        ('@op("a", reads="x")\ndef f(x): ...', "unexpected keyword"),
        ('@op("a", **{})\ndef f(x): ...', "unexpected keyword"),
        ('@guard("g")\ndef f(x, *, y): ...', "no settings"),
        ('@op("a")\ndef f(x): ...\n@op("a")\ndef g(x): ...', "declared twice"),
        ('@op("a", drafters="none")\ndef f(x): ...', "unexpected keyword"),
        ('@guard("g")\ndef f(x): ...\n@guard("g")\ndef h(x): ...', "declared twice"),
        ('@op("a")\ndef f(x): ...\n  x', "m.py:3: unexpected indent"),
    ],
)
def test_a_wrong_declaration_is_told(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(text)
    with pytest.raises(RegistryError, match=message) as caught:
        read_table([("p", tmp_path)])
    assert "twice" in message or f"{tmp_path}/m.py:" in str(caught.value)
