"""Thousands of generated requests: no answer of 5xx, none that the schema does not describe."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.servers import serving

EXAMPLES = int(os.environ.get("SPECSOT_EXAMPLES", "1300"))  # of each of four operations


def test_generated_requests(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    with serving(tmp_path, "dflash", "--timeout", "5", "--max-new-tokens", "4") as server:
        checks = "not_a_server_error,status_code_conformance,response_schema_conformance"
        words = ["run", f"{server.url}/openapi.json", "--checks", checks, "--phases", "fuzzing"]
        more = ["--max-examples", str(EXAMPLES), "--seed", "15", "--include-method", "POST"]
        code = "from schemathesis.cli import schemathesis; schemathesis()"
        done = subprocess.run(
            [sys.executable, "-c", code, *words, *more],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-500:]
        assert server.chat().status_code == 200 and "Traceback" not in server.told
