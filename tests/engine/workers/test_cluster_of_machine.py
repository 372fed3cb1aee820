"""Addresses without Ray are refused at once, and clusters of killed drivers are removed."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

import pytest
from helpers.ray_clusters import gone
from helpers.servers import pids_of

from specsot.engine.cli.run_command import run_command
from specsot.engine.errors import ClusterError, Code
from specsot.engine.prepare.options import LOCAL, RunOptions
from specsot.engine.workers import ray_head, ray_workers

Patch = pytest.MonkeyPatch
GRPC_ANSWER = b"\0\0\x12\4\0\0\0\0\0"
ANSWERS = {
    "no answer": (b"", "timed out"),
    "closes": (None, "another kind of server answers"),
    "HTTP": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another kind of server answers"),
    "gRPC": (GRPC_ANSWER, ""),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_only_a_server_of_rays_kind_is_a_cluster(kind: str, monkeypatch: Patch) -> None:
    answer, why = ANSWERS[kind]
    monkeypatch.setattr(ray_workers, "ADDRESS_DEADLINE", 0.3)
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    taken = list[bytes]()
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            pipe, _ = server.accept()
            with pipe:
                taken.append(pipe.recv(1 << 10))
                if answer is not None:
                    pipe.sendall(answer)
                    with suppress(ConnectionResetError):
                        pipe.recv(1)  # until the other end closes it

        thread = Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if why:
            with pytest.raises(ClusterError, match=f"^no Ray cluster at {address}: .*{why}"):
                ray_workers.check_address(address)
        else:
            ray_workers.check_address(address)
        thread.join()
    assert taken[0].startswith(b"PRI * HTTP/2.0")


def test_a_run_with_a_dead_address_ends_within_seconds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    begin = monotonic()
    options = RunOptions("bim_plain", workers=2, cluster=address, runs_dir=tmp_path)
    assert run_command(options) == Code.FAILED
    assert monotonic() - begin < 10
    told = capsys.readouterr().err
    assert told == f"specsot: no Ray cluster at {address}: Connection refused\n"


def test_a_start_that_takes_too_long_is_tried_twice_and_named(
    monkeypatch: Patch,
) -> None:
    """Ray's own limit is 30 s, so its error is raised here at once."""
    ray = pytest.importorskip("ray")
    folders = list[str]()

    def late(**settings: object) -> None:
        folders.append(str(settings["_temp_dir"]))
        raise Exception("The current node timed out during startup. This could happen ...")

    monkeypatch.setattr(ray, "init", late)
    why = "^Ray does not start, tried 2 times: The current node timed out during startup"
    with pytest.raises(ClusterError, match=why), ray_workers.ray_driver(LOCAL):
        pass
    assert len(folders) == 2 and not any(Path(folder).exists() for folder in folders)


DRIVER = """
import subprocess, sys, time
from specsot.engine.workers.ray_head import driver_folder, end_with_parent
wait = [sys.executable, "-c", "import time; time.sleep(60)"]
with driver_folder() as folder:
    subprocess.Popen([*wait, folder])
    subprocess.Popen([*wait, folder + "/child"], preexec_fn=end_with_parent)
    with open(folder + "/log", "w") as log:  # as Ray's agents, which change their titles
        agent = subprocess.Popen(["ray::Agent", "60"], executable="sleep", stdout=log)
    print(folder, agent.pid, flush=True)
    time.sleep(60)
"""


def ended(folder: str) -> bool:
    until = monotonic() + 10
    while (pids := pids_of(folder)) and monotonic() < until:
        sleep(0.02)
    return not pids


def test_what_killed_drivers_leave_is_ended_at_the_next(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, env=environment
    ) as driver:
        assert driver.stdout is not None
        folder, agent = driver.stdout.readline().split()
        ray_head.remove_abandoned()
        assert len(pids_of(folder)) == 2 and Path(folder).exists(), "its driver lives"
        driver.send_signal(signal.SIGKILL)
    assert ended(f"{folder}/child"), "by the kernel"
    assert len(pids_of(folder)) == 1
    assert not gone([int(agent)], 0.0)
    with ray_head.driver_folder() as other:
        assert gone([int(agent)])
        assert ended(folder) and not Path(folder).exists()
        assert Path(other).exists()
    assert not Path(other).exists()
