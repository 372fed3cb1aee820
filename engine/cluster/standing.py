"""The Ray cluster of this machine that stays: started once, found by its file, ended whole."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep

from ..errors import ClusterError

VARIABLE = "SPECSOT_CLUSTER_FILE"
DEFAULT = "~/.cache/specsot/cluster.json"
PATIENCE = 60.0  # seconds that Ray has to start
GRACE = 6.0  # seconds that its processes have to end by themselves
LOOK = 0.1
STORE = 80 << 20  # bytes of Ray's own store, of which nothing is used


@dataclass(frozen=True, slots=True)
class StandingCluster:
    """A Ray head that was started here. pid: of the process that all others end with; token: who
    knows it may connect; folder: of its logs and sockets."""

    address: str
    pid: int
    token: str
    folder: str
    workers: int
    graph: str

    @property
    def alive(self) -> bool:
        """Whether its process is there, and is Ray's."""
        return self.pid in _of_folder(self.folder)


def place() -> Path:
    """The file that says where it is; for its owner alone, since it has the token."""
    return Path(os.environ.get(VARIABLE) or DEFAULT).expanduser()


def standing() -> StandingCluster | None:
    """The cluster that was started here, if there is one."""
    try:
        return StandingCluster(**json.loads(place().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def start_head(workers: int, graph: str) -> StandingCluster:
    """Start Ray on this machine, and note where it is.

    Raises:
        ClusterError: one is there already, or Ray does not start.
    """
    there = standing()
    if there is not None and there.alive:
        raise ClusterError(f"a cluster is up at {there.address}: specsot cluster down ends it")
    host = _own_address()
    port = _free_port()
    token = secrets.token_hex(16)
    folder = tempfile.mkdtemp(prefix="specsot-")
    settings = [f"--port={port}", f"--num-cpus={workers}", f"--temp-dir={folder}"]
    settings += ["--include-dashboard=false", "--disable-usage-stats", "--block"]
    settings += [f"--object-store-memory={STORE}", f"--node-ip-address={host}"]
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    with open(Path(folder) / "head.log", "wb") as log:
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *settings],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    made = StandingCluster(f"{host}:{port}", head.pid, token, folder, workers, graph)
    _note(made)
    until = monotonic() + PATIENCE
    try:
        while not _answers(host, port):
            if head.poll() is not None or monotonic() > until:
                raise ClusterError(f"Ray does not start: {_last_line(Path(folder))}")
            sleep(LOOK)
    except BaseException:  # Ctrl-C among them
        end(made)
        raise
    return made


def end(cluster: StandingCluster) -> None:
    """End all of its processes, and forget it."""
    with suppress(OSError):
        os.killpg(cluster.pid, signal.SIGTERM)
    until = monotonic() + GRACE
    while (left := _of_folder(cluster.folder)) and monotonic() < until:
        sleep(LOOK)
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(cluster.pid, os.WNOHANG)
    shutil.rmtree(cluster.folder, ignore_errors=True)
    place().unlink(missing_ok=True)


def _note(made: StandingCluster) -> None:
    file = place()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(json.dumps(asdict(made)))


def _of_folder(folder: str) -> list[int]:
    """Processes whose command line, or environment, names the folder: Ray's of this cluster."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.encode() in (one / "cmdline").read_bytes() and not _is_zombie(one):
                found.append(int(one.name))
    return [pid for pid in found if pid != os.getpid()]


def _is_zombie(process: Path) -> bool:
    return (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"


def _answers(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def _own_address() -> str:
    """The address that others reach this machine at; its loopback where there is none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.connect(("192.0.2.1", 9))  # nothing is sent
        return str(out.getsockname()[0])
    return "127.0.0.1"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _last_line(folder: Path) -> str:
    with suppress(OSError, IndexError):
        return (folder / "head.log").read_text(errors="replace").strip().splitlines()[-1]
    return "no reason given"
