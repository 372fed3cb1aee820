"""Draws the pictures of docs/concepts.md from real runs of the embedded model.

python -m tools.pictures.draw                 # into docs/pictures
python -m tools.pictures.draw --out folder"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.prepare.job import prepare
from specsot.engine.prepare.options import RunOptions
from specsot.engine.run.api import load
from specsot.ops.kv.pool import FREE, KVCache
from specsot.states.machine import Event, Moved, OpRan, Run
from specsot.states.round import VerifiedTree

from .pools import Mask, Slots, mask_picture, slot_table
from .states import Way, state_graph, ways_of
from .trees import tree_picture

QUESTION = "Tell me about honey bees."
OUTLINE = "- title: Making honey\n- title: Roles in the colony\n- title: Visiting flowers\n"
PARTS = 3
SMALL = ("drafter.num_draft_tokens=3", "drafter.draft_depth=2", "drafter.top_k=2")
Look = Callable[[Run, Event], None]


def watched(graph: str, sets: tuple[str, ...], look: Look, *, given: bool = False) -> Run:
    """A whole run of the embedded model; look: is shown the run after every op and transition."""
    with tempfile.TemporaryDirectory() as folder:
        outline = Path(folder, "outline.yaml")
        outline.write_text(OUTLINE, encoding="utf-8")
        options = RunOptions(graph, sets=sets, threads=1, max_new_tokens=24, explain_rounds=True)
        session = load(prepare(replace(options, outline=outline if given else None)))
    run: Run
    run = session.start([Prompt("1", QUESTION)], lambda event: look(run, event))
    while not run.finished:
        run.advance()
    return run


def draw_states() -> str:
    """The graph, and the ways that a run with more parts than places took."""
    moves: list[Way] = []

    def look(run: Run, event: Event) -> None:
        if isinstance(event, Moved):
            moves.append((event.source, event.target, event.guard or ""))

    watched("bim_eagle", ("layout.max_num_branches=3",), look)
    title = f"bim_eagle: its states, and the {len(moves)} transitions of one run"
    return str(state_graph(title, open_graph("bim_eagle").graph, ways_of(moves)))


def slots_of(run: Run, name: str, row: int = 0, width: int = 118) -> Slots:
    """What lies in a row of the target's pool now."""
    pool, part = run.board["kv"], slice(0, width)
    assert isinstance(pool, KVCache)
    request = run.board["branches"].requests[0]
    numbers = {branch.owner: branch.index for branch in request.branches}
    first = row * pool.capacity
    owners = pool.owner[first : first + pool.capacity][part].tolist()
    bim = tuple(None if one == FREE else numbers.get(one, -1) for one in owners)
    positions = pool.position[first : first + pool.capacity][part].tolist()
    committed = pool.committed[first : first + pool.capacity][part].tolist()
    return Slots(name, bim, tuple(positions), tuple(committed))


def mask_of(run: Run) -> Mask:
    """The forward that is about to verify trees: who sees which slots."""
    (group,), rows = run.board["attention"].groups, run.board["rows"]
    width = group.mask_GqK.shape[-1]
    slots, prompts = slots_of(run, "", width=width), run.board["prompts"]
    by_slot = rows.slots_BQ[0].tolist()
    branches = tuple(slots.bim[slot] or 0 for slot in by_slot)
    texts = tuple(prompts.decode([token]).strip() or "_" for token in rows.tokens_BQ[0].tolist())
    return Mask(slots, branches, texts, tuple(map(tuple, group.mask_GqK[0].tolist())))


def draw_mask() -> str:
    """The mask of the second forward over trees, three branches in one sequence."""
    found: list[Mask] = []

    def look(run: Run, event: Event) -> None:
        if isinstance(event, OpRan) and (event.state, event.op) == ("verify", "mask.build"):
            found.append(mask_of(run))

    watched("bim_eagle", SMALL, look, given=True)
    mask = found[1]
    return str(mask_picture(f"Who sees what: {len(mask.branches)} rows of one forward", mask))


def draw_slots() -> str:
    """The slot table of a pool from the outline to the second round, and the rows of batching."""
    moments: list[list[Slots]] = []

    def look(run: Run, event: Event) -> None:
        if isinstance(event, Moved) and (event.source, event.target) == ("schedule", "parse"):
            moments.append([slots_of(run, "outline written")])
        elif isinstance(event, Moved) and event.source == "parallel_prefill":
            moments.append([slots_of(run, "parts prefilled")])
        elif isinstance(event, OpRan) and (event.state, event.op) == ("verify", "mask.build"):
            moments.append([slots_of(run, f"round {len(moments) // 2}, trees")])
        elif isinstance(event, Moved) and event.source == "verify":
            moments.append([slots_of(run, f"round {(len(moments) - 1) // 2}, kept")])

    def look_at_rows(run: Run, event: Event) -> None:
        if isinstance(event, Moved) and event.source == "parallel_prefill":
            rows.extend(slots_of(run, f"batching, row {row}", row) for row in range(PARTS))

    rows: list[Slots] = []
    watched("bim_eagle", SMALL, look, given=True)
    sets = (*SMALL, "layout.kind=batching", "layout.max_num_branches=3", "layout.kv_slots=512")
    watched("bim_eagle", sets, look_at_rows, given=True)
    title = "The slots of a pool, whose they are, and their positions"
    return str(slot_table(title, [*moments[:6], rows]))


def draw_tree() -> str:
    """A tree of which the target took a part: the first with a path of two and a fork on it."""
    found: list[VerifiedTree] = []

    def look(run: Run, event: Event) -> None:
        if isinstance(event, OpRan) and event.op == "branch.commit_":
            found.extend(run.board["committed"].trees)

    sets = ("drafter.num_draft_tokens=7", "drafter.draft_depth=4", "drafter.top_k=2")
    run = watched("eagle", sets, look)
    levels = [max((one.depths[node] for node in one.drafts), default=0) for one in found]
    paths = zip(found, levels, strict=True)
    one = next(one for one, deep in paths if 1 < len(one.path) - 1 < deep)
    tokens = {one.root, one.final, *(one.tokens[node] for node in one.drafts)}
    names = {token: run.board["prompts"].decode([token]).strip() or "_" for token in tokens}
    counts = f"{len(one.path) - 1} accepted, {one.num_committed} committed"
    title = f"One round: {len(one.drafts)} drafts, {counts}"
    return str(tree_picture(title, one, names))


PICTURES = {
    "state_graph.svg": draw_states,
    "bim_mask.svg": draw_mask,
    "slot_table.svg": draw_slots,
    "tree.svg": draw_tree,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "docs/pictures")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (out / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
