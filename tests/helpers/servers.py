"""A real `specsot serve` in processes of its own, its replicas, streams, and page in a browser."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest

from helpers.commands import ended
from specsot.engine.workers.router import ask_router

PATIENCE = 120.0
BEES, RAIN = "Tell me about honey bees.", "What is rain?"


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@dataclass
class Served:
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
        return self.log.read_text(encoding="utf-8")

    def chat(self, text: str = RAIN, model: str = "dflash", **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": said(text), "max_tokens": 8, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any, model: str = "dflash", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": model, "prompt": prompt, **fields})

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        return found

    def decoded(self, ids: Sequence[int]) -> str:
        return str(self.http.post("/detokenize", json={"tokens": ids}).json()["prompt"])

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
        text = self.http.get("/metrics").text
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M)
        return sum(map(float, found))

    def engine_pid(self) -> int:
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return int([pid for one in threads for pid in one.read_text().split()][-1])

    def until(self, holds: Any, wait: float = 30.0) -> None:
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
def serving(
    folder: Path,
    *words: str,
    ready: bool = True,
    descriptors: int | None = None,
    **environment: str,
) -> Iterator[Served]:
    """descriptors: that the server may have open, at most."""
    log = folder / "server.log"
    limit = "" if descriptors is None else f"ulimit -n {descriptors} && "
    specsot = (sys.executable, "-m", "specsot")
    with log.open("w") as out:
        process = subprocess.Popen(
            ["sh", "-c", f'{limit}exec "$@"', "sh", *specsot, "serve", *words, "--port", "0"],
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


def pids_of(folder: str) -> list[int]:
    """Processes whose command line names a folder."""
    found = []
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if folder.encode() in one.read_bytes():
                found.append(int(one.parent.name))
    return found


@dataclass
class ServedFleet:
    server: Served
    environment: dict[str, str]
    folder: Path

    def specsot(self, *words: str, code: int = 0) -> str:
        done = ended(words, self.folder, self.environment, code)
        return done.stdout if code == 0 else done.stderr

    @property
    def cluster(self) -> dict[str, Any]:
        file = Path(self.environment["SPECSOT_CLUSTER_FILE"])
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    @property
    def pids(self) -> list[int]:
        return pids_of(self.cluster["folder"])

    def by_replica(self, name: str) -> dict[str, float]:
        """A figure of `Router.replicas`."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPECSOT_CLUSTER_FILE", self.environment["SPECSOT_CLUSTER_FILE"])
            fleet = ask_router("state", print)
        assert fleet is not None
        return {one["name"]: float(one[name]) for one in fleet["replicas"]}

    def pid_of(self, replica: str) -> int:
        told = [line for line in self.server.told.splitlines() if f"{replica} is ready" in line]
        return int(told[-1].rpartition("process ")[2].rstrip(")"))

    def all_ready(self, count: int) -> None:
        self.server.until(
            lambda: self.server.http.get("/health").json() == {"replicas": count, "ready": count},
            PATIENCE,
        )


@contextmanager
def serving_fleet(folder: Path, *words: str, workers: int = 2) -> Iterator[ServedFleet]:
    environment = {"SPECSOT_CLUSTER_FILE": str(folder / "cluster.json"), "SPECSOT_THREADS": "1"}
    with serving(folder, *words, "--workers", str(workers), **environment) as server:
        fleet = ServedFleet(server, environment, folder)
        fleet.all_ready(workers)
        yield fleet


@dataclass
class Streamed:
    """An answer as it came: its text, and seconds between begin and each chunk."""

    text: str
    times: list[float]


def stream(url: str, text: str, model: str, **fields: Any) -> Streamed:
    began, pieces, times = monotonic(), [], []
    body = {"model": model, "messages": said(text), "stream": True, **fields}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE) as got:
        for line in got.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                (choice,) = chunk["choices"]
                pieces.append(choice["delta"].get("content", ""))
                times.append(monotonic() - began)
    return Streamed("".join(pieces), times)


def stream_all(url: str, asked: Sequence[dict[str, Any]]) -> list[Streamed]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return [*pool.map(lambda one: stream(url, **one), asked)]


SHOTS = os.environ.get("SPECSOT_SHOTS")  # a folder where screenshots are kept


COUNT_SHIFTS = """
window.shift = 0;
new PerformanceObserver((list) => {
  for (const one of list.getEntries()) if (!one.hadRecentInput) window.shift += one.value;
}).observe({ type: "layout-shift", buffered: true });
"""


class Visit:
    def __init__(self, browser: Any, url: str, width: int, height: int, scheme: str) -> None:
        size = {"width": width, "height": height}
        self.page = browser.new_page(viewport=size, color_scheme=scheme)
        self.faults: list[str] = []
        self.strangers: list[str] = []
        self.page.on(
            "console",
            lambda one: self.faults.append(one.text) if one.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda one: self.faults.append(str(one)))
        self.page.on(
            "request",
            lambda one: (
                self.strangers.append(one.url) if not one.url.startswith((url, "data:")) else None
            ),
        )
        self.page.add_init_script(COUNT_SHIFTS)
        self.page.goto(url)

    def layout_shift(self) -> float:
        """The cumulative layout shift, without shifts right after input."""
        return float(self.page.evaluate("window.shift"))

    def shot(self, name: str) -> None:
        if SHOTS:
            self.page.screenshot(path=f"{SHOTS}/{name}.png", full_page=True)

    def until(self, script: str, wait: float = 20.0) -> None:
        end = time.monotonic() + wait
        while not self.page.evaluate(script):
            assert time.monotonic() < end, f"{script}: {self.faults}"
            time.sleep(0.05)

    def wide(self) -> bool:
        return bool(
            self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth + 1")
        )

    def clean(self) -> None:
        assert self.faults == [] and self.strangers == [] and not self.wide()
        try:
            from axe_playwright_python.sync_playwright import Axe
        except ImportError:
            return
        found = Axe().run(self.page).response["violations"]
        serious = [one["id"] for one in found if one["impact"] in ("serious", "critical")]
        assert serious == [], found
