"""Functions that a graph names as `package.module:function`, and ops of installed packages."""

import sys
from typing import Any

import pytest
from helpers.toy_graph import OPS, Write, changed, install, load, problems, toy_table

from specsot.engine.prepare.files import open_graph
from specsot.engine.view.diagram import describe_graph, describe_words, mermaid
from specsot.ops.registry import RegistryError
from specsot.states.graph.load import op_table
from specsot.states.graph.plugins import module_file, named_function, with_installed
from specsot.states.machine import Run
from specsot.states.yaml.source import GraphError

# -- where a module is ---------------------------------------------------------------------------


def test_the_source_of_a_module_is_found_without_importing_it(write: Write) -> None:
    boom = "raise RuntimeError('imported')"
    names = ("own_a", "own_b/__init__", "own_b/c/__init__", "own_b/c/d", "own_ns/inner/leaf")
    folder = write(dict.fromkeys(names, boom))
    places = {
        "own_a": "own_a.py",
        "own_b": "own_b/__init__.py",
        "own_b.c": "own_b/c/__init__.py",
        "own_b.c.d": "own_b/c/d.py",
        "own_ns.inner.leaf": "own_ns/inner/leaf.py",
    }
    for module, place in places.items():
        assert module_file(module) == folder / place
        assert module not in sys.modules


