"""Workers as Ray actors: a process each, which live on while process groups change.

`set_up_ray` must precede the import of this module.
"""

import asyncio
import json
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import sha256
from queue import SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError

from ..prepare.job import Job
from ..prepare.options import ClusterBlock
from .link import Connection, HostError, Pipe, WorkerListener, WorkerSource, connect_to
from .protocol import Load, Start
from .ray_cluster import ray_driver
from .worker_groups import WorkerGroups
from .worker_loop import job_values, parts_of

START_DEADLINE = 120.0  # seconds until a worker's process has to connect
END_DEADLINE = 1.0  # seconds that a process has to end after it was killed by Ray
POLL_INTERVAL = 0.02
STATE_DEADLINE = 5.0  # seconds
Result = TypeVar("Result")


class RayWorker:
    """The actor: its process serves one connection after another on one thread."""

    def __init__(self, folder: str) -> None:
        with suppress(OSError):  # another machine may not have it
            os.chdir(folder)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
        self._connections: SimpleQueue[socket.socket] = SimpleQueue()
        self._busy = False
        Thread(target=self._live, name="specsot-worker", daemon=True).start()

    def connect(self, address: str, port: int, secret: str) -> bool:
        """Connect to a driver, unless there is one."""
        if self._busy:
            return False
        self._busy = True
        try:
            self._connections.put(connect_to(address, port, secret))
        except OSError:
            self._busy = False
            raise
        return True

    def state(self) -> str:
        return "in use" if self._busy else "free"

    def _live(self) -> None:
        from .process import WorkerProcess

        process = WorkerProcess()
        while True:
            process.serve(self._connections.get())
            self._busy = False


@dataclass(eq=False)
class RayHost:
    """Runs a worker as an actor of the cluster that this process is a driver of.

    With a `Start` the actor ends with its connection; with a `Load` only if it is lost, and a free
    actor of the same job is used before one is started.

    caller: the thread that calls Ray. deadline: seconds in which a free actor has to answer.
    detached: the actor outlives this driver. adopted: it was there before.
    """

    first: Start | Load
    listener: WorkerListener
    caller: ThreadPoolExecutor
    deadline: float
    detached: bool
    adopted: bool = False
    pid: int | None = None
    _ended: bool = False
    _actor: Any = None
    _expected: asyncio.Future[Connection] | None = None

    @property
    def _job(self) -> str:
        """Digest of what the worker of a run loads."""
        if isinstance(self.first, Start):
            return ""
        return sha256(json.dumps(self.first.job).encode()).hexdigest()[:12]

    async def start(self) -> Pipe:
        self._ended = False
        secret, expected = self.listener.expect()
        self._expected = expected
        connecting = asyncio.ensure_future(self._connect(secret))
        try:
            async with asyncio.timeout(START_DEADLINE):
                either: set[asyncio.Future[Any]] = {expected, connecting}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not expected.done():
                    connecting.result()
                pipe, self.pid = await expected
        except TimeoutError:
            raise HostError(f"it has not connected within {START_DEADLINE:g} s") from None
        except HostError:
            raise
        except (RayError, OSError, RuntimeError, ValueError) as error:
            cause = getattr(error, "cause", None) or error
            lines = str(cause).strip().splitlines()
            raise HostError(lines[-1] if lines else type(error).__name__) from None
        finally:
            connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
            self.listener.expected.pop(secret, None)
        return pipe

    async def _connect(self, secret: str) -> None:
        """Have a free actor of the same job connect, else a new one."""
        for _, actor in await self._call(lambda: actors(f"{self._job}-")) if self._job else ():
            with suppress(RayError, TimeoutError):
                if await self._send_secret(actor, secret, self.deadline):
                    self._actor = actor
                    self.adopted = True
                    return
        self.adopted = False
        kind: Any = ray.remote(RayWorker)
        first = self.first
        options = first.options if isinstance(first, Start) else first.job["options"]
        settings: dict[str, Any] = {"lifetime": "detached"} if self.detached else {}
        settings |= {"name": f"{self._job}-{secrets.token_hex(8)}"} if self._job else {}
        # No processor of Ray's count, which would limit the number of workers; over the machines of
        # a cluster, as Ray would fill one first.
        actor = kind.options(
            num_cpus=0,
            num_gpus=int(str(options["device"]).startswith("cuda")),
            scheduling_strategy="SPREAD",
            max_restarts=0,
            max_task_retries=0,
            **settings,
        )
        self._actor = await self._call(lambda: actor.remote(os.getcwd()))
        await self._send_secret(self._actor, secret, START_DEADLINE)

    async def _send_secret(self, actor: Any, secret: str, seconds: float) -> bool:
        """Whether the actor connects."""
        address = self.listener.address
        port = self.listener.port
        answer = await self._call(lambda: actor.connect.remote(address, port, secret).future())
        return bool(await asyncio.wait_for(asyncio.wrap_future(answer), seconds))

    async def _call(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.caller, function)

    def end(self) -> None:
        """Its process is free, or ends, once the connection is closed."""
        self._ended = True
        if self._expected is not None and not self._expected.done():
            self._expected.set_exception(HostError("it is not needed any longer"))

    async def reap(self) -> None:
        if not (self._job and self._ended):
            await self._call(self.kill)

    def kill(self) -> None:
        """End the actor's process; on the thread that calls Ray."""
        actor = self._actor
        pid = self.pid
        self._actor = None
        self.pid = None
        if actor is not None:
            with suppress(RayError, ValueError, RuntimeError):
                ray.kill(actor, no_restart=True)
        if pid is not None:
            deadline = monotonic() + END_DEADLINE
            with suppress(OSError):  # it has ended
                while monotonic() < deadline:
                    os.kill(pid, 0)
                    sleep(POLL_INTERVAL)
                os.kill(pid, signal.SIGKILL)  # a stopped process does not react to Ray


