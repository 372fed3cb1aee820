"""`specsot serve --workers` as processes of its own, commands that scale it, and its streams."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import httpx

from helpers.commands import ended
from helpers.servers import PATIENCE, Served, said, serving


@dataclass
class ServedFleet:
    """A running server with replicas."""

    server: Served
    environment: dict[str, str]
    folder: Path

    def specsot(self, *words: str, code: int = 0) -> str:
        """What a command says; it must end with this code."""
        done = ended(words, self.folder, self.environment, code)
        return done.stdout if code == 0 else done.stderr

    @property
    def cluster(self) -> dict[str, Any]:
        """Of its file."""
        file = Path(self.environment["SPECSOT_CLUSTER_FILE"])
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    @property
    def pids(self) -> list[int]:
        """Of all processes of its cluster."""
        found, folder = [], self.cluster["folder"]
        for one in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if folder in one.read_bytes().decode(errors="replace"):
                    found.append(int(one.parent.name))
            except OSError:
                continue
        return found

    def by_replica(self, name: str) -> dict[str, float]:
        """A metric of each replica."""
        lines = self.server.http.get("/metrics").text.splitlines()
        mine = [line for line in lines if line.startswith(f'specsot:{name}{{replica="')]
        return {line.split('"')[1]: float(line.split()[-1]) for line in mine}

    def pid_of(self, replica: str) -> int:
        """Of its process."""
        told = [line for line in self.server.told.splitlines() if f"{replica} is ready" in line]
        return int(told[-1].rpartition("process ")[2].rstrip(")"))

    def all_ready(self, count: int) -> None:
        self.server.until(
            lambda: self.server.http.get("/health").json() == {"replicas": count, "ready": count},
            PATIENCE,
        )


@contextmanager
def serving_fleet(folder: Path, *words: str, workers: int = 2) -> Iterator[ServedFleet]:
    """A server with so many replicas, all of them ready."""
    environment = {"SPECSOT_CLUSTER_FILE": str(folder / "cluster.json"), "SPECSOT_THREADS": "1"}
    with serving(folder, *words, "--workers", str(workers), **environment) as server:
        fleet = ServedFleet(server, environment, folder)
        fleet.all_ready(workers)
        yield fleet


@dataclass
class Streamed:
    """An answer as it came: its text, and seconds between begin and each chunk."""

    text: str
    finish: str
    times: list[float]


def stream(url: str, text: str, model: str, **fields: Any) -> Streamed:
    """One answer, streamed."""
    began, pieces, times, finish = monotonic(), [], [], ""
    body = {"model": model, "messages": said(text), "stream": True, **fields}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE) as got:
        for line in got.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                (choice,) = chunk["choices"]
                pieces.append(choice["delta"].get("content", ""))
                times.append(monotonic() - began)
                finish = choice["finish_reason"] or finish
    return Streamed("".join(pieces), finish, times)


def stream_all(url: str, asked: Sequence[dict[str, Any]]) -> list[Streamed]:
    """All of them at once."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return [*pool.map(lambda one: stream(url, **one), asked)]
