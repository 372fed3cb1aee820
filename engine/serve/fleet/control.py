"""How a fleet is told from another process how many replicas it is to have, and what it has.

A socket of this machine that only its owner may use: whoever asks sends one JSON line and is given
lines until what was asked for is done.
"""

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...cluster.standing import place
from ...errors import ClusterError, UsageError
from .fleet import Fleet
from .members import ScaleError

LONGEST = 100  # bytes of a socket's path; systems take few more
MOST = 1024  # replicas
PATIENCE = 10.0  # seconds of who asks for nothing that takes its time


def control_path() -> Path:
    """Where a fleet of this machine is told, beside the file of the cluster."""
    return place().with_suffix(".sock")


class Control:
    """The fleet's side.

    Raises:
        UsageError: another fleet is there already, or its socket cannot be.
    """

    def __init__(self, fleet: Fleet, address: str) -> None:
        self._fleet = fleet
        self._address = address
        self._listener = _listener(control_path())
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Take in what is asked from now on."""
        self._server = await asyncio.start_unix_server(self._asked, sock=self._listener)

    def close(self) -> None:
        """Nobody can ask any more."""
        self._listener.close()
        control_path().unlink(missing_ok=True)

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def tell(**said: Any) -> None:
            writer.write(json.dumps(said).encode() + b"\n")

        try:
            order = json.loads(await reader.readline())
            await self._do(order, tell)
        except ScaleError as error:
            tell(failed=str(error))
        except (ValueError, KeyError, TypeError) as error:
            tell(failed=f"cannot be understood: {error}")
        finally:
            with suppress(ConnectionError):
                await writer.drain()
            writer.close()

    async def _do(self, order: dict[str, Any], tell: Callable[..., None]) -> None:
        if order["do"] == "scale" and 1 <= int(order["count"]) <= MOST:
            await self._fleet.scale(int(order["count"]), lambda line: tell(line=line))
        elif order["do"] == "end":
            await self._fleet.close()
        elif order["do"] != "state":
            raise ValueError(order)
        facts = [asdict(one) for one in self._fleet.replicas]
        tell(address=self._address, graphs=[*self._fleet.graphs], replicas=facts)


def ask_fleet(do: str, tell: Callable[[str], None], **more: Any) -> dict[str, Any] | None:
    """Ask the fleet of this machine, and wait until it is done.

    Args:
        do: `state`, `scale` (count) or `end`. tell: is given the lines that it says meanwhile.

    Returns:
        Where it is and what it has then; None if there is no fleet.

    Raises:
        ClusterError: it cannot, or has ended before it was done.
    """
    with suppress(OSError), socket.socket(socket.AF_UNIX) as pipe:
        pipe.settimeout(None if do == "scale" else PATIENCE)
        pipe.connect(str(control_path()))
        pipe.sendall(json.dumps({"do": do, **more}).encode() + b"\n")
        for said in _lines(pipe):
            if "failed" in said:
                raise ClusterError(str(said["failed"]))
            if "line" not in said:
                return said
            tell(str(said["line"]))
        raise ClusterError("the server has ended meanwhile")
    return None


def _lines(pipe: socket.socket) -> Iterator[dict[str, Any]]:
    with pipe.makefile("rb") as lines:
        for line in lines:
            yield json.loads(line)


def _listener(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > LONGEST:
        raise UsageError(f"{path}: too long for the path of a socket")
    if ask_fleet("state", lambda line: None) is not None:
        raise UsageError("a server with --workers is there: its replicas are scaled from here")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    with _for_the_owner():
        listener.bind(str(path))
    return listener


@contextmanager
def _for_the_owner() -> Iterator[None]:
    """Nobody else may use what is made meanwhile."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
