"""The example of docs/adding_a_drafter.md works as it stands there: one file and one line."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding_a_drafter.md"
LEFT_OUT = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "__pycache__", "tests")
RUN = "import sys; from specsot.engine.cli.main import main; main(sys.argv[1:])"
UNLOADED = "import sys, specsot.states.graph.drafters; sys.exit('torch' in sys.modules)"


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the example added; the folder that holds it."""
    folder = tmp_path_factory.mktemp("extended")
    package = Path(shutil.copytree(ROOT, folder / "specsot", ignore=LEFT_OUT))
    file, line = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (package / "states" / "graph" / "echo.py").write_text(file, encoding="utf-8")
    drafters = package / "states" / "graph" / "drafters.py"
    text = drafters.read_text(encoding="utf-8")
    assert "    | NgramDrafter,\n" in text
    text = text.replace("    | NgramDrafter,\n", line)
    text = text.replace("from .spec import", "from .echo import EchoDrafter\nfrom .spec import")
    drafters.write_text(text, encoding="utf-8")
    return folder


def call(folder: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


def test_the_example_is_short_and_needs_no_torch_to_be_checked(extended: Path) -> None:
    code = (extended / "specsot" / "states" / "graph" / "echo.py").read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 40
    assert call(extended, UNLOADED).returncode == 0
    done = call(extended, RUN, "check", "bim_plain", "--set", "drafter.kind=echo")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("layout", ["bim", "batching"])
def test_it_drafts_and_changes_no_token(layout: str, extended: Path) -> None:
    words = ("run", "bim_plain", "--no-tui", "--threads", "1", "--max-new-tokens", "12")
    sets = ("--set", f"layout.kind={layout}")
    plain = call(extended, RUN, *words, *sets)
    echo = call(extended, RUN, *words, *sets, "--set", "drafter.kind=echo")
    for done in (plain, echo):
        assert done.returncode == 0, done.stderr
    digests = [re.search(r"digest (\w+)", d.stdout + d.stderr) for d in (plain, echo)]
    assert digests[0] and digests[1] and digests[0][1] == digests[1][1]
    said = re.search(r"acceptance (\d+) %", echo.stdout + echo.stderr)
    assert said is not None and int(said[1]) > 0
