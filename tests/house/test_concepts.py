"""Every right-hand side of docs/concepts.md leads somewhere."""

import importlib
import re
from pathlib import Path

import pytest

from specsot.engine.cli.main import COMMANDS
from specsot.engine.prepare.files import graph_names, open_graph
from specsot.states.graph.load import op_table

ROOT = Path(__file__).parents[2]
ROOMS = ("ops", "models", "states", "engine")
PAGE = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\|.*\| `([^`]+)` \|$", PAGE, re.M)


def python_name(path: str) -> object:
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def test_the_table_is_read() -> None:
    assert len(ROWS) > 60


def test_every_name_of_the_statuses_is_there() -> None:
    section = PAGE.partition("### 003")[2].partition("### 004")[0]
    names = """
        temp_status cache_fuse_metadata check check_layers imp_indices org_seq_len org_pos fake_q
        attn_bias old_kvs old_kv prefill_metadata
    """
    words = set(re.findall(r"\w+", section))
    assert set(names.split()) <= words
    statuses = ["Decode (-1)", "Full Prefill (0)", "Check (1)", "After Check (2)", "HKVD"]
    assert [name for name in statuses if name not in section] == []


def test_a_missing_feature_is_listed() -> None:
    missing = PAGE.partition("### Not implemented")[2]
    assert "first_target" in missing
    assert not [p for room in ROOMS for p in (ROOT / room).rglob("*first_target*.py")]


@pytest.mark.parametrize("place", sorted(set(ROWS)))
def test_leads_somewhere(place: str) -> None:
    kind, _, name = place.rpartition(":")
    if kind == "op":
        assert name in op_table().ops
    elif kind == "state":
        assert name in open_graph("bim_eagle").graph.states
    elif kind == "key":
        block, key = name.split(".")
        assert hasattr(getattr(open_graph("bim_blend_eagle").graph, block), key)
    elif kind == "command":
        assert name in {command.name for command in COMMANDS}
    elif place.startswith("graphs/"):
        assert Path(place).stem in graph_names()
    else:
        assert python_name(place) is not None
