"""Where replicas of other processes come in: a port, and a secret for each that is expected."""

import asyncio
import json
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass

from ..wire.hosts import Pipe
from ..wire.protocol import MOST

SECRET = 32  # letters
PATIENCE = 10.0  # seconds that somebody has to say who it is


@dataclass(frozen=True, slots=True)
class ArrivedReplica:
    """A replica that is there. machine, pid: of its process."""

    pipe: Pipe
    machine: str
    pid: int

    @property
    def local_pid(self) -> int | None:
        """Of a process of this machine."""
        return self.pid if self.machine == socket.gethostname() else None


class Reception:
    """Listens at an address of this machine; whoever does not know a secret is sent away."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.port = 0
        self._expected: dict[str, asyncio.Future[ArrivedReplica]] = {}
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen from now on."""
        self._server = await asyncio.start_server(self._came, self.address, 0, limit=MOST)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Nobody comes in any more."""
        if self._server is not None:
            self._server.close()

    def expect(self) -> tuple[str, "asyncio.Future[ArrivedReplica]"]:
        """A secret, and whoever will know it."""
        secret = secrets.token_hex(SECRET // 2)
        self._expected[secret] = asyncio.get_running_loop().create_future()
        return secret, self._expected[secret]

    def give_up(self, secret: str) -> None:
        """Whoever knows it is not expected any more."""
        self._expected.pop(secret, None)

    async def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Whoever says nothing that is known, or nothing in time, is sent away."""
        with suppress(OSError, EOFError, ValueError, KeyError, TimeoutError):
            async with asyncio.timeout(PATIENCE):
                secret = (await reader.readexactly(SECRET)).decode()
                expected = self._expected.pop(secret)
                said = json.loads(await reader.readline())
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            arrival = ArrivedReplica((reader, writer), str(said["machine"]), int(said["pid"]))
            if not expected.done():
                expected.set_result(arrival)
                return
        writer.close()


def arrive(address: str, port: int, secret: str, pid: int) -> socket.socket:
    """Come in, from a replica's process; raises OSError."""
    pipe = socket.create_connection((address, port), timeout=PATIENCE)
    pipe.settimeout(None)
    pipe.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    said = {"machine": socket.gethostname(), "pid": pid}
    pipe.sendall(secret.encode() + json.dumps(said).encode() + b"\n")
    return pipe
