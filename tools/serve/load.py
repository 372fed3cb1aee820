"""Load on a running server: times by concurrency, and what ten times too much of it does.

    python -m tools.serve.load widths http://127.0.0.1:8000 --model bim_dflash
    python -m tools.serve.load overload http://127.0.0.1:8000 --model dflash --capacity 16

Every command prints one JSON object. `--capacity` is the server's --max-queue."""

import asyncio
import json
import random
import time
from collections import Counter
from typing import Annotated, Any

import typer

from .asking import LENGTHS, Client, Timed, at_once, chat, spread

app = typer.Typer(add_completion=False, help=__doc__)
Url = Annotated[str, typer.Argument(help="Of the server.")]


async def at_width(client: Client, model: str, count: int, width: int) -> dict[str, Any]:
    """So many requests of mixed lengths, `width` of them side by side."""
    began = time.perf_counter()
    lengths = [LENGTHS[n % len(LENGTHS)] for n in range(count)]
    found = await at_once(count, width, lambda n: client.ask(chat(model, n, lengths[n])))
    took = time.perf_counter() - began
    return {
        "concurrency": width,
        "requests": count,
        "tokens": sum(one.tokens for one in found),
        "tokens_per_second": round(sum(one.tokens for one in found) / took, 1),
        "ttft_ms": spread([one.first for one in found]),
        "ttlt_ms": spread([one.last for one in found]),
        "inter_token_ms": spread([gap for one in found for gap in one.gaps]),
        "statuses": dict(Counter(one.status for one in found)),
    }


def against(rows: list[dict[str, Any]]) -> list[str]:
    """A table whose figures are ratios to the first row."""
    one, lines = rows[0], ["| concurrency | throughput | TTFT | TTLT | inter-token p50 | p95 |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        speed = row["tokens_per_second"] / one["tokens_per_second"]
        times = [row[n]["p50"] / one[n]["p50"] for n in ("ttft_ms", "ttlt_ms", "inter_token_ms")]
        late = row["inter_token_ms"]["p95"] / one["inter_token_ms"]["p95"]
        cells = [f"{value:.2f} x" for value in (speed, *times, late)]
        lines.append(f"| {row['concurrency']} | {' | '.join(cells)} |")
    return lines


@app.command()
def widths(
    url: Url,
    model: str = "bim_dflash",
    requests: Annotated[int, typer.Option(help="At each concurrency, at least.")] = 16,
    width: list[int] = [1, 4, 16, 64],  # noqa: B006
) -> None:
    """Throughput, and times to the first text, to the last and between tokens."""

    async def measure() -> list[dict[str, Any]]:
        client = Client(url)
        await client.ready()
        await client.ask(chat(model, 0, 16))
        return [await at_width(client, model, max(requests, one), one) for one in width]

    rows = asyncio.run(measure())
    print(json.dumps({"model": model, "widths": rows, "table": against(rows)}, indent=1))


async def closed(client: Client, model: str, capacity: int, seconds: float) -> list[Timed]:
    """`capacity` clients who ask again as soon as they are answered."""
    end, found = time.perf_counter() + seconds, list[Timed]()

    async def one(number: int) -> None:
        while time.perf_counter() < end:
            found.append(await client.ask(chat(model, number, LENGTHS[number % 3])))
            number += capacity

    await asyncio.gather(*map(one, range(capacity)))
    return found


async def offered(client: Client, model: str, rate: float, seconds: float) -> list[Timed]:
    """Requests that come at so many a second, whoever is answered."""
    draw, end, tasks = random.Random(15), time.perf_counter() + seconds, []
    while time.perf_counter() < end:
        number = len(tasks)
        body = chat(model, number, LENGTHS[number % 3])
        tasks.append(asyncio.create_task(client.ask(body)))
        await asyncio.sleep(draw.expovariate(rate))
    return await asyncio.gather(*tasks)


def goodput(found: list[Timed], first: float, last: float) -> float:
    """Tokens a second that came between two moments."""
    inside = (n for one in found for at, n in one.arrivals if first <= at <= last)
    return sum(inside) / (last - first)


async def overloaded(client: Client, model: str, capacity: int, seconds: float) -> dict[str, Any]:
    """Ten times what is served in a second: those inside, against the same without the others."""
    await client.ready()
    began = time.perf_counter()
    alone = await closed(client, model, capacity, seconds)
    rate = len(alone) / (time.perf_counter() - began)
    known = goodput(alone, began + seconds / 4, began + seconds)
    began = time.perf_counter()
    found = await offered(client, model, 10 * rate, seconds)
    kept = goodput(found, began + seconds / 4, began + seconds)
    turned = [one for one in found if one.status != 200]
    return {
        "served_per_second": round(rate, 2),
        "offered_per_second": round(len(found) / seconds, 2),
        "accepted": len(found) - len(turned),
        "turned_away": dict(Counter(one.status for one in turned)),
        "turned_away_after_ms": spread([one.last for one in turned]),
        "goodput_alone": round(known, 1),
        "goodput_overloaded": round(kept, 1),
        "goodput_kept": round(kept / known, 3) if known else 0,
        "idle_afterwards": await client.idle(),
    }


@app.command()
def overload(url: Url, model: str = "dflash", capacity: int = 16, seconds: float = 30.0) -> None:
    """Ten times as many requests as are served in the same time."""
    client = Client(url)
    print(json.dumps(asyncio.run(overloaded(client, model, capacity, seconds)), indent=1))


if __name__ == "__main__":
    app()
