"""Load on a running server: throughput and times by concurrency, aborts, overload, overhead.

`python -m tools.serve.load http://127.0.0.1:8000 --model bim_dflash`; figures are JSON.
"""

import asyncio
import json
import random
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import mean, quantiles
from typing import Annotated, Any

import httpx
import typer

QUESTIONS = (
    "Tell me about honey bees.",
    "What is rain?",
    "How do I plan a picnic?",
    "Why do leaves fall?",
    "How does a bicycle stay upright?",
)
LENGTHS = (16, 48, 96)


@dataclass
class Timed:
    """One streamed request: seconds to its first text and its last, and between texts."""

    status: int = 0
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    between: list[float] = field(default_factory=list)


class Load:
    """Asks one model of one server."""

    def __init__(self, url: str, model: str) -> None:
        self.model = model
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=url, timeout=600, limits=limits)

    def body(self, number: int, tokens: int, **more: Any) -> dict[str, Any]:
        text = QUESTIONS[number % len(QUESTIONS)]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        said = [{"role": "user", "content": f"{text} ({number})"}]
        return {"model": self.model, "messages": said, "max_tokens": tokens, **options, **more}

    async def ask(self, number: int, tokens: int, leave: float | None = None) -> Timed:
        """One request; leave: seconds after which the client is gone."""
        found, began = Timed(), time.perf_counter()
        path, body = "/v1/chat/completions", self.body(number, tokens)
        async with self.http.stream("POST", path, json=body) as response:
            found.status = response.status_code
            async for line in response.aiter_lines():
                now = time.perf_counter() - began
                if leave is not None and now > leave:
                    return found
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if usage := chunk.get("usage"):
                    found.tokens = usage["completion_tokens"]
                elif chunk["choices"][0]["delta"].get("content"):
                    found.first = found.first or now
                    if found.last:
                        found.between.append(now - found.last)
                    found.last = now
        found.last = time.perf_counter() - began
        return found

    async def metric(self, name: str) -> float:
        text = (await self.http.get("/metrics")).text
        return sum(map(float, re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M)))

    async def idle(self, wait: float = 60.0) -> bool:
        """Whether nobody is served any more, and no slot is in use, within so many seconds."""
        end, names = time.perf_counter() + wait, ("requests_running", "requests_waiting")
        while time.perf_counter() < end:
            counts = [await self.metric(f"specsot:{name}") for name in (*names, "kv_slots_used")]
            if not sum(counts):
                return True
            await asyncio.sleep(0.3)
        return False


async def at_once(count: int, width: int, one: Callable[[int], Awaitable[Timed]]) -> list[Timed]:
    """So many requests, `width` of them side by side."""
    gate = asyncio.Semaphore(width)

    async def next_one(number: int) -> Timed:
        async with gate:
            return await one(number)

    return await asyncio.gather(*map(next_one, range(count)))


def spread(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"mean": round(mean(values or [0.0]), 4)}
    cuts = quantiles(values, n=20)
    return {"mean": round(mean(values), 4), "p50": round(cuts[9], 4), "p95": round(cuts[18], 4)}


async def throughput(load: Load, count: int, width: int) -> dict[str, Any]:
    began = time.perf_counter()
    found = await at_once(count, width, lambda n: load.ask(n, LENGTHS[n % len(LENGTHS)]))
    took = time.perf_counter() - began
    return {
        "concurrency": width,
        "requests": count,
        "tokens_per_second": round(sum(one.tokens for one in found) / took, 1),
        "ttft": spread([one.first for one in found]),
        "ttlt": spread([one.last for one in found]),
        "between_texts": spread([gap for one in found for gap in one.between]),
        "statuses": sorted({one.status for one in found}),
    }


async def storm(load: Load, count: int) -> dict[str, Any]:
    draw = random.Random(15)
    leaves = [draw.random() for _ in range(count)]
    await at_once(count, count, lambda n: load.ask(n, 96, leave=leaves[n]))
    return {"aborted": count, "idle_afterwards": await load.idle()}


async def overload(load: Load, capacity: int) -> dict[str, Any]:
    """Ten times what is let in: those inside against the same without the others."""
    alone = await throughput(load, capacity, capacity)
    found = await at_once(10 * capacity, 10 * capacity, lambda n: load.ask(n, LENGTHS[n % 3]))
    inside = [one for one in found if one.status == 200]
    turned = [one for one in found if one.status != 200]
    took = max((one.last for one in inside), default=0.0)
    return {
        "accepted": len(inside),
        "turned_away": len(turned),
        "statuses": sorted({one.status for one in turned}),
        "turned_away_after": spread([one.last for one in turned]),
        "tokens_per_second": round(sum(one.tokens for one in inside) / took, 1) if took else 0,
        "alone": alone["tokens_per_second"],
    }


async def measure(
    url: str, model: str, requests: int, widths: list[int], aborts: int, capacity: int
) -> dict[str, Any]:
    load = Load(url, model)
    try:
        await load.ask(0, 8)
        found: dict[str, Any] = {"model": model}
        found["throughput"] = [await throughput(load, requests, width) for width in widths]
        if aborts:
            found["storm"] = await storm(load, aborts)
        if capacity:
            found["overload"] = await overload(load, capacity)
        return found
    finally:
        await load.http.aclose()


def main(
    url: Annotated[str, typer.Argument(help="Of the server.")],
    model: str = "bim_dflash",
    requests: int = 16,
    width: list[int] = [1, 4, 16],  # noqa: B006
    aborts: Annotated[int, typer.Option(help="Clients that leave at random moments.")] = 0,
    capacity: Annotated[int, typer.Option(help="The server's --max-queue, for overload.")] = 0,
) -> None:
    """Ask a server for many answers at once, and say how it fared."""
    print(json.dumps(asyncio.run(measure(url, model, requests, width, aborts, capacity)), indent=1))


if __name__ == "__main__":
    typer.run(main)
