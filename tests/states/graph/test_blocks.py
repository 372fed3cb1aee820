"""The blocks `beam` and `blend` and `skeleton.merge`: values, their places, the ids of a fold."""

import random
from pathlib import Path

import pytest
from helpers.toy_graph import refused

from specsot.engine.prepare.files import graph_names, open_graph
from specsot.engine.prepare.job import embedded_folder
from specsot.engine.prepare.repeat import graph_yaml
from specsot.engine.view.diagram import describe_graph
from specsot.ops.layer_plan import BlendSettings
from specsot.states.blend import FoldState
from specsot.states.graph.graph import Graph
from specsot.states.graph.load import load_program, op_table
from specsot.states.request import Branch, Finish, Request
from specsot.states.text.outline import parse_outline
from specsot.states.text.prompts import PromptBook, load_template
from specsot.states.text.tokens import PromptTokens
from specsot.states.yaml.source import GraphError, Source
from tools.embedded.documents import combined_facts_sample
from tools.embedded.pieces import END, Pieces

# The setting of a block, and its problem there.
SETTINGS = [
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
    ("skeleton.merge=reuse", "must be 'concat', 'plain', 'blend' or 'attend', not 'reuse'"),
]


@pytest.mark.parametrize(("setting", "message"), SETTINGS)
def test_settings_that_cannot_be(setting: str, message: str) -> None:
    block, _, path = setting.partition("=")[0].partition(".")
    graph = {"beam": "beam", "blend": "blend_eagle", "skeleton": "bim_blend_merge"}[block]
    (problem,) = refused(open_graph, graph, [setting])
    assert problem.startswith(f"--set {setting}: {block}.{path}: {message}")


def drawn(setting: str) -> str:
    name = setting.removeprefix("sampling.").partition("=")[0]
    return f"--set {setting}: sampling.{name}: beam search draws no tokens: {name} must be "


