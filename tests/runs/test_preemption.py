"""Rows run out and the youngest makes way; that its text stays is an axis of test_axes.py."""

import pytest
from helpers.drafters import drafting, settings_of
from helpers.support import Graphs, Make, PlanBook, drive, start, tokens_of

from specsot.engine.prepare.inputs import Prompt

OPTIMISTIC, SMALL = "scheduler.admission=optimistic", "layout.kv_slots=320"


class LongBook(PlanBook):
    """Prompts long enough to be cached."""

    text = "PLAN\n1|5|-|-|One\n2|4|-|1|Two\n3|5|-|-|Three\n4|3|-|-|Four\nEND"

    def ids(self, text: str, low: int, high: int) -> list[int]:
        more = 70 if text.startswith("prefix") else 0
        return super().ids(text, low + more, high + more)


@pytest.mark.parametrize("kind", ("eagle3", "ngram"))
def test_a_pool_barely_larger_than_one_request(kind: str, tiny: Make, graphs: Graphs) -> None:
    """Reserved, no request is ever interrupted; optimistic, more run side by side, and make way."""
    found, preemptions = [], []
    prompts = [
        Prompt(str(n), f"question {n}", max_new_tokens=70, cache_salt="ab"[n]) for n in range(2)
    ]
    for more in (("layout.kv_slots=2000",), (SMALL,), (SMALL, OPTIMISTIC)):
        sets = (*settings_of(kind, 0), "layout.max_num_branches=4", *more)
        book = LongBook(130, "outline", ())
        models = drafting(tiny("llama"), kind)
        session = graphs.session("bim_plain", models, book, sets=sets)
        run = drive(start(session, prompts), check=OPTIMISTIC in sets)
        found.append(tokens_of(run))
        preemptions.append(run.manager.lifecycle.preemptions)
    assert found[0] == found[1] == found[2]
    assert preemptions[:2] == [0, 0] and preemptions[2] > 1


@pytest.mark.parametrize(("merge", "makes_way"), [("concat", True), ("attend", False)])
def test_parts_that_stay_until_they_are_combined_are_reserved(
    merge: str, makes_way: bool, tiny: Make, graphs: Graphs
) -> None:
    """Rows that another branch still reads cannot be freed."""
    graph = {"concat": "bim_plain", "attend": "bim_attend_merge"}[merge]
    sets = [OPTIMISTIC, "skeleton.grammar=false"]
    book = LongBook(130, "outline", ())
    session = graphs.session(graph, tiny("llama").models, book, sets=sets)
    assert start(session, []).manager.admission.optimistic is makes_way
