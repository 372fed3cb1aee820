"""Workers on Ray: the cluster of this machine, a driver's connection, workers as actors.

Importing this module does not import Ray. Ray authenticates by token, has no dashboard and sends no
statistics here; but it listens on all interfaces of the machine: docs/cluster.md."""

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from queue import SimpleQueue
from threading import Thread, current_thread, main_thread
from time import monotonic, sleep
from typing import Any, TypeVar

from ..errors import ClusterError, UsageError, first_line, message_of
from ..prepare.job import Job
from ..prepare.options import LOCAL, ClusterBlock
from ..shell import complain
from ..signals import ending_with
from . import ray_head
from .link import Connection, Pipe, WorkerListener, WorkerSource, connect_to
from .protocol import Load, ProtocolError, Start, encode, summed

ADDRESS_DEADLINE = 4.0  # seconds in which a cluster has to accept a connection, and to answer
# What begins a gRPC connection (HTTP/2): the preface and empty settings; settings are the answer.
GRPC_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
GRPC_SETTINGS = 4  # the fourth byte of the answer
NO_PORT = 1 << 16  # Ray's autoscaler would serve its metrics on all interfaces, without the token
START_DEADLINE = 120.0  # seconds until a worker's process has to connect
END_DEADLINE = 1.0  # seconds that a process has to end after it was killed by Ray
POLL_INTERVAL = 0.02
WAIT_SILENTLY = 1.0  # seconds until a run says that it waits for others
# Over the machines of a cluster, as Ray would fill one first; without a share of its processors.
SPREAD: Mapping[str, Any] = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
STATE_DEADLINE = 5.0  # seconds
Result = TypeVar("Result")


def set_up_ray(address: str) -> None:
    """Authentication by token, no statistics; must precede the first import of Ray. The token is
    that of `specsot cluster up` at this address, or that of the environment, or a new one. Raises
    UsageError: Ray is not installed. ClusterError: nothing answers at the address."""
    if find_spec("ray") is None:
        raise UsageError("workers are Ray actors: pip install 'specsot[ray]'")
    if address != LOCAL:
        check_address(address)
    cluster = ray_head.standing_cluster()
    os.environ["AUTOSCALER_METRIC_PORT"] = str(NO_PORT)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if cluster is not None and cluster.address == address:
        os.environ["RAY_AUTH_TOKEN"] = cluster.token
    elif "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))


