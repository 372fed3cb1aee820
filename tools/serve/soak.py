"""Mixed load for a long time: no request fails, each gets its answer, memory does not grow.

    python -m tools.serve.soak http://127.0.0.1:8000 --server PID --minutes 30

Prints a line of JSON every half minute, and a summary; exits 1 where an answer was wrong. Memory
has a slope in MiB per minute and its standard error."""

import asyncio
import json
import random
import time
from collections import Counter
from math import sqrt
from statistics import fmean, linear_regression
from typing import Annotated, Any

import typer

from .asking import CHAT, LENGTHS, Client, chat, children_of, resident

EVERY = 30.0  # seconds between two samples of memory
BAD: tuple[dict[str, Any], ...] = (
    {"n": 0},
    {"temperature": 9},
    {"messages": []},
    {"max_tokens": 10**9},
    {"tools": [{"type": "function"}]},
    {"logit_bias": {"999999": 1}},
)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


class Soak:
    """Clients that send requests of every kind."""

    def __init__(self, url: str, models: list[str], minutes: float) -> None:
        self.client, self.models = Client(url), models
        self.end = time.perf_counter() + 60 * minutes
        self.statuses: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.tokens = 0

    async def one(self, number: int) -> None:
        """A client: one request after another, each of a kind that is drawn."""
        draw = random.Random(number)
        while time.perf_counter() < self.end:
            kind = draw.choices((self.stream, self.whole, self.leave, self.bad), (5, 4, 2, 1))[0]
            model = draw.choice(self.models)
            body = chat(model, draw.randrange(10_000), draw.choice(LENGTHS))
            await kind(body, draw)

    async def stream(self, body: dict[str, Any], draw: random.Random) -> None:
        found = await self.client.ask({**body, "temperature": draw.choice((0, 0.8))})
        self.tokens += found.tokens
        self.saw("stream", found.status, found.ended and not found.error and found.status == 200)

    async def leave(self, body: dict[str, Any], draw: random.Random) -> None:
        found = await self.client.ask(body, leave=draw.random())
        self.saw("left", found.status, found.status in (0, 200) and not found.error)

    async def bad(self, body: dict[str, Any], draw: random.Random) -> None:
        status, _ = await self.client.call("POST", CHAT, {**body, **draw.choice(BAD)})
        self.saw("bad", status, status == 400)

    async def whole(self, body: dict[str, Any], draw: random.Random) -> None:
        more: dict[str, Any] = draw.choice(
            (
                {"n": 2, "temperature": 1.0},
                {"stop": ["e", "."]},
                {"response_format": FORMAT},
                {"logprobs": True, "top_logprobs": 2, "specsot": {"skeleton": False}},
                {"cache_salt": str(draw.randrange(1000))},
                {"presence_penalty": 1.0, "logit_bias": {"70": 2}},
            )
        )
        status, body_got = await self.client.call("POST", CHAT, {**body, **more})
        if status == 200:
            self.tokens += json.loads(body_got)["usage"]["completion_tokens"]
        self.saw("whole", status, status == 200)

    def saw(self, kind: str, status: int, good: bool) -> None:
        self.statuses[f"{kind} {status}"] += 1
        if not good:
            self.wrong.append(f"{kind} {status}")


async def sampled(soak: Soak, server: int) -> list[tuple[float, float, float]]:
    """(minutes, MiB of the HTTP side, MiB of the engine) every half minute."""
    began, found = time.perf_counter(), list[tuple[float, float, float]]()
    while time.perf_counter() < soak.end:
        engine = children_of(server)[-1]
        now = (time.perf_counter() - began) / 60
        found.append((round(now, 2), round(resident(server), 1), round(resident(engine), 1)))
        told = {"minutes": now, "http_mib": found[-1][1], "engine_mib": found[-1][2]}
        print(json.dumps({**told, "requests": soak.statuses.total()}), flush=True)
        await asyncio.sleep(min(EVERY, max(soak.end - time.perf_counter(), 0.1)))
    return found


def slope(minutes: list[float], values: list[float]) -> dict[str, float]:
    """The best straight line's slope in units per minute, and its standard error."""
    line = linear_regression(minutes, values)
    errors = [
        value - line.slope * at - line.intercept for at, value in zip(minutes, values, strict=True)
    ]
    spread = sum((at - fmean(minutes)) ** 2 for at in minutes)
    variance = sum(error**2 for error in errors) / (len(minutes) - 2)
    return {"slope": round(line.slope, 4), "standard_error": round(sqrt(variance / spread), 4)}


async def soaked(url: str, models: list[str], server: int, minutes: float, width: int) -> Any:
    await Client(url).ready()
    soak = Soak(url, models, minutes)
    samples = asyncio.create_task(sampled(soak, server))
    await asyncio.gather(*map(soak.one, range(width)))
    found = await samples
    late = found[len(found) // 3 :]  # caches are full by then
    times = [at for at, _, _ in late]
    return {
        "minutes": minutes,
        "clients": width,
        "requests": soak.statuses.total(),
        "tokens": soak.tokens,
        "statuses": dict(sorted(soak.statuses.items())),
        "wrong": soak.wrong[:20],
        "http_mib": [found[0][1], late[0][1], late[-1][1]],
        "engine_mib": [found[0][2], late[0][2], late[-1][2]],
        "http_mib_a_minute": slope(times, [one for _, one, _ in late]),
        "engine_mib_a_minute": slope(times, [one for _, _, one in late]),
        "idle_afterwards": await soak.client.idle(),
    }


def main(
    url: Annotated[str, typer.Argument(help="Of the server.")],
    server: Annotated[int, typer.Option(help="Process id of `specsot serve`.")],
    model: list[str] = ["bim_dflash", "dflash", "autoregressive"],  # noqa: B006
    minutes: float = 30.0,
    width: int = 6,
) -> None:
    """Send requests of every kind for so many minutes."""
    found = asyncio.run(soaked(url, model, server, minutes, width))
    print(json.dumps(found, indent=1))
    raise typer.Exit(0 if found["idle_afterwards"] and not found["wrong"] else 1)


if __name__ == "__main__":
    typer.run(main)
