"""Workers on Ray: the cluster of this machine, a driver's connection, workers as actors.

Importing this module does not import Ray. Ray authenticates by token, has no dashboard and sends no
statistics here; but it listens on all interfaces of the machine: docs/cluster.md."""

import asyncio
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from ctypes import CDLL
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, current_thread, main_thread
from time import monotonic, sleep
from typing import Any, TypeVar

from ..errors import ClusterError, UsageError, first_line, message_of
from ..prepare.job import Job
from ..prepare.options import LOCAL, ClusterBlock
from ..shell import complain
from ..signals import ending_with
from .link import SECRET_BYTES, Connection, Pipe, WorkerListener, WorkerSource, connect_to
from .protocol import Load, ProtocolError, Start, encode, summed

HEAD_DEADLINE = 60.0  # seconds that Ray has to start
HEAD_END_DEADLINE = 6.0  # seconds that its processes have to end, and again once killed
HEAD_POLL_INTERVAL = 0.1
HEAD_TRIES = 2
FOLDER_PREFIX = "specsot-"
LOCK_FILE = "driver.lock"  # of the folder of a cluster that ends with its driver, which locks it
STORE_BYTES = 80 << 20  # of Ray's own store, of which nothing is used
PR_SET_PDEATHSIG = 1
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


@dataclass(frozen=True, slots=True)
class StandingCluster:
    """A Ray head that was started on this machine. pid: of the process that all others end with;
    token: grants access; folder: of its logs and sockets."""

    address: str
    pid: int
    token: str
    folder: str
    workers: int
    graph: str

    @property
    def alive(self) -> bool:
        """Whether its process runs, and is Ray's."""
        return self.pid in _processes_of(self.folder)


def cluster_file() -> Path:
    """The file that describes the cluster; it has the token, so only its owner may read it."""
    file = os.environ.get("SPECSOT_CLUSTER_FILE") or "~/.cache/specsot/cluster.json"
    return Path(file).expanduser()


def standing_cluster() -> StandingCluster | None:
    try:
        return StandingCluster(**json.loads(cluster_file().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def start_head(workers: int, graph: str, *, stays: bool = True) -> StandingCluster:
    """Start Ray on this machine, and write its file. Without `stays` its processes end when this
    one ends in any way. Raises ClusterError: a cluster is up already, or Ray does not start."""
    present = standing_cluster()
    if present is not None and present.alive:
        raise ClusterError(f"a cluster is up at {present.address}: specsot cluster down ends it")
    if present is not None:  # it was killed
        remove_folder(present.folder)
    for _ in range(HEAD_TRIES - 1):
        with suppress(ClusterError):
            return _start_head(workers, graph, stays=stays)
    return _start_head(workers, graph, stays=stays)


def _start_head(workers: int, graph: str, *, stays: bool) -> StandingCluster:
    host = "127.0.0.1"
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent; which address would others reach?
        host = str(probe.getsockname()[0])
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    token = secrets.token_hex(16)
    folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
    log = Path(folder) / "head.log"
    settings = [f"--port={port}", f"--num-cpus={workers}", f"--temp-dir={folder}"]
    settings += ["--include-dashboard=false", "--disable-usage-stats", "--block"]
    settings += [f"--object-store-memory={STORE_BYTES}", f"--node-ip-address={host}"]
    with open(log, "wb") as output:
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *settings],
            env=os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=None if stays else end_with_parent,
        )
    address = f"{host}:{port}"
    cluster = StandingCluster(address, head.pid, token, folder, workers=workers, graph=graph)
    file = cluster_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(json.dumps(asdict(cluster)))
    deadline = monotonic() + HEAD_DEADLINE
    with ending_cluster(cluster):
        while True:
            with socket.socket() as probe:
                if probe.connect_ex((host, port)) == 0:
                    return cluster
            if head.poll() is not None or monotonic() > deadline:
                lines = log.read_text(errors="replace").strip().splitlines()
                raise ClusterError(f"Ray does not start: {(lines or ['no reason given'])[-1]}")
            sleep(HEAD_POLL_INTERVAL)


@contextmanager
def ending_cluster(cluster: StandingCluster) -> Iterator[None]:
    """After an error in the block, or a signal that ends the process, the cluster is gone."""
    try:
        with ending_with(partial(end_cluster, cluster)):
            yield
    except BaseException:
        end_cluster(cluster)
        raise