def check_address(address: str) -> None:
    """Raise ClusterError if no server of Ray's kind answers: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ADDRESS_DEADLINE) as pipe:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            pipe.sendall(GRPC_START)
            if pipe.recv(4)[3:] != bytes([GRPC_SETTINGS]):
                raise ClusterError(f"no Ray cluster at {address}: another kind of server answers")
    except OSError as error:
        raise ClusterError(f"no Ray cluster at {address}: {message_of(error)}") from None


@contextmanager
def ray_driver(address: str, workers: int = 1) -> Iterator[None]:
    """Connect this process to a Ray cluster as a driver; LOCAL starts a cluster that ends with the
    process. Restores the signal handlers, because those of Ray end the process without Python
    cleanup. Raises ClusterError: the cluster does not exist, or refuses the token."""
    import ray

    settings: dict[str, Any] = {"namespace": "specsot", "log_to_driver": False}
    settings["logging_level"] = "ERROR"
    in_main = current_thread() is main_thread()
    with ExitStack() as stack:
        if address == LOCAL:
            folder = stack.enter_context(ray_head.driver_folder())
            stack.enter_context(ending_with(partial(ray_head.remove_folder, folder)))
            private: Any = import_module("ray._private.utils")
            private.set_sigterm_handler = lambda handler: None  # Ray's raises SystemExit
            settings |= {"num_cpus": workers, "object_store_memory": ray_head.STORE_BYTES}
            settings |= {"include_dashboard": False, "_temp_dir": folder}
        else:
            settings["address"] = address
        before = signal.getsignal(signal.SIGTERM)
        for tries in range(1, ray_head.HEAD_TRIES + 1):
            try:
                ray.init(**settings)
                break
            except Exception as error:  # Ray raises it as such when its own start takes too long
                why = f"no Ray cluster at {address}"
                if address == LOCAL:
                    ray_head.kill_processes(folder)
                    why = f"Ray does not start, tried {tries} times"
                if address != LOCAL or tries == ray_head.HEAD_TRIES:
                    raise ClusterError(f"{why}: {first_line(error)}") from None
        if in_main:
            signal.signal(signal.SIGTERM, before)
        try:
            yield
        finally:
            ray.shutdown()
            if in_main:
                signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


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
        connection = connect_to(address, port, secret)
        self._busy = True
        self._connections.put(connection)
        return True

    def state(self) -> str:
        return "in use" if self._busy else "free"

    def _live(self) -> None:
        from .process import WorkerProcess

        process = WorkerProcess()
        while True:
            with suppress(ProtocolError):  # a driver that is gone before its first message
                process.serve(self._connections.get())
            self._busy = False


def num_gpus(first: Start | Load) -> int:
    return int(str(first.options["device"]).startswith("cuda"))


def job_digest(first: Start | Load) -> str:
    """Of what the worker of a run loads; empty for that of a server."""
    return "" if isinstance(first, Start) else sha256(encode(first)).hexdigest()[:12]


@contextmanager
def reserved(block: ClusterBlock, workers: Sequence[Start | Load]) -> Iterator[Mapping[str, Any]]:
    """Reserve a processor of Ray's count for each worker of a run, and its GPU, for all or for
    none: runs with some of their workers each would wait for each other. A run with more workers
    than processors takes all of them. Yields where the workers' actors start. Raises ClusterError:
    the cluster does not have them within the block's `wait`."""
    from ray.util.placement_group import placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray: Any = import_module("ray")
    processors = int(ray.cluster_resources().get("CPU", 0))
    if not processors:
        yield SPREAD
        return
    # Those of `cluster up` have their GPUs already.
    standing = any(actors(f"{job_digest(one)}-") for one in workers[:1])
    share = 10_000 // -(-len(workers) // processors) / 10_000
    needs = [{"CPU": share, "GPU": 0 if standing else num_gpus(one)} for one in workers]
    group = ray.util.placement_group(needs, strategy="SPREAD")
    start = monotonic()
    told = False

    def shown() -> str:
        free = ray.available_resources()
        total = ray.cluster_resources()
        amounts = [(name, amount) for name, amount in summed(needs).items() if amount]
        of = [f"{a:g} {n} ({free.get(n, 0):g} of {total.get(n, 0):g} free)" for n, a in amounts]
        return f"this run needs {', '.join(of)}"

    try:
        while placement_group_table(group)["state"] != "CREATED":
            seconds = monotonic() - start
            if seconds >= block.wait:
                late = f"not free within {block.wait:g} s (cluster.wait)"
                raise ClusterError(f"the cluster at {block.address} is in use: {shown()}, {late}")
            if seconds >= WAIT_SILENTLY and not told:
                complain(f"waiting for the cluster at {block.address}: {shown()}")
                told = True
            sleep(POLL_INTERVAL)
        place = PlacementGroupSchedulingStrategy(group)
        yield SPREAD if standing else {"num_cpus": share, "scheduling_strategy": place}
    finally:
        remove_placement_group(group)


