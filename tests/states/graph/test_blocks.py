"""The blocks `beam` and `blend` and `skeleton.merge`: values, their places, the ids of a fold."""

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.toy_graph import refused

from specsot.engine.prepare.files import graph_names, open_graph
from specsot.engine.prepare.job import embedded_folder
from specsot.engine.prepare.repeat import graph_yaml
from specsot.engine.view.diagram import describe_graph
from specsot.ops.layer_plan import BlendSettings
from specsot.states.fold import FoldState
from specsot.states.graph.graph import Graph
from specsot.states.graph.load import load_program, op_table
from specsot.states.request import Branch, Finish, Request
from specsot.states.text.outline import parse_outline
from specsot.states.text.prompts import PromptBook, load_template
from specsot.states.text.tokens import PromptTokens
from specsot.states.yaml.source import GraphError, Source
from tools.embedded.documents import combined_facts_sample
from tools.embedded.pieces import END, Pieces


def problems_of(graph: str, *sets: str) -> list[str]:
    return refused(open_graph, graph, sets)


FILE = "g.yaml"
BEAM = graph_yaml(open_graph("beam").graph)


def changed(old: str, new: str) -> list[str]:
    assert BEAM.count(old) == 1
    return refused(load_program, Source(BEAM.replace(old, new), FILE), op_table())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("beam.num_beams=0", "must be at least 1, not 0"),
        ("beam.num_beams=257", "must be at most 256, not 257"),
        ("beam.num_beams=true", "must be an integer, not true"),
        ("beam.num_beams=2.5", "must be an integer, not the number 2.5"),
        ("beam.length_penalty=6", "must be at most 5.0, not 6"),
        ("beam.length_penalty=-6", "must be at least -5.0, not -6"),
        ("beam.length_penalty=.nan", "must be "),
        ("beam.length_penalty=x", "must be a number, not the string 'x'"),
        ("beam.early_stopping=1", "must be true, false or never"),
        ("beam.early_stopping=always", "must be true, false or never"),
        ("beam.early_stopping=null", "must not be null"),
        ("beam.num_beam=3", "unknown key 'num_beam'; did you mean 'num_beams'?"),
        ("blend.plan=full", "must be "),
        ("blend.check_layers=[]", "must not be empty"),
        ("blend.check_layers=[0]", "must be at least 1, not 0"),
        ("blend.check_layers=[1.5]", "must be an integer, not the number 1.5"),
        ("blend.check_layers=[true]", "must be an integer, not true"),
        ("blend.check_layers=1", "must be a list"),
        ("blend.ratios=[1.1]", "must be at most 1"),
        ("blend.ratios=[-0.1]", "must be at least 0"),
        ("blend.ratios=[.nan]", "must be "),
        ("blend.ratios=[true]", "must be a number, not true"),
        ("blend.ratios=[0.2, 0.1]", "one share per check layer: 2 for 1"),
        ("blend.metric=q", "must be "),
        ("blend.check_update=none", "must be "),
        ("blend.mask=causal", "must be "),
        ("blend.budget=all", "must be "),
        ("blend.min_tokens=-1", "must be at least 0, not -1"),
        ("blend.on_miss=fail", "must be "),
        ("blend.collect=1", "must be true or false"),
        ("blend.chunk_tokens=0", "must be at least 1, not 0"),
        ("blend.ratio=0.2", "unknown key 'ratio'; did you mean 'ratios'?"),
        ("blend.mask=bottom_right", "bottom_right is for one sequence"),
    ],
)
def test_settings_that_cannot_be(setting: str, message: str) -> None:
    block = setting.partition(".")[0]
    (problem,) = problems_of("blend_eagle" if block == "blend" else block, setting)
    path = setting.partition("=")[0]
    assert problem.startswith(f"--set {setting}: {path}: {message}")


@pytest.mark.parametrize("value", ["true", "false", "never"])
@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_settings_reach_the_op(value: str, layout: str) -> None:
    program = open_graph("beam", (f"beam.early_stopping={value}", f"layout.kind={layout}"))
    (step,) = [s for s in program.steps["select_beams"] if s.entry.name == "beam.select"]
    early = {"true": True, "false": False}.get(value, value)
    assert step.settings == {"num_beams": 4, "length_penalty": 1.0, "early_stopping": early}