@pytest.mark.parametrize(
    "module",
    ["", ".", "own_a.", "no_such", "own_a.b", "../own_a", "a b", "sys", "own_a./etc/x", "__main__"],
)
def test_a_module_that_has_no_source(
    module: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write({"own_a": ""})
    monkeypatch.setattr("__main__.__spec__", None)  # `python -m pytest` has one
    with pytest.raises(RegistryError, match="no source of a module"):
        module_file(module)


def test_a_module_that_another_finder_knows(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Editable installations put such finders on sys.meta_path."""
    from importlib.util import spec_from_file_location

    folder = write({"elsewhere/own_x/__init__": "", "elsewhere/own_x/ops": ""})

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            file = folder / "elsewhere" / "own_x" / "__init__.py"
            return spec_from_file_location(name, file) if name == "own_x" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert module_file("own_x.ops") == folder / "elsewhere" / "own_x" / "ops.py"


# -- functions that a graph names ----------------------------------------------------------------


def test_a_graph_names_an_op_and_a_guard(write: Write) -> None:
    write({"own/ops": OPS})
    op = "{op: own.ops:count, with: {factor: 3}}"
    text = changed(("[toy.draft]", f"[toy.draft, {op}]"), ("toy_done", "own.ops:enough"))
    program = load(text)
    step = program.steps["draft"][1]
    assert (step.entry.name, step.settings, step.at) == ("own.count", {"factor": 3}, "g.yaml:8")
    assert (step.entry.module, step.entry.function) == ("own.ops", "count")
    assert program.guards["own.ops:enough"].reads == ("counter",)
    assert "own.ops" not in sys.modules
    assert "own.ops.count(factor=3)" in describe_graph(program)
    assert "verify --> done: own.ops.enough" in mermaid(program.graph)  # no second colon


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.opz:count", "no source of a module 'own.opz': is its package installed?"),
        ("none.ops:count", "no source of a module 'none.ops': is its package installed?"),
        (":count", "no source of a module '': is its package installed?"),
        ("own.ops:cuont", "no function 'cuont' in FOLDER/own/ops.py; did you mean 'count'?"),
        ("own.ops:", "no function '' in FOLDER/own/ops.py"),
        ("own.ops:plain", "own.ops.plain is not declared with @op(...)"),
        ("own.ops:enough", "own.ops.enough is not declared with @op(...)"),
        ("own.broken:count", "FOLDER/own/broken.py:2: '(' was never closed"),
        ("own.odd:count", "FOLDER/own/odd.py: source code string cannot contain null bytes"),
        ("own.wrong:count", "FOLDER/own/wrong.py:2: count: op() got an unexpected keyword"),
    ],
)
def test_an_op_that_is_not_there_is_one_problem(name: str, message: str, write: Write) -> None:
    texts = {
        "own/ops": OPS,
        "own/broken": "#\nf(\n",
        "own/odd": "\0@op(",
        "own/wrong": '@op("a", reads="b")\ndef count(): ...',
    }
    folder = write(texts)
    (problem,) = problems(changed(("[toy.draft]", f"[toy.draft, '{name}']")))
    expected = message.replace("FOLDER", str(folder))
    assert problem.startswith(f"g.yaml:8:28: states.draft.ops.1: {expected}")
    (problem,) = problems(changed(("[toy.draft]", f"[toy.draft, {{op: '{name}'}}]")))
    assert problem.startswith(f"g.yaml:8:33: states.draft.ops.1.op: {expected}")


def test_a_guard_that_is_not_there_is_one_problem(write: Write) -> None:
    write({"own/ops": OPS})
    assert problems(changed(("toy_done", "own.ops:count"))) == [
        "g.yaml:14:36: transitions.2.when: own.ops.count is not declared with @guard(...)"
    ]


def test_names_are_one_stage(write: Write) -> None:
    write({"own/ops": OPS})
    text = changed(("[toy.draft]", "[toy.drft, own.ops:cuont]"), ("toy_done", "own.ops:enouhg"))
    assert len(problems(text)) == 3


def test_what_a_named_op_needs_is_checked_as_for_all_others(write: Write) -> None:
    write({"own/ops": OPS})
    assert problems(changed(("[toy.open]", "[own.ops:count, toy.open]"))) == [
        "g.yaml:7:19: states.prefill.ops.0: 'own.count' reads 'rows', unset on some path here"
    ]
    (problem,) = problems(
        changed(("[toy.draft]", "[toy.draft, {op: own.ops:count, with: {fctor: 1}}]"))
    )
    assert "'own.ops:count' has no setting 'fctor'; did you mean 'factor'?" in problem


def test_an_op_that_needs_an_unknown_block(write: Write) -> None:
    write({"own/ops": '@op("own.a", needs="states blocks")\ndef f(): ...'})
    found = problems(changed(("[toy.draft]", "[toy.draft, own.ops:f]")))
    assert len(found) == 1 and "'own.ops:f' needs the block 'blocks' in this graph" in found[0]


def test_a_module_that_cannot_be_imported_ends_the_run_with_its_place(write: Write) -> None:
    write({"own/ops": OPS})
    program = load(changed(("[toy.draft]", "[toy.draft, own.ops:count]")))
    with pytest.raises(RuntimeError, match="imported") as caught:
        Run(program, {"counter": {"n": 0}}, lambda event: None)
    assert caught.value.__notes__ == ["g.yaml:8: in op 'own.count' of state 'draft'"]


def test_the_last_definition_of_a_name_is_meant(write: Write) -> None:
    write({"own/ops": '@op("a")\ndef f(x): ...\n@op("b")\ndef f(y): ...\n'})
    assert named_function("op", "own.ops:f").name == "b"


# -- ops of installed packages -------------------------------------------------------------------


def test_installed_ops_join_the_table(write: Write) -> None:
    folder = write({"own/__init__": '@op("own.top")\ndef f(x): ...', "own/inner/ops": OPS})
    install(folder, "specsot.ops", "own")
    table = with_installed(toy_table())
    assert table.faults == () and table.guards["own_enough"].module == "own.inner.ops"
    assert table.ops["own.top"].module == "own"
    assert "own" not in sys.modules
    program = load(changed(("[toy.draft]", "[toy.draft, own.count]")), table=table)
    assert program.steps["draft"][1].entry.function == "count"
    assert "own.count" in op_table().ops


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("own.opz", "no source of a module 'own.opz': is its package installed?"),
        ("own.ops:count", "no source of a module 'own.ops:count': is its package installed?"),
        ("own.broken", "FOLDER/own/broken.py:2: unmatched ']'"),
        ("own.same", "op 'mask.build' is declared twice: specsot.ops.forward"),
        (
            "own.when",
            "guard 'parts_finished' is declared twice: specsot.states.phases.schedule.par",
        ),
    ],
)
def test_a_package_with_faults_adds_nothing_and_is_named_when_it_is_missed(
    value: str, message: str, write: Write
) -> None:
    texts = {
        "own/ops": OPS,
        "own/broken": '@op("own.a")\n]',
        "own/same": '@op("own.a")\ndef f(x): ...\n@op("mask.build")\ndef g(x): ...',
        "own/when": '@op("own.a")\ndef f(x): ...\n@guard("parts_finished")\ndef g(x): ...',
    }
    folder = write(texts)
    install(folder, "specsot.ops", value)
    install(folder, "specsot.ops", "own.ops", name="other")
    table = op_table()
    assert "own.count" in table.ops and "own.a" not in table.ops
    (fault,) = table.faults
    place = "entry point 'parrot' (specsot.ops) of own 1.0: "
    assert fault.startswith(place + message.replace("FOLDER", str(folder)))
    assert fault in describe_words(table)
    assert open_graph("bim_eagle", table=table)
    with pytest.raises(GraphError) as caught:
        open_graph("eagle", ["states.grow_tree.ops.0=own.a"], table)
    (problem,) = caught.value.problems
    assert problem.message.startswith("no op 'own.a'") and problem.message.endswith(f"; {fault}")


def test_a_plugin_cannot_make_a_shipped_graph_want_its_op(write: Write) -> None:
    folder = write({"own_ops": '@op("own.a", needs="layout states nothing")\ndef f(x): ...'})
    install(folder, "specsot.ops", "own_ops")
    assert open_graph("eagle").graph.name == "eagle"
