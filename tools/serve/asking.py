"""A client that costs little: plain sockets, so that what is measured is the server."""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

QUESTIONS = (
    "Tell me about honey bees.",
    "What is rain?",
    "How do I plan a picnic?",
    "Why do leaves fall?",
    "How does a bicycle stay upright?",
)
LENGTHS = (16, 48, 96)
CHAT = "/v1/chat/completions"


@dataclass
class Timed:
    """One streamed request, in seconds since it was sent.

    status: 0 if there was no answer at all. error: the code of an error inside the stream.
    first: of the first text; last: of the end. gaps: per token, of the texts behind the first.
    arrivals: (moment of `time.perf_counter`, tokens that came)."""

    status: int = 0
    error: str = ""
    text: str = ""
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    ended: bool = False
    gaps: list[float] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)


class Client:
    """Asks one server; a connection for each request."""

    def __init__(self, url: str, key: str = "none") -> None:
        host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
        self.host, self.port, self.key = host, int(port or 80), key

    async def send(self, method: str, path: str, body: Any = None) -> tuple[Any, Any]:
        """The two ends of a connection on which a request was sent."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 24)
        data = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n"
            f"Authorization: Bearer {self.key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        return reader, writer

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Status and body of a whole answer; (0, b"") if there is none."""
        try:
            reader, writer = await self.send(method, path, body)
            answer = await reader.read()
            writer.close()
        except OSError:
            return 0, b""
        head, _, rest = answer.partition(b"\r\n\r\n")
        return (int(head.split()[1]), rest) if head else (0, b"")

    async def ask(self, body: dict[str, Any], leave: float | None = None) -> Timed:
        """A streamed chat request; leave: seconds after which the client is gone."""
        found, began = Timed(), time.perf_counter()
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {**body, "stream": True, "stream_options": options}
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(leave):
                reader, writer = await self.send("POST", CHAT, body)
                try:
                    line = await reader.readline()
                    found.status = int(line.split()[1]) if line else 0
                    while line := await reader.readline():
                        self._took(found, line, began)
                finally:
                    writer.close()
                    found.last = time.perf_counter() - began
        found.last = time.perf_counter() - began
        return found

    @staticmethod
    def _took(found: Timed, line: bytes, began: float) -> None:
        """A line of the answer; those that are no events are passed over."""
        if line.startswith(b"data: [DONE]"):
            found.ended = True
        if not line.startswith(b"data: {"):
            return
        now, chunk = time.perf_counter(), json.loads(line[6:])
        if error := chunk.get("error"):
            found.error = error["code"]
            return
        new = chunk["usage"]["completion_tokens"] - found.tokens
        found.tokens += new
        found.arrivals.append((now, new))
        text = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else ""
        found.text += text or ""
        if text and not found.first:
            found.first = now - began
        elif found.first and new:
            found.gaps += [(now - began - found.last) / new] * new
        if found.first and (new or text):
            found.last = now - began

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = (await self.call("GET", "/metrics"))[1].decode()
        return sum(map(float, re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M)))

    async def ready(self) -> float:
        """Seconds until requests are taken."""
        began = time.perf_counter()
        while (await self.call("GET", "/ready"))[0] != 200:
            await asyncio.sleep(0.05)
        return time.perf_counter() - began

    async def idle(self, wait: float = 60.0) -> bool:
        """Whether nobody is served any more, and no slot is in use, within so many seconds."""
        end, names = time.perf_counter() + wait, ("requests_running", "requests_waiting")
        names = (*names, "requests_open", "kv_slots_used")
        while time.perf_counter() < end:
            await asyncio.sleep(0.6)  # the engine tells its counts a few times a second
            counts = [await self.metric(f"specsot:{name}") for name in names]
            if not sum(counts):
                return True
        return False


def chat(model: str, number: int, tokens: int, **more: Any) -> dict[str, Any]:
    """The body of request number so and so."""
    text = QUESTIONS[number % len(QUESTIONS)]
    said = [{"role": "user", "content": f"{text} ({number})"}]
    return {"model": model, "messages": said, "max_tokens": tokens, **more}


async def at_once(count: int, width: int, one: Callable[[int], Awaitable[Timed]]) -> list[Timed]:
    """So many requests, `width` of them side by side."""
    gate = asyncio.Semaphore(width)

    async def next_one(number: int) -> Timed:
        async with gate:
            return await one(number)

    return await asyncio.gather(*map(next_one, range(count)))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, median and 95th percentile, in milliseconds."""
    if len(values) < 2:
        return {"mean": round(1e3 * mean(values or [0.0]), 1)}
    cuts = quantiles(values, n=20, method="inclusive")
    figures = {"mean": mean(values), "p50": cuts[9], "p95": cuts[18], "max": max(values)}
    return {name: round(1e3 * value, 1) for name, value in figures.items()}


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(one) for thread in threads for one in thread.read_text().split()]


def resident(pid: int) -> float:
    """MiB of a process that are in memory."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0