def end_cluster(cluster: StandingCluster) -> None:
    """End all of its processes, and remove its file."""
    with suppress(OSError):
        os.killpg(cluster.pid, signal.SIGTERM)
    deadline = monotonic() + HEAD_END_DEADLINE
    while _processes_of(cluster.folder) and monotonic() < deadline:
        sleep(HEAD_POLL_INTERVAL)
    remove_folder(cluster.folder)
    with suppress(ChildProcessError):
        os.waitpid(cluster.pid, os.WNOHANG)
    cluster_file().unlink(missing_ok=True)


def kill_processes(folder: str) -> None:
    """Kill the processes of a cluster, and wait for their end: the kernel ends them later."""
    deadline = monotonic() + HEAD_END_DEADLINE
    while (pids := _processes_of(folder)) and monotonic() < deadline:
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        sleep(HEAD_POLL_INTERVAL)


def remove_folder(folder: str) -> None:
    """Remove the folder of a cluster, and kill the processes that remain of it."""
    kill_processes(folder)
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove the clusters whose driver was killed: nothing locks their folders any more."""
    for file in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*/{LOCK_FILE}"):
        with suppress(OSError), open(file, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_folder(str(file.parent))


@contextmanager
def driver_folder() -> Iterator[str]:
    """The folder of a cluster that ends with this process."""
    remove_abandoned()
    folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
    with open(Path(folder) / LOCK_FILE, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            remove_folder(folder)


def end_with_parent() -> None:
    """Have the kernel terminate this process when its parent ends (Linux)."""
    with suppress(OSError, AttributeError):
        CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _processes_of(folder: str) -> list[int]:
    """Ray's processes of this cluster: their command line names the folder, or they have files of
    it open. Its agents outlive the others for minutes when these are killed."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            command = (process / "cmdline").read_bytes()
            opened = process.glob("fd/*") if command.startswith(b"ray::") else ()
            files = (os.readlink(file) for file in opened)
            if state != "Z" and (folder.encode() in command or any(folder in f for f in files)):
                pids.append(int(process.name))
    return [pid for pid in pids if pid != os.getpid()]


def set_up_ray(address: str) -> None:
    """Authentication by token, no statistics; must precede the first import of Ray. The token is
    that of `specsot cluster up` at this address, or that of the environment, or a new one. Raises
    UsageError: Ray is not installed. ClusterError: nothing answers at the address."""
    if find_spec("ray") is None:
        raise UsageError("workers are Ray actors: pip install 'specsot[ray]'")
    if address != LOCAL:
        check_address(address)
    cluster = standing_cluster()
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
    cleanup. What Ray prints goes to stderr, because stdout is for the answer. Raises
    ClusterError: the cluster does not exist, or refuses the token."""
    import ray

    settings: dict[str, Any] = {"namespace": "specsot", "log_to_driver": False}
    settings["logging_level"] = "ERROR"
    in_main = current_thread() is main_thread()
    with ExitStack() as stack:
        printer: Any = import_module("ray._private.worker")
        usual = printer.print_to_stdstream
        to_stderr = {"is_err": True}
        printer.print_to_stdstream = lambda data, **how: usual(data | to_stderr, **how)
        stack.callback(setattr, printer, "print_to_stdstream", usual)
        if address == LOCAL:
            folder = stack.enter_context(driver_folder())
            stack.enter_context(ending_with(partial(remove_folder, folder)))
            private: Any = import_module("ray._private.utils")
            private.set_sigterm_handler = lambda handler: None  # Ray's raises SystemExit
            settings |= {"num_cpus": workers, "object_store_memory": STORE_BYTES}
            settings |= {"include_dashboard": False, "_temp_dir": folder}
        else:
            settings["address"] = address
        before = signal.getsignal(signal.SIGTERM)
        for tries in range(1, HEAD_TRIES + 1):
            try:
                ray.init(**settings)
                break
            except Exception as error:  # Ray raises it as such when its own start takes too long
                why = f"no Ray cluster at {address}"
                if address == LOCAL:
                    kill_processes(folder)
                    why = f"Ray does not start, tried {tries} times"
                if address != LOCAL or tries == HEAD_TRIES:
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
        secret = secrets.token_hex(SECRET_BYTES)
        expected: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self.listener.expected[secret] = self._expected = expected
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
