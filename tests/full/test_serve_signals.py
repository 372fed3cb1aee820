"""A second signal ends a server at once."""

import signal
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