BOTTOM_RIGHT = ("blend.mask=bottom_right", "layout.max_num_branches=1")
NO_SEQUENCE = "--set blend.mask=bottom_right: blend.mask: bottom_right is for one sequence: layout"
NO_FOLD = "but no state runs the op 'branch.fold_' that folds the parts"
LAYERS = "blend={{check_layers: {}, ratios: {}}}"
# By what is wrong: the graph, its changes, and the beginnings of their problems.
TOGETHER = {
    "a search drafts nothing": ("beam", ("drafter.kind=ngram",), [
        "--set drafter.kind=ngram: drafter: beam search takes no drafter: the kind must be none, "
        "not ngram"]),
    "it draws nothing": ("beam", (temperature := "sampling.temperature=0.7",),
                         [drawn(temperature)]),
    "nor filters": ("beam", (top_k := "sampling.top_k=5",), [drawn(top_k)]),
    "nor penalises": ("beam", (penalty := "sampling.repetition_penalty=1.2",), [drawn(penalty)]),
    "the rows of all beams must fit": ("beam", ("limits.max_new_tokens=1024",), [
        "graphs/beam.yaml:10:14: beam.num_beams: 1 prompt token + 4 beams with 1024 tokens + 1 = "
        "4098 slots, but layout.kv_slots is 4096"]),
    "what commits single tokens is no part of a search": (
        "beam", ("states.select_beams.ops.0=branch.start_",), [
            "--set states.select_beams.ops.0=branch.start_: states.select_beams.ops.0: "
            "'branch.start_' cannot be part of a beam search: it commits single tokens"]),
    "only a search needs beams": ("autoregressive", ("beam.num_beams=3",), [
        "--set beam.num_beams=3: beam: no state runs an op that reads this block: beam.",
        *["graphs/machines/decode.yaml:"] * 3]),
    "a search has no outline": ("beam", ("skeleton.max_branches=3",), [
        "--set skeleton.max_branches=3: skeleton: no state runs an op that reads this block: ",
        "--set skeleton.max_branches=3: skeleton: beam search writes one answer: a graph with the "
        "block `beam` has no skeleton"]),
    "a search reuses nothing": ("beam", ("blend.plan=blend",), [
        "--set blend.plan=blend: blend: beam search cannot reuse documents: a graph has one of the "
        "blocks `beam`, `blend`"]),
    "check layers increase": ("eagle", (same := LAYERS.format("[2, 2]", "[0.2, 0.2]"),), [
        f"--set {same}: blend: check layers must increase, but 2 follows 2"]),
    "shares do not grow": ("eagle", (grows := LAYERS.format("[1, 2]", "[0.2, 0.3]"),), [
        f"--set {grows}: blend: shares must not grow, but 0.3 follows 0.2"]),
    "each check layer has a share": ("eagle", (few := LAYERS.format("[1, 2]", "[0.2]"),), [
        f"--set {few}: blend: one share per check layer: 1 for 2"]),
    "bottom_right with two branches": (
        "blend_eagle", ("blend.mask=bottom_right", "layout.max_num_branches=2"), [NO_SEQUENCE]),
    "bottom_right in rows": (
        "blend_eagle", (*BOTTOM_RIGHT, "layout.kind=batching"), [NO_SEQUENCE]),
    "bottom_right with an outline": ("bim_blend_eagle", BOTTOM_RIGHT, [NO_SEQUENCE]),
    "branches must be able to search": ("bim_blend_eagle", ("skeleton.tools=[Calculator]",), [
        "graphs/bim_blend_eagle.yaml:11:14: skeleton.documents: branches search for documents, "
        "but skeleton.tools has no 'Search'"]),
    "plain parts are folded": ("bim_eagle", ("skeleton.merge=plain",), [
        f"--set skeleton.merge=plain: skeleton.merge: plain, {NO_FOLD}"]),
    "attended parts are folded": ("bim_eagle", ("skeleton.merge=attend",), [
        f"--set skeleton.merge=attend: skeleton.merge: attend, {NO_FOLD}"]),
    "blended parts need the block": ("bim_eagle", ("skeleton.merge=blend",), [
        f"--set skeleton.merge=blend: skeleton.merge: blend, {NO_FOLD}",
        "--set skeleton.merge=blend: skeleton.merge: blend needs the block `blend`, which says "
        "which rows are recomputed"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_blocks_that_exclude_each_other(name: str) -> None:
    graph, sets, expected = TOGETHER[name]
    problems = refused(open_graph, graph, sets)
    pairs = zip(problems, expected, strict=True)
    assert all(problem.startswith(start) for problem, start in pairs), problems


@pytest.mark.parametrize(
    ("graph", "sets"),
    [
        ("beam", ("limits.max_new_tokens=1024", "layout.kv_slots=4098")),
        ("blend_eagle", BOTTOM_RIGHT),
        ("bim_blend_eagle", ("skeleton.tools=[Calculator]", "skeleton.documents=prefix")),
        ("bim_eagle", ("skeleton.merge=concat",)),
    ],
)
def test_blocks_that_go_together(graph: str, sets: tuple[str, ...]) -> None:
    assert open_graph(graph, sets)


def test_problems_inside_a_block_of_a_file_have_their_places(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for layers, ratios, place in (
        ("[3, 1]", "[0.2, 0.2]", "3:21: blend.check_layers.1"),
        ("[1, 2]", "[0.2, 0.3]", "4:17: blend.ratios.1"),
    ):
        file.write_text(f"extends: eagle\nblend:\n  check_layers: {layers}\n  ratios: {ratios}\n")
        (problem,) = refused(open_graph, str(file))
        assert problem.startswith(f"{file}:{place}: ")


def test_a_search_needs_its_block() -> None:
    beam = graph_yaml(open_graph("beam").graph)
    start, end = beam.index("\nbeam:") + 1, beam.index("\nsampling:")
    with pytest.raises(GraphError, match="needs the block 'beam' in this graph"):
        load_program(Source(beam[:start] + beam[end:], "g.yaml"), op_table())


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_settings_reach_the_ops_under_every_layout(layout: str) -> None:
    for value, early in (("true", True), ("false", False), ("never", "never")):
        program = open_graph("beam", (f"beam.early_stopping={value}", f"layout.kind={layout}"))
        (step,) = [s for s in program.steps["select_beams"] if s.entry.name == "beam.select"]
        assert step.settings == {"num_beams": 4, "length_penalty": 1.0, "early_stopping": early}
    for merge in ("concat", "plain", "blend", "attend"):
        sets = (f"skeleton.merge={merge}", f"layout.kind={layout}")
        assert open_graph("bim_blend_merge", sets).steps["merge"][-1].entry.name == "answer.merge"


def test_a_graph_names_only_the_blocks_that_it_has() -> None:
    for name in graph_names():
        graph = open_graph(name).graph
        dumped = graph.model_dump(by_alias=True)
        assert ("blend" in dumped, "beam" in dumped) == ("blend" in name, "beam" in name)
        assert "skeleton" in dumped
        whole = graph.model_dump(by_alias=True, exclude_none=True)
        assert Graph.model_validate(whole) == graph


def test_the_settings_are_those_of_the_ops() -> None:
    blend = open_graph("eagle", ("blend={}",)).graph.blend
    assert blend is not None and blend.settings == BlendSettings(plan="blend")
    names = BlendSettings.__slots__
    assert names == tuple(type(blend).model_fields)[: len(names)]


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