def test_a_search_neither_drafts_nor_draws() -> None:
    problem = changed("drafter: {kind: none}", "drafter: {kind: ngram}")[0]
    assert problem == (
        f"{FILE}:5:17: drafter.kind: beam search takes no drafter: the kind must be none, not ngram"
    )
    for setting in ("temperature=0.7", "top_k=5", "repetition_penalty=1.2"):
        name = setting.partition("=")[0]
        (problem,) = problems_of("beam", f"sampling.{setting}")
        place = f"--set sampling.{setting}: sampling.{name}"
        assert problem.startswith(f"{place}: beam search draws no tokens: {name} must be ")


def test_the_rows_of_all_beams_must_fit() -> None:
    assert problems_of("beam", "limits.max_new_tokens=1024") == [
        "graphs/beam.yaml:10:14: beam.num_beams: 1 prompt token + 4 beams with 1024 tokens + 1 = "
        "4098 slots, but layout.kv_slots is 4096"
    ]
    assert open_graph("beam", ("limits.max_new_tokens=1024", "layout.kv_slots=4098"))


def test_what_commits_single_tokens_has_no_place_in_a_search() -> None:
    problem = changed("[beam.gather,", "[branch.root, branch.start_, beam.gather,")[0]
    assert problem.endswith(
        "states.select_beams.ops.1: 'branch.start_' cannot be part of a beam search: "
        "it commits single tokens"
    )


def test_a_search_needs_its_block_and_the_block_a_search() -> None:
    start, end = BEAM.index("\nbeam:") + 1, BEAM.index("\nsampling:")
    with pytest.raises(GraphError, match="needs the block 'beam' in this graph"):
        load_program(Source(BEAM[:start] + BEAM[end:], FILE), op_table())
    problems = problems_of("autoregressive", "beam.num_beams=3")
    assert any("beam: no state runs an op that reads this block: beam." in p for p in problems)


def test_graphs_without_the_block_are_as_before() -> None:
    plain: dict[str, Any] = open_graph("autoregressive").graph.model_dump(by_alias=True)
    assert "beam" not in plain and "skeleton" in plain
    beam = open_graph("beam").graph
    assert beam.model_dump(by_alias=True)["beam"]["num_beams"] == 4
    assert Graph.model_validate(beam.model_dump(by_alias=True, exclude_none=True)) == beam


@pytest.mark.parametrize(
    ("layers", "ratios", "place", "message"),
    [
        ("[2, 2]", "[0.2, 0.2]", "3:21: blend.check_layers.1", "2 follows 2"),
        ("[3, 1]", "[0.2, 0.2]", "3:21: blend.check_layers.1", "1 follows 3"),
        ("[1, 2]", "[0.2, 0.3]", "4:17: blend.ratios.1", "shares must not grow, but 0.3"),
        ("[1, 2]", "[0.2]", "4:11: blend.ratios", "one share per check layer: 1 for 2"),
    ],
)
def test_check_layers_and_shares_go_together(
    layers: str, ratios: str, place: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: eagle\nblend:\n  check_layers: {layers}\n  ratios: {ratios}\n")
    (problem,) = problems_of(str(file))
    assert problem.startswith(f"{file}:{place}: ") and message in problem


def test_bottom_right_is_for_one_sequence() -> None:
    wanted = ("blend.mask=bottom_right", "layout.max_num_branches=1")
    assert open_graph("blend_eagle", wanted)
    for more in ("layout.max_num_branches=2", "layout.kind=batching"):
        (problem,) = problems_of("blend_eagle", *wanted, more)
        assert "blend.mask: bottom_right is for one sequence" in problem
    (problem,) = problems_of("bim_blend_eagle", *wanted)
    assert "and no skeleton" in problem


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("skeleton.max_branches=3", "a graph with the block `beam` has no skeleton"),
        ("blend.plan=blend", "a graph has one of the blocks `beam`, `blend`"),
    ],
)
def test_a_search_has_no_other_block(setting: str, message: str) -> None:
    assert any(message in problem for problem in problems_of("beam", setting))


def test_branches_must_be_able_to_search() -> None:
    (problem,) = problems_of("bim_blend_eagle", "skeleton.tools=[Calculator]")
    assert problem.startswith(
        "graphs/bim_blend_eagle.yaml:11:14: skeleton.documents: branches search"
    )
    sets = ("skeleton.tools=[Calculator]", "skeleton.documents=prefix")
    assert open_graph("bim_blend_eagle", sets)


def test_the_settings_are_those_of_the_ops() -> None:
    blend = open_graph("eagle", ("blend={}",)).graph.blend
    assert blend is not None and blend.settings == BlendSettings(plan="blend")
    names = BlendSettings.__slots__
    assert names == tuple(type(blend).model_fields)[: len(names)]


def test_a_graph_without_the_block_says_nothing_of_it() -> None:
    for name in graph_names():
        graph = open_graph(name).graph
        assert ("blend" in graph.model_dump()) == ("blend" in name)


