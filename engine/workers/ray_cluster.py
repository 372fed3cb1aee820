"""Ray clusters: the environment that Ray reads, the cluster of this machine, a driver's connection.

Importing this module does not import Ray. Ray authenticates by token, has no dashboard and sends no
statistics here; but it listens on all interfaces of the machine: docs/cluster.md.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import current_thread, main_thread
from time import monotonic, sleep
from typing import Any

from ..errors import ClusterError, UsageError
from ..prepare.options import LOCAL

FILE_VARIABLE = "SPECSOT_CLUSTER_FILE"
DEFAULT_FILE = "~/.cache/specsot/cluster.json"
START_DEADLINE = 60.0  # seconds that Ray has to start
END_DEADLINE = 6.0  # seconds that its processes have to end by themselves
POLL_INTERVAL = 0.1
STORE_BYTES = 80 << 20  # of Ray's own store, of which nothing is used
NAMESPACE = "specsot"
NO_RAY = "workers are Ray actors: pip install 'specsot[ray]'"


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
    return Path(os.environ.get(FILE_VARIABLE) or DEFAULT_FILE).expanduser()


def standing_cluster() -> StandingCluster | None:
    try:
        return StandingCluster(**json.loads(cluster_file().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def start_head(workers: int, graph: str) -> StandingCluster:
    """Start Ray on this machine, and write its file. Raises ClusterError: a cluster is up already,
    or Ray does not start."""
    present = standing_cluster()
    if present is not None and present.alive:
        raise ClusterError(f"a cluster is up at {present.address}: specsot cluster down ends it")
    host = "127.0.0.1"
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent; which address would others reach?
        host = str(probe.getsockname()[0])
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    token = secrets.token_hex(16)
    folder = tempfile.mkdtemp(prefix="specsot-")
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
        )
    address = f"{host}:{port}"
    cluster = StandingCluster(address, head.pid, token, folder, workers=workers, graph=graph)
    file = cluster_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(json.dumps(asdict(cluster)))
    deadline = monotonic() + START_DEADLINE
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex((host, port)) == 0:
                    return cluster
            if head.poll() is not None or monotonic() > deadline:
                lines = log.read_text(errors="replace").strip().splitlines()
                raise ClusterError(f"Ray does not start: {(lines or ['no reason given'])[-1]}")
            sleep(POLL_INTERVAL)
    except BaseException:  # Ctrl-C among them
        end_cluster(cluster)
        raise


def end_cluster(cluster: StandingCluster) -> None:
    """End all of its processes, and remove its file."""
    with suppress(OSError):
        os.killpg(cluster.pid, signal.SIGTERM)
    deadline = monotonic() + END_DEADLINE
    while (pids := _processes_of(cluster.folder)) and monotonic() < deadline:
        sleep(POLL_INTERVAL)
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(cluster.pid, os.WNOHANG)
    shutil.rmtree(cluster.folder, ignore_errors=True)
    cluster_file().unlink(missing_ok=True)


def _processes_of(folder: str) -> list[int]:
    """Processes whose command line names the folder: Ray's of this cluster."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            if folder.encode() in (process / "cmdline").read_bytes() and state != "Z":
                pids.append(int(process.name))
    return [pid for pid in pids if pid != os.getpid()]


def set_up_ray(address: str) -> None:
    """Authentication by token, no statistics; must precede the first import of Ray. The token is
    that of the cluster that `specsot cluster up` has started at this address, or that of the
    environment, or a new one. Raises UsageError: Ray is not installed."""
    if find_spec("ray") is None:
        raise UsageError(NO_RAY)
    cluster = standing_cluster()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if cluster is not None and cluster.address == address:
        os.environ["RAY_AUTH_TOKEN"] = cluster.token
    elif "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))


@contextmanager
def ray_driver(address: str, workers: int = 1) -> Iterator[None]:
    """Connect this process to a Ray cluster as a driver; LOCAL starts a cluster that ends with the
    process. Restores the signal handlers, because those of Ray end the process without Python
    cleanup. Raises ClusterError: the cluster does not exist, or refuses the token."""
    import ray
    from ray.exceptions import RayError

    settings: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False}
    settings["logging_level"] = "ERROR"
    before = signal.getsignal(signal.SIGTERM)
    in_main = current_thread() is main_thread()
    with ExitStack() as stack:
        if address == LOCAL:
            folder = tempfile.mkdtemp(prefix="specsot-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            settings |= {"num_cpus": workers, "object_store_memory": STORE_BYTES}
            settings |= {"include_dashboard": False, "_temp_dir": folder}
        else:
            settings["address"] = address
        try:
            ray.init(**settings)
        except (RayError, OSError, RuntimeError, ValueError) as error:
            first = str(error).strip().split("\n", 1)[0]
            raise ClusterError(f"no Ray cluster at {address}: {first}") from None
        if in_main:
            signal.signal(signal.SIGTERM, before)
        try:
            yield
        finally:
            ray.shutdown()
            if in_main:
                signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
