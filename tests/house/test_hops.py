"""A decoding round crosses few files and makes few Python calls (`python -m tools.hops`)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Upper bounds by graph: files and calls of a round, files of the opening. They only ever fall. A
# compiled function counts as a call of its file.
BOUNDS = {"bim_eagle": (25, 460, 60), "autoregressive": (20, 180, 56)}


@pytest.mark.parametrize("graph", BOUNDS)
def test_a_round_crosses_few_files(graph: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.hops", graph],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
    )
    counts = re.findall(r": (\d+) files, \d+ functions, (\d+) calls", done.stdout)
    (opening, _), _, (files, calls) = ((int(a), int(b)) for a, b in counts)
    most_files, most_calls, most_opening = BOUNDS[graph]
    assert files <= most_files and calls <= most_calls and opening <= most_opening, done.stdout
