"""What a running server does when clients leave, and when its engine is killed.

    python -m tools.serve.faults storm http://127.0.0.1:8000 --clients 500
    python -m tools.serve.faults kill http://127.0.0.1:8000 --server PID

Every command prints one JSON object, and exits 1 where something was lost or left behind."""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from typing import Annotated, Any

import typer

from .asking import CHAT, LENGTHS, Client, chat, children_of

app = typer.Typer(add_completion=False, help=__doc__)
Url = Annotated[str, typer.Argument(help="Of the server.")]
SECONDS = 4.0  # within which everybody has left


async def text_of(client: Client, model: str) -> str:
    """An answer that has to be the same before and after."""
    await client.ready()
    status, body = await client.call("POST", CHAT, chat(model, 1, 24))
    if status != 200:
        return f"status {status}"
    return str(json.loads(body)["choices"][0]["message"]["content"])


async def stormy(client: Client, model: str, clients: int) -> dict[str, Any]:
    """All come at once, and each leaves at a moment of its own."""
    draw, before = random.Random(15), await text_of(client, model)
    leaves = [draw.random() * SECONDS for _ in range(clients)]
    asked = (client.ask(chat(model, n, 96), leave=leaves[n]) for n in range(clients))
    found = await asyncio.gather(*asked)
    began = time.perf_counter()
    idle = await client.idle()
    return {
        "clients": clients,
        "statuses": dict(Counter(one.status for one in found)),
        "left_while_it_was_written": sum(bool(one.arrivals) and not one.ended for one in found),
        "idle_afterwards": idle,
        "idle_after_seconds": round(time.perf_counter() - began, 1),
        "slots_left": await client.metric("specsot:kv_slots_used"),
        "requests_left": await client.metric("specsot:requests_open"),
        "same_text": before == await text_of(client, model),
    }


async def killed(client: Client, model: str, server: int, width: int) -> dict[str, Any]:
    """The engine's process dies while it decodes for `width` clients."""
    before, (engine,) = await text_of(client, model), children_of(server)[-1:]
    asked = [
        asyncio.create_task(client.ask(chat(model, n, LENGTHS[-1], ignore_eos=True)))
        for n in range(width)
    ]
    while not await client.metric("specsot:requests_running"):
        await asyncio.sleep(0.05)
    os.kill(engine, signal.SIGKILL)
    began = time.perf_counter()
    await asyncio.sleep(0.02)
    status, _ = await client.call("POST", CHAT, chat(model, 0, 4))
    refused = time.perf_counter() - began
    found = await asyncio.gather(*asked)
    told = time.perf_counter() - began
    await client.ready()
    back = time.perf_counter() - began
    return {
        "open": width,
        "told": dict(Counter(one.error or str(one.status) for one in found)),
        "all_told_after_s": round(told, 3),
        "next_request": status,
        "next_request_after_s": round(refused, 3),
        "back_after_s": round(back, 2),
        "same_text": before == await text_of(client, model),
        "idle_afterwards": await client.idle(),
    }


def ended(found: dict[str, Any]) -> None:
    """Print it; a fault is the exit code."""
    print(json.dumps(found, indent=1))
    good = found["idle_afterwards"] and found["same_text"]
    raise typer.Exit(0 if good else 1)


@app.command()
def storm(url: Url, model: str = "bim_dflash", clients: int = 500) -> None:
    """Clients that disconnect at random moments; nothing of them may stay."""
    ended(asyncio.run(stormy(Client(url), model, clients)))


@app.command()
def kill(
    url: Url,
    server: Annotated[int, typer.Option(help="Process id of `specsot serve`.")],
    model: str = "bim_dflash",
    width: int = 16,
) -> None:
    """kill -9 of the engine's process under load."""
    ended(asyncio.run(killed(Client(url), model, server, width)))


if __name__ == "__main__":
    app()
