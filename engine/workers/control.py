"""How other processes of this machine read and change the replicas of a server with --workers.

A socket that only its owner may use: a client sends one JSON line and receives lines until its
order is done.
"""

import asyncio
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import ClusterError, UsageError
from .ray_cluster import cluster_file
from .router import Router, ScaleError

MAX_PATH_BYTES = 100  # of a socket; systems allow few more
MAX_REPLICAS = 1024
ANSWER_DEADLINE = 10.0  # seconds, of orders that take no time


def control_path() -> Path:
    """The socket, in the folder of the cluster's file."""
    return cluster_file().with_suffix(".sock")


class ReplicaControl:
    """The server's side of the socket.

    Raises:
        UsageError: another server with --workers runs, or the socket cannot be created.
    """

    def __init__(self, router: Router, address: str) -> None:
        self._router = router
        self._address = address
        self._listener = _listener(control_path())
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, sock=self._listener)

    def close(self) -> None:
        self._listener.close()
        control_path().unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def reply(values: dict[str, Any]) -> None:
            writer.write(json.dumps(values).encode() + b"\n")

        try:
            await self._execute(json.loads(await reader.readline()), reply)
        except ScaleError as error:
            reply({"failed": str(error)})
        except (ValueError, KeyError, TypeError) as error:
            reply({"failed": f"not an order: {error}"})
        finally:
            with suppress(ConnectionError):
                await writer.drain()
            writer.close()

    async def _execute(
        self, order: dict[str, Any], reply: Callable[[dict[str, Any]], None]
    ) -> None:
        if order["do"] == "scale" and 1 <= int(order["count"]) <= MAX_REPLICAS:
            await self._router.scale(int(order["count"]), lambda line: reply({"line": line}))
        elif order["do"] == "end":
            await self._router.close()
        elif order["do"] != "state":
            raise ValueError(order)
        replicas = [asdict(facts) for facts in self._router.replicas]
        graphs = [*self._router.graphs]
        reply({"address": self._address, "graphs": graphs, "replicas": replicas})


def ask_router(
    order: str, report: Callable[[str], None], count: int | None = None
) -> dict[str, Any] | None:
    """Send an order to the server with --workers of this machine, and wait until it is done.

    Args:
        order: `state`, `scale` (to `count`) or `end`. report: takes the lines in between.

    Returns:
        Address, graphs and replicas of the server; None if there is none.

    Raises:
        ClusterError: the order failed, or the server ended before it was done.
    """
    with suppress(OSError), socket.socket(socket.AF_UNIX) as pipe:
        pipe.settimeout(None if order == "scale" else ANSWER_DEADLINE)
        pipe.connect(str(control_path()))
        pipe.sendall(json.dumps({"do": order, "count": count}).encode() + b"\n")
        with pipe.makefile("rb") as lines:
            for line in lines:
                values: dict[str, Any] = json.loads(line)
                if "failed" in values:
                    raise ClusterError(str(values["failed"]))
                if "line" not in values:
                    return values
                report(str(values["line"]))
        raise ClusterError("the server has ended before the order was done")
    return None


def _listener(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise UsageError(f"{path}: too long for the path of a socket")
    if ask_router("state", lambda line: None) is not None:
        raise UsageError("another server with --workers runs on this machine")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)  # for the owner alone
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    return listener
