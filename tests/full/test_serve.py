"""A server under real clients, a small pool, generated requests, and signals.

SPECSOT_CLIENTS: a Python in whose environment the clients are, if it is not this one."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.servers import RAIN, said, serving

from specsot.engine.prepare.job import embedded_folder

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


GRAPH = "autoregressive"


def test_many_choices_wait_for_room_in_a_small_pool(tmp_path: Path) -> None:
    small = "--set layout.kv_slots=160 --set limits.max_new_tokens=64 --max-queue 32"
    with serving(tmp_path, GRAPH, *small.split()) as server:
        body: dict[str, Any] = {"messages": said(RAIN), "max_tokens": 12, "ignore_eos": True}

        def ask(number: int) -> Any:
            own = {**body, "n": 8, "temperature": 1.0, "seed": 100 * number}
            return server.http.post("/v1/chat/completions", json=own)

        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(ask, range(8)))
        statuses = [one.status_code for one in got]
        assert set(statuses) == {200, 503} and statuses.count(200) >= 4
        for one in got:
            if one.status_code == 200:
                assert one.json()["usage"]["completion_tokens"] == 8 * 12
        server.until(lambda: server.metric("specsot:kv_slots_used") == 0)
        assert server.metric("specsot:requests_open") == 0
        never = server.chat(model=GRAPH, max_tokens=400)
        assert never.json()["error"]["code"] == "context_length_exceeded"


EXAMPLES = int(os.environ.get("SPECSOT_EXAMPLES", "1300"))  # of each operation that has fields


def test_generated_requests(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    # Requests that set a tiny specsot.timeout get 504.
    expected = "[checks.not_a_server_error]\nexpected-statuses = ['2xx', '3xx', '4xx', 504]\n"
    (tmp_path / "schemathesis.toml").write_text(expected)
    with serving(tmp_path, "dflash", "--timeout", "5", "--max-new-tokens", "4") as server:
        checks = "not_a_server_error,status_code_conformance,response_schema_conformance"
        words = ["run", f"{server.url}/openapi.json", "--checks", checks, "--phases", "fuzzing"]
        more = ["--max-examples", str(EXAMPLES), "--seed", "15"]
        code = "from schemathesis.cli import schemathesis; schemathesis()"
        command = [sys.executable, "-c", code, *words, *more]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-500:]
        assert server.chat().status_code == 200 and "Traceback" not in server.told


LONG: dict[str, Any] = {"messages": said(RAIN), "max_tokens": 1500, "ignore_eos": True}


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, "autoregressive", "--shutdown-timeout", "60") as server:
        with server.http.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}):
            server.process.send_signal(signal.SIGINT)
            server.until(lambda: "open requests: " in server.told)
            began = time.monotonic()
            server.process.send_signal(signal.SIGINT)
            server.process.wait(10)
        assert time.monotonic() - began < 8 and "Traceback" not in server.told


def test_who_reads_nothing_is_cut_off(tmp_path: Path) -> None:
    fields = {"logprobs": True, "top_logprobs": 20, "stream": True, "n": 4}
    data = json.dumps({**LONG, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
    with serving(tmp_path, "autoregressive", "--write-timeout", "1") as server:
        with socket.socket() as pipe:
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            pipe.connect(server.address)
            pipe.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + data)
            server.until(lambda: server.metric("specsot:requests_running") > 0)
            server.until(lambda: server.metric("specsot:requests_open") == 0, 120)
            names = "stop", "length"
            told = server.http.get("/metrics").text
            ended = 'specsot:request_success_total{finished_reason="'
            assert not any(f"{ended}{name}" in told for name in names), "cut off, not written out"
        assert server.chat(model="autoregressive").status_code == 200
        assert "Traceback" not in server.told
