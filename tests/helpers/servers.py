"""A real `specsot serve` in processes of its own, and how to talk to it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

PATIENCE = 120.0
CODE = "from specsot.engine.cli.main import main; main()"
BEES, RAIN = "Tell me about honey bees.", "What is rain?"


def said(text: str) -> list[dict[str, str]]:
    """A conversation of one turn."""
    return [{"role": "user", "content": text}]


@dataclass
class Served:
    """A running server."""

    process: "subprocess.Popen[str]"
    url: str
    log: Path
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    @property
    def told(self) -> str:
        """What it has said."""
        return self.log.read_text(encoding="utf-8")

    def chat(self, text: str = RAIN, model: str = "dflash", **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": said(text), "max_tokens": 8, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any, model: str = "dflash", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": model, "prompt": prompt, **fields})

    def stream(self, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
        """The chunks of a stream, and `[DONE]` as itself."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def raw(self, data: bytes, wait: float = 10.0) -> bytes:
        """What comes back for these bytes, until the server closes or has answered."""
        with socket.create_connection(self.address, timeout=wait) as pipe:
            pipe.settimeout(wait)
            with suppress(OSError):
                pipe.sendall(data)
            return b"".join(_received(pipe))

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = self.http.get("/metrics").text
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M)
        return sum(map(float, found))

    def engine_pid(self) -> int:
        """Of its engine's process."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return int([pid for one in threads for pid in one.read_text().split()][-1])

    def until(self, holds: Any, wait: float = 30.0) -> None:
        """Wait until something is true."""
        end = time.monotonic() + wait
        while not holds():
            assert time.monotonic() < end, self.told
            time.sleep(0.05)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


def _received(pipe: socket.socket) -> Iterator[bytes]:
    try:
        while part := pipe.recv(65536):
            yield part
            if b"}}" in part or part.endswith(b"}"):
                return
    except OSError:
        return


@contextmanager
def serving(folder: Path, *words: str, ready: bool = True, **environment: str) -> Iterator[Served]:
    """A server of these words on a free port."""
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", CODE, "serve", *words, "--port", "0"],
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
    try:
        wanted = r"ready: (\S+)" if ready else r"listening on (\S+);"
        end = time.monotonic() + PATIENCE
        while not (found := re.search(wanted, log.read_text())):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        yield Served(process, found[1], log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