@dataclass(eq=False)
class RayHost:
    """Runs a worker as an actor of this driver's cluster, with a `Load` in a free actor of the same
    job if there is one. caller: the thread that calls Ray. deadline: seconds in which a free actor
    answers. detached, adopted: it outlives, or precedes, the driver. place: of `reserved`."""

    first: Start | Load
    listener: WorkerListener
    caller: ThreadPoolExecutor
    deadline: float
    detached: bool
    place: Mapping[str, Any]
    adopted: bool = False
    pid: int | None = None
    _ended: bool = False
    _actor: Any = None
    _expected: asyncio.Future[Connection] | None = None

    async def start(self) -> Pipe:
        from ray.exceptions import RayError

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
                return pipe
        except TimeoutError:
            raise ClusterError(f"it has not connected within {START_DEADLINE:g} s") from None
        except (RayError, OSError, RuntimeError, ValueError) as error:
            lines = str(getattr(error, "cause", None) or error).strip().splitlines()
            raise ClusterError(lines[-1] if lines else type(error).__name__) from None
        finally:
            connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
            self.listener.expected.pop(secret, None)

    async def _connect(self, secret: str) -> None:
        """Have a free actor of the same job connect, else a new one."""
        import ray

        job = job_digest(self.first)
        for _, actor in await self._call(lambda: actors(f"{job}-")) if job else ():
            with suppress(ray.exceptions.RayError, TimeoutError):
                if await self._send_secret(actor, secret, self.deadline):
                    self._actor = actor
                    self.adopted = True
                    return
        self.adopted = False
        kind: Any = ray.remote(RayWorker)
        settings: dict[str, Any] = {"lifetime": "detached"} if self.detached else {}
        if job:
            kept = "" if self.detached else "run-"  # what ends with this run is not for others
            settings["name"] = f"{kept}{job}-{secrets.token_hex(8)}"
        actor = kind.options(
            num_gpus=num_gpus(self.first),
            max_restarts=0,
            max_task_retries=0,
            **self.place,
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
            self._expected.set_exception(ClusterError("it is not needed any longer"))

    async def reap(self) -> None:
        if not (self._ended and (self.detached or self.adopted)):
            await self._call(self.kill)

    def kill(self) -> None:
        """End the actor's process; on the thread that calls Ray."""
        import ray

        if self._actor is not None:
            with suppress(ray.exceptions.RayError, ValueError, RuntimeError):
                ray.kill(self._actor, no_restart=True)
        if self.pid is not None:
            deadline = monotonic() + END_DEADLINE
            with suppress(OSError):  # it has ended
                while monotonic() < deadline:
                    os.kill(self.pid, 0)
                    sleep(POLL_INTERVAL)
                os.kill(self.pid, signal.SIGKILL)  # a stopped process does not react to Ray
        self._actor = self.pid = None


def actors(prefix: str = "") -> list[tuple[str, Any]]:
    import ray

    handles = []
    for name in sorted(ray.util.list_named_actors(all_namespaces=False)):
        if name.startswith(prefix):
            with suppress(ValueError):  # it has ended
                handles.append((name, ray.get_actor(name)))
    return handles


@contextmanager
def ray_workers(
    block: ClusterBlock,
    first: Callable[[int, int], Start | Load],
    *,
    parts: int = 1,
    detached: bool = False,
    counted: bool = False,
) -> Iterator[WorkerSource]:
    """Workers on the block's cluster, which this process becomes a driver of. Raises ClusterError.
    first: message of worker i with part p of the weights. Those of a `Load` may be there before,
    and be used again. detached: they outlive this driver. counted: all are reserved first."""
    listener = WorkerListener(block.interface)

    def host(number: int, part: int) -> RayHost:
        message = first(number, part)
        return RayHost(message, listener, caller, block.deadline, detached=detached, place=place)

    with ExitStack() as stack:
        stack.enter_context(ray_driver(block.address, block.workers))
        place = SPREAD
        if counted:
            workers = [first(number, number % parts) for number in range(block.workers)]
            place = stack.enter_context(reserved(block, workers))
        caller = stack.enter_context(ThreadPoolExecutor(1))
        yield WorkerSource(host, parts, [listener])


def job_workers(
    job: Job, block: ClusterBlock, *, detached: bool = False
) -> AbstractContextManager[WorkerSource]:
    from .worker_loop import load_message, parts_of

    load = partial(load_message, job, block)
    parts = parts_of(job, block)
    return ray_workers(block, load, parts=parts, detached=detached, counted=not detached)


def worker_states(address: str) -> Iterator[tuple[str, str]]:
    """Name and state of the workers of a cluster; raises ClusterError."""
    import ray

    with ray_driver(address):
        for name, actor in actors():
            with suppress(ray.exceptions.RayError):
                yield name, str(ray.get(actor.state.remote(), timeout=STATE_DEADLINE))
