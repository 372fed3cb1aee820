"""What HTTP costs: time per token over a server against the same engine in this process, paired.

`python -m tools.serve.overhead http://127.0.0.1:8000 --model dflash`"""

import asyncio
import json
import time
from statistics import median
from typing import Annotated, Any

import typer

from specsot import Engine
from specsot.engine.prepare.inputs import Prompt

from .asking import QUESTIONS, Client, chat


def inside(engine: Engine, width: int, tokens: int) -> float:
    """Seconds per token of so many requests side by side, in this process."""
    began = time.perf_counter()
    handles = [
        engine.submit(Prompt(f"{began}/{n}", f"{QUESTIONS[n % len(QUESTIONS)]} ({n})", 0, tokens))
        for n in range(width)
    ]
    count = sum(len(s.tokens) for one in handles for s in one.result().sections)
    count += sum(len(one.result().outline_tokens) for one in handles)
    return (time.perf_counter() - began) / count


async def outside(url: str, model: str, width: int, tokens: int) -> float:
    """The same over HTTP, streamed."""
    client, began = Client(url), time.perf_counter()
    found = await asyncio.gather(*(client.ask(chat(model, n, tokens)) for n in range(width)))
    took = time.perf_counter() - began
    return took / sum(one.tokens for one in found)


def main(
    url: Annotated[str, typer.Argument(help="Of the server.")],
    model: str = "dflash",
    tokens: int = 96,
    rounds: int = 5,
) -> None:
    """Ratios of time per token, HTTP to in-process, at concurrency 1 and 16; medians of pairs."""
    asyncio.run(Client(url).ready())
    with Engine(model) as engine:
        for width in (1, 16):
            inside(engine, width, 8)
            asyncio.run(outside(url, model, width, 8))
            pairs: list[tuple[float, float]] = []
            for _ in range(rounds):
                there = asyncio.run(outside(url, model, width, tokens))
                pairs.append((there, inside(engine, width, tokens)))
            found: dict[str, Any] = {
                "concurrency": width,
                "http_ms_per_token": round(1e3 * median(there for there, _ in pairs), 3),
                "in_process_ms_per_token": round(1e3 * median(here for _, here in pairs), 3),
                "ratio": round(median(there / here for there, here in pairs), 3),
                "ratios": sorted(round(there / here, 3) for there, here in pairs),
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    typer.run(main)
