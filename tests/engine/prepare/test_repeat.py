"""run.yaml by itself: any text survives it, and it is not mistaken for a graph."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.engine.prepare.files import is_run_file, open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.prepare.job import read_config
from specsot.engine.prepare.options import RunOptions
from specsot.engine.prepare.repeat import (
    Provenance,
    differences,
    graph_hash,
    graph_source,
    prompts_of,
    read_run,
    run_document,
    to_yaml,
)
from specsot.states.graph.load import load_program, op_table
from specsot.states.text.outline import Outline, parse_outline, render_outline
from specsot.states.yaml.source import Source

TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1)
PROGRAM = open_graph("bim_eagle")
OPTIONS, _ = read_config(Path("nowhere"), RunOptions())


def written(prompts: tuple[Prompt, ...], outline: Outline | None = None) -> Source:
    document = run_document(OPTIONS, PROGRAM.graph, prompts, outline)
    return Source(to_yaml(document), "run.yaml")


@settings(deadline=None, max_examples=60)
@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(0, 2**63 - 1))
def test_any_prompt_survives(texts: list[str], seed: int) -> None:
    prompts = tuple(Prompt(str(i), text, seed, None) for i, text in enumerate(texts))
    source = written(prompts)
    assert prompts_of(read_run(source), source) == prompts


def test_texts_that_yaml_likes_to_misread() -> None:
    for text in ("1e-3", "0o14", "012", "on", "null", "~", "- x", "a: b", "#c", "|\n x\n", "\x85"):
        source = written((Prompt("1", text),))
        assert prompts_of(read_run(source), source)[0].text == text


def test_the_graph_survives_and_keeps_its_positions() -> None:
    source = written((Prompt("1", "?"),))
    assert is_run_file(source)
    inner = graph_source(source)
    program = load_program(inner, op_table())
    assert graph_hash(program.graph) == graph_hash(PROGRAM.graph)
    line = int(program.steps["verify"][0].at.split(":")[1])
    text = to_yaml(run_document(OPTIONS, PROGRAM.graph, (Prompt("1", "?"),), None))
    assert "branch.tree_" in text.split("\n")[line - 1]


def test_a_run_holds_the_whole_graph_and_needs_no_base(tmp_path: Path) -> None:
    base, own = tmp_path / "base.yaml", tmp_path / "own.yaml"
    base.write_text("extends: bim_eagle\nlimits: {max_new_tokens: 9}\n")
    own.write_text("extends: base.yaml\nattention: dense\n")
    graph = open_graph(str(own)).graph
    text = to_yaml(run_document(OPTIONS, graph, (Prompt("1", "?"),), None))
    base.unlink()
    own.unlink()
    again = load_program(graph_source(Source(text, "run.yaml")), op_table()).graph
    assert again == graph and graph_hash(again) == graph_hash(graph)
    assert (again.limits.max_new_tokens, again.attention) == (9, "dense")


def test_the_outline_survives() -> None:
    outline = parse_outline('PLAN\n1|60|-|-|A: "b" #c\n2|70|Search|1|é\nEND', max_branches=8)
    run = read_run(written((Prompt("1", "?"),), outline))
    assert run.outline == render_outline(outline.points) + "\n"


def test_a_graph_is_no_run() -> None:
    assert not is_run_file(PROGRAM.source)
    assert not is_run_file(Source("[]", "x.yaml"))


def test_differences_are_named() -> None:
    then = Provenance(model_hash="a" * 64, versions={"torch": "2.0"}, dtype="float32", threads=2)
    now = Provenance(model_hash="b" * 64, versions={"torch": "2.1"}, dtype="float64", threads=2)
    assert list(differences(then, then)) == []
    assert list(differences(then, now)) == [
        "model weights changed: aaaaaaaaaaaa... then, bbbbbbbbbbbb... now",
        "dtype changed: float32 then, float64 now",
        "version of torch changed: 2.0 then, 2.1 now",
    ]
