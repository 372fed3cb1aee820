"""One server for all tests that leave it as it was."""

from collections.abc import Iterator

import pytest
from helpers.servers import Served, serving

GRAPHS = ("bim_dflash", "dflash", "autoregressive")


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, *GRAPHS, "--metrics-compat", "vllm", "--max-new-tokens", "24") as server:
        yield server
        assert server.process.poll() is None, server.told
        assert "Traceback" not in server.told
