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
from hashlib import sha256
from queue import SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError

from ..prepare.job import Job
from ..prepare.options import ClusterBlock
from .link import (
    Connection,
    HostError,
    Pipe,
    WorkerListener,
    WorkerSource,
    WorkerSpec,
    connect_to,
)
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


class RayHost:
    """Runs a worker as an actor of the cluster that this process is a driver of.

    Without a job the actor ends with its connection; else only if it is lost.

    caller: the thread that calls Ray. gpus: of the actor. job: digest of what the worker loads; a
    free actor of the same job is used before one is started. detached: the actor outlives this
    driver. deadline: seconds in which a free actor has to answer. adopted: its actor was there
    before.
    """

    def __init__(
        self,
        listener: WorkerListener,
        caller: ThreadPoolExecutor,
        *,
        gpus: int,
        job: str,
        detached: bool,
        deadline: float,
    ) -> None:
        self.adopted = False
        self.pid: int | None = None
        self._listener = listener
        self._caller = caller
        self._job = job
        self._deadline = deadline
        self._settings: dict[str, Any] = {
            # No processor of Ray's count, which would limit the number of workers; over the
            # machines of a cluster, as Ray would fill one first.
            **{"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": "SPREAD"},
            **{"max_restarts": 0, "max_task_retries": 0},
            **({"lifetime": "detached"} if detached else {}),
        }
        self._ended = False
        self._actor: Any = None
        self._expected: asyncio.Future[Connection] | None = None

    async def start(self) -> Pipe:
        self._ended = False
        secret, expected = self._listener.expect()
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
            self._listener.expected.pop(secret, None)
        return pipe

    async def _connect(self, secret: str) -> None:
        """Have a free actor of the same job connect, else a new one."""
        for actor in await self._call(self._present) if self._job else ():
            with suppress(RayError, TimeoutError):
                if await self._send_secret(actor, secret, self._deadline):
                    self._actor = actor
                    self.adopted = True
                    return
        self.adopted = False
        kind: Any = ray.remote(RayWorker)
        names = {"name": f"{self._job}-{secrets.token_hex(8)}"} if self._job else {}
        options = kind.options(**self._settings, **names)
        self._actor = await self._call(lambda: options.remote(os.getcwd()))
        await self._send_secret(self._actor, secret, START_DEADLINE)

    def _present(self) -> list[Any]:
        """Actors of the same job."""
        actors = []
        for name in ray.util.list_named_actors(all_namespaces=False):
            if name.startswith(f"{self._job}-"):
                with suppress(ValueError):
                    actors.append(ray.get_actor(name))
        return actors

    async def _send_secret(self, actor: Any, secret: str, seconds: float) -> bool:
        """Whether the actor connects."""
        address = self._listener.address
        port = self._listener.port
        answer = await self._call(lambda: actor.connect.remote(address, port, secret).future())
        return bool(await asyncio.wait_for(asyncio.wrap_future(answer), seconds))

    async def _call(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._caller, function)

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


class RayWorkers:
    """Workers on the cluster that this process is a driver of.

    start: first message of worker number i with part p of the weights. Those of a `Load` may have
    been there before, and be used again. parts: of the weights. detached: they outlive this driver.
    """

    def __init__(
        self,
        block: ClusterBlock,
        start: Callable[[int, int], Start | Load],
        *,
        parts: int = 1,
        detached: bool = False,
    ) -> None:
        self._block = block
        self._start = start
        self._detached = detached
        self._caller = ThreadPoolExecutor(1)
        self._listener = WorkerListener(block.interface)
        self._hosts: list[RayHost] = []
        self.source = WorkerSource(self._spec, parts, [self._listener])

    @classmethod
    def of_job(cls, job: Job, block: ClusterBlock, *, detached: bool = False) -> "RayWorkers":
        """Workers of a run."""
        parts = parts_of(job, block)
        return cls(
            block,
            lambda number, part: Load(job_values(job, block, number, part)),
            parts=parts,
            detached=detached,
        )

    def _spec(self, number: int, part: int) -> WorkerSpec:
        start = self._start(number, part)
        job = ""
        options = start.options if isinstance(start, Start) else start.job["options"]
        if isinstance(start, Load):
            job = sha256(json.dumps(start.job).encode()).hexdigest()[:12]
        host = RayHost(
            self._listener,
            self._caller,
            gpus=int(str(options["device"]).startswith("cuda")),
            job=job,
            detached=self._detached,
            deadline=self._block.deadline,
        )
        self._hosts.append(host)
        return WorkerSpec(start, host)

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
        for name in sorted(ray.util.list_named_actors(all_namespaces=False)):
            with suppress(RayError, GetTimeoutError, ValueError):
                state: Any = ray.get_actor(name).state.remote()
                yield name, str(ray.get(state, timeout=STATE_DEADLINE))
