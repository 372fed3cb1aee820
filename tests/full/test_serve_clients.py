"""Every real client that is installed, against a server of three graphs.

SPECSOT_CLIENTS: a Python in whose environment the clients are, if it is not this one.
"""

import os
import subprocess
import sys
from pathlib import Path

from helpers.servers import serving

from specsot.engine.prepare.environment import embedded_folder

ROOT = Path(__file__).parents[2]


def test_real_clients(tmp_path: Path) -> None:
    python = os.environ.get("SPECSOT_CLIENTS", sys.executable)
    folder = str(embedded_folder("target"))
    with serving(tmp_path, "bim_dflash", "dflash", "autoregressive") as server:
        words = [server.url, "--model", "specsot/bim_dflash", "--tokenizer", folder]
        done = subprocess.run(
            [python, "-m", "tools.serve.clients", *words], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr[-2000:]
        assert "openai:" in done.stdout and server.chat().status_code == 200
