"""Servers for all tests that leave them as they were, and a browser."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.servers import Served, serving

GRAPHS = ("bim_dflash", "dflash", "autoregressive", "blend_eagle")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, *GRAPHS, "--metrics-compat", "vllm", "--max-new-tokens", "24") as server:
        yield server
        assert server.process.poll() is None, server.told
        assert "Traceback" not in server.told and "has ended" not in server.told


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()