def actors(prefix: str = "") -> list[tuple[str, Any]]:
    handles = []
    for name in sorted(ray.util.list_named_actors(all_namespaces=False)):
        if name.startswith(prefix):
            with suppress(ValueError):  # it has ended
                handles.append((name, ray.get_actor(name)))
    return handles


class RayWorkers:
    """Workers on the cluster that this process is a driver of. first: message of worker number i
    with part p of the weights. Those of a `Load` may have been there before, and be used again.
    parts: of the weights. detached: they outlive this driver."""

    def __init__(
        self,
        block: ClusterBlock,
        first: Callable[[int, int], Start | Load],
        *,
        parts: int = 1,
        detached: bool = False,
    ) -> None:
        self._detached = detached
        self._caller = ThreadPoolExecutor(1)
        self._hosts: list[RayHost] = []
        listener = WorkerListener(block.interface)

        def host(number: int, part: int) -> RayHost:
            message = first(number, part)
            host = RayHost(message, listener, self._caller, block.deadline, detached=detached)
            self._hosts.append(host)
            return host

        self.source = WorkerSource(host, parts, [listener])

    @classmethod
    def of_job(cls, job: Job, block: ClusterBlock, *, detached: bool = False) -> "RayWorkers":

        def load(number: int, part: int) -> Load:
            return Load(job_values(job, block, number, part))

        return cls(block, load, parts=parts_of(job, block), detached=detached)

    def close(self) -> None:
        """End the processes that this driver has started, unless they outlive it."""
        for host in self._hosts:
            if not (self._detached or host.adopted):
                self._caller.submit(host.kill)
        self._caller.shutdown()


def load_workers(job: Job, block: ClusterBlock) -> None:
    """Start workers of a job on a cluster that stay, and wait until their models are loaded. Raises
    ClusterError: they cannot start."""
    with (
        ray_driver(block.address),
        closing(RayWorkers.of_job(job, block, detached=True)) as workers,
        closing(WorkerGroups(workers.source, block, lambda record: None)) as groups,
    ):
        groups.load_()


def worker_states(address: str) -> Iterator[tuple[str, str]]:
    """Name and state of the workers of a cluster; raises ClusterError."""
    with ray_driver(address):
        for name, actor in actors():
            with suppress(RayError, GetTimeoutError):
                yield name, str(ray.get(actor.state.remote(), timeout=STATE_DEADLINE))
