"""Combining parts: what a graph must say for it, and what the model is told."""

import random

import pytest
import yaml
from helpers.toy_graph import told

from specsot.engine.prepare.environment import embedded_folder
from specsot.engine.prepare.files import open_graph
from specsot.states.fold import FoldState
from specsot.states.request import Branch, Finish, Request
from specsot.states.text.outline import parse_outline
from specsot.states.text.prompts import PromptBook
from specsot.states.text.template import TemplateError, load_template
from specsot.states.text.tokens import PromptTokens
from specsot.states.yaml.source import GraphError
from tools.embedded.documents import combined_facts_sample
from tools.embedded.pieces import END, Pieces


def refused(graph: str, *sets: str) -> list[str]:
    with pytest.raises(GraphError) as caught:
        open_graph(graph, sets)
    return told(caught.value)


@pytest.mark.parametrize("merge", ["plain", "blend", "attend"])
def test_parts_must_be_folded_somewhere(merge: str) -> None:
    found = refused("bim_eagle", f"skeleton.merge={merge}")
    place = f"--set skeleton.merge={merge}: skeleton.merge: "
    assert (
        found[0] == f"{place}{merge}, but no state runs the op 'branch.fold_' that folds the parts"
    )
    assert found[1:] == (
        []
        if merge != "blend"
        else [f"{place}blend needs the block `blend`, which says which rows are recomputed"]
    )
    assert open_graph("bim_eagle", ("skeleton.merge=concat",))


def test_only_four_ways_to_merge() -> None:
    (problem,) = refused("bim_blend_merge", "skeleton.merge=reuse")
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
    with pytest.raises(TemplateError, match=r"combine: no slot \{title\} here"):
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
