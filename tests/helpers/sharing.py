"""Graphs whose branches share a round's drafted tokens, one for each drafter of trees."""

from typing import Any

from helpers.drafters import drafting
from helpers.support import Graphs, SizedBook, Tiny, outline_of
from specsot.engine.run.session import Session
from specsot.states.text.outline import Outline, Point

LAYOUTS = ("bim", "batching", "paged")
BOUNDS = {
    "eagle3": ("num_draft_tokens=12", "draft_depth=5", "top_k=4", "rows_per_round=12"),
    "eagle2": (
        "num_draft_tokens={1: 12, 2: 9, 3: 6}",
        "draft_depth=4",
        "top_k=3",
        "rows_per_round=10",
    ),
    "eagle1": ("rows_per_round=14",),
    "dflash, ddtree": ("grow=ddtree", "num_draft_tokens=9", "block_size=5", "rows_per_round=11"),
    "dflash, chain": ("grow=chain", "block_size=6", "rows_per_round=7"),
    "ngram, lookup": ("num_draft_tokens=6", "rows_per_round=5"),
    "ngram, nasd": (
        "method=nasd",
        "num_draft_tokens=8",
        "width=3",
        "filler_top_k=2",
        "rows_per_round=9",
    ),
}
LONG = SizedBook(130, "outline", ())
PARTS = Outline("plan", tuple(Point(i, 90, None, (), f"Part {i}") for i in (1, 2, 3)), (), "ok")
FULL_ROUNDS = tuple(kind for kind in BOUNDS if "ngram" not in kind)  # always enough candidates


def session_of(
    kind: str, layout: str, made: Tiny, graphs: Graphs, book: Any = None, **more: Any
) -> Session:
    """A session with up to three branches at once, that share what the kind's bound says."""
    name = kind.partition(",")[0]
    own = [f"drafter.{one}" for one in BOUNDS[kind]]
    own += [f"layout.kind={layout}", "layout.max_num_branches=3"]
    return graphs.session(
        "bim_plain",
        drafting(made, name),
        book or made.book(stop_ids=()),
        outline=more.pop("outline", outline_of(5)),
        budget=more.pop("budget", 25),
        sets=(f"drafter.kind={name}", *own, *more.pop("sets", ())),
    )


def bound_of(kind: str) -> int:
    return int(BOUNDS[kind][-1].partition("=")[2])
