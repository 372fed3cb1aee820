"""The block of a DFlash drafter: its checkpoint's own, or the graph's."""

import json
from pathlib import Path

import pytest
from helpers.support import Make, Tiny, check_lossless, graphs, run_all
from helpers.tiny import write_tiny_dflash

from specsot.engine.models import Models, with_drafter
from specsot.states.yaml.source import GraphError


def blocks_of(size: int, made: Tiny, folder: Path) -> Models:
    """Models with a drafter whose checkpoint says this block size."""
    config = write_tiny_dflash(folder / f"{size}", made.folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"block_size": size}))
    return with_drafter(made.models, config.parent, "dflash")


@pytest.mark.parametrize(
    ("graph", "sets", "size", "nodes"),
    [
        ("dflash", (), 5, 4),
        ("dflash", ("drafter.block_size=3",), 3, 2),
        ("ddtree", ("drafter.num_draft_tokens=6",), 5, 6),
    ],
)
def test_a_graph_without_a_block_size_drafts_blocks_of_the_checkpoint(
    graph: str, sets: tuple[str, ...], size: int, nodes: int, *, tiny: Make, tmp_path: Path
) -> None:
    made = tiny("llama")
    models = blocks_of(5, made, tmp_path)
    session = graphs.session(graph, models, made.book(stop_ids=()), sets=sets)
    run = run_all(session, ["hello"])
    assert session.program.graph.drafter.block_size == size
    assert run.board["drafter"].num_nodes(1) == nodes
    check_lossless(run, session.prompts, made.reference, plain=True)


def test_a_pool_without_room_for_the_checkpoints_blocks_is_an_error(
    made: Tiny, tmp_path: Path
) -> None:
    sets = ("layout.kv_slots=33", "layout.max_num_branches=2")
    graphs.session("dflash", blocks_of(8, made, tmp_path), made.book(), sets=sets)
    with pytest.raises(GraphError, match="2 branches with 15 nodes each need 34 slots"):
        graphs.session("dflash", blocks_of(16, made, tmp_path), made.book(), sets=sets)
