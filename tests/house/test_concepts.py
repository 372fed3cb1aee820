"""Every right-hand side of docs/concepts.md leads somewhere."""

import importlib
import re
from pathlib import Path

import pytest

from specsot.engine.cli.main import COMMANDS
from specsot.engine.prepare.files import graph_names, open_graph
from specsot.states.graph.load import op_table

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\|.*\| `([^`]+)` \|$", (ROOT / "docs/concepts.md").read_text(), re.M)


def python_name(path: str) -> object:
    """The module, class, function or attribute at a dotted path."""
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
    assert len(ROWS) > 45


@pytest.mark.parametrize("place", sorted(set(ROWS)))
def test_leads_somewhere(place: str) -> None:
    kind, _, name = place.rpartition(":")
    if kind == "op":
        assert op_table().find(name, "bim", "eagle3") is not None
    elif kind == "state":
        assert name in open_graph("bim_eagle").graph.states
    elif kind == "key":
        block, key = name.split(".")
        assert hasattr(getattr(open_graph("bim_eagle").graph, block), key)
    elif kind == "command":
        assert name in {command.name for command in COMMANDS}
    elif place.startswith("graphs/"):
        assert Path(place).stem in graph_names()
    else:
        assert python_name(place) is not None