@pytest.mark.parametrize("name", ["blend_eagle", "bim_blend_eagle"])
def test_the_graph_without_the_block_differs_in_nothing_else(name: str) -> None:
    names = (name.replace("blend_", ""), name)
    one, other = (open_graph(n).graph.model_dump(exclude={"name", "doc"}) for n in names)
    assert set(other) - set(one) == {"blend"} and not set(one) - set(other)
    assert {key for key in one if one[key] != other[key]} <= {"skeleton"}
    if one["skeleton"] is not None:
        assert other["skeleton"] == one["skeleton"] | {"documents": "branches", "search_top_k": 2}


def test_the_resolved_graph_shows_what_each_layer_does() -> None:
    program = open_graph("blend_eagle", ("blend.check_layers=[1, 3]", "blend.ratios=[0.3, 0.2]"))
    lines = describe_graph(program, layers=5).split("\n")
    (at,) = [i for i, line in enumerate(lines) if line.startswith("layer plans")]
    statuses = ["FULL", "CHECK", "AFTER_CHECK", "CHECK", "AFTER_CHECK"]
    assert lines[at + 3].split() == ["blend", *statuses]
    short = describe_graph(program, layers=3)
    assert "`check_layers` holds 3, but the model's layers are 0 to 2" in short


@pytest.mark.parametrize("merge", ["plain", "blend", "attend"])
def test_parts_must_be_folded_somewhere(merge: str) -> None:
    place = f"--set skeleton.merge={merge}: skeleton.merge: "
    expected = [f"{place}{merge}, but no state runs the op 'branch.fold_' that folds the parts"]
    if merge == "blend":
        expected.append(
            f"{place}blend needs the block `blend`, which says which rows are recomputed"
        )
    assert problems_of("bim_eagle", f"skeleton.merge={merge}") == expected
    assert open_graph("bim_eagle", ("skeleton.merge=concat",))
    (problem,) = problems_of("bim_blend_merge", "skeleton.merge=reuse")
    assert "skeleton.merge: must be " in problem and "'concat'" in problem


@pytest.mark.parametrize("merge", ["concat", "plain", "blend", "attend"])
@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_every_way_is_one_word_of_the_graph_that_combines(merge: str, layout: str) -> None:
    program = open_graph("bim_blend_merge", (f"skeleton.merge={merge}", f"layout.kind={layout}"))
    assert [s.entry.name for s in program.steps["merge"]][-1] == "answer.merge"


def test_what_asks_for_one_answer_has_no_slots(tmp_path) -> None:  # type: ignore[no-untyped-def]
    data = load_template("embedded").model_dump(exclude_none=True) | {"combine": "All of {title}."}
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(GraphError, match=r"combine: no slot \{title\} here"):
        load_template(path)


# -- the ids that the embedded model was trained on -----------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_folder("target"))


def ids_of(tokenizer, pieces: Pieces) -> list[int]:  # type: ignore[no-untyped-def]
    """As training encodes them: piece by piece."""
    return [i for p in pieces for i in tokenizer.encode(p.text, add_special_tokens=False)]


@pytest.mark.parametrize("seed", range(4))
def test_a_fold_is_laid_out_as_the_embedded_model_learned_it(tokenizer, seed: int) -> None:  # type: ignore[no-untyped-def]
    """From the end of the outline on: the ids of `combined_facts_sample`, to the last one."""
    trunk = combined_facts_sample(random.Random(seed)).trunk[:-2]  # without the answer
    at = next(i for i, p in enumerate(trunk) if p.text.startswith("PLAN"))
    outline = parse_outline(trunk[at].text, max_branches=8, tools=("Search",))
    ends = [i for i, p in enumerate(trunk) if p.text == END and i > at + 1]
    texts = [tokenizer.encode(trunk[i - 1].text, add_special_tokens=False) for i in ends]
    book = PromptBook(tokenizer, load_template("embedded"))
    request = Request(
        "0", 0, "?", PromptTokens(), PromptTokens(), frozenset(), 9, 9, outline=outline
    )
    for number, (point, text) in enumerate(zip(outline.points, texts, strict=True)):
        branch = Branch(request, number, number, 9, point, tokens=text, finish=Finish.STOP)
        request.branches.append(branch)
    written = FoldState(book).prompt(request)
    assert written is not None and len(texts) > 1
    hoist, _ = book.branch(outline.points[0], outline, ())
    assert [*hoist, *written.ids] == ids_of(tokenizer, trunk[at + 1 :])
