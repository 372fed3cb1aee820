"""A second signal ends a server at once; a client who reads nothing is cut off."""

import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

from helpers.servers import RAIN, said, serving

LONG: dict[str, Any] = {"messages": said(RAIN), "max_tokens": 1500, "ignore_eos": True}


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, "autoregressive", "--grace", "60") as server:
        with server.http.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}):
            server.process.send_signal(signal.SIGINT)
            server.until(lambda: "requests are open" in server.told)
            began = time.monotonic()
            server.process.send_signal(signal.SIGINT)
            server.process.wait(10)
        assert time.monotonic() - began < 8 and "Traceback" not in server.told


def test_who_reads_nothing_is_cut_off(tmp_path: Path) -> None:
    """The stream waits in the buffers of two sockets, then for so many seconds, and is ended."""
    fields = {"logprobs": True, "top_logprobs": 20, "stream": True, "n": 4}
    data = json.dumps({**LONG, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
    with serving(tmp_path, "autoregressive", "--stall", "1") as server:
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
