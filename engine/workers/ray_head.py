"""The Ray cluster of this machine: its head process, its folder, and the end of both."""

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic, sleep

from ..errors import ClusterError
from ..signals import ending_with

HEAD_DEADLINE = 60.0  # seconds that Ray has to start
HEAD_END_DEADLINE = 6.0  # seconds that its processes have to end by themselves
HEAD_POLL_INTERVAL = 0.1
HEAD_TRIES = 2
FOLDER_PREFIX = "specsot-"
LOCK_FILE = "driver.lock"  # of the folder of a cluster that ends with its driver, which locks it
STORE_BYTES = 80 << 20  # of Ray's own store, of which nothing is used
PR_SET_PDEATHSIG = 1


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
    for pid in _processes_of(folder):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


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
