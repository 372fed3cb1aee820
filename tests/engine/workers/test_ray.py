"""Real Ray workers of a run and of a server, killed and scaled: same text, no orphans; and what
killed drivers leave. Stopped workers are in tests/full; in threads they hang in test_losses.py."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread, Timer
from time import monotonic, sleep

import pytest
from helpers.clusters import BEES, alone, decoder, listeners, mid_branch, session_of
from helpers.ray_clusters import BUDGET, GRAPH, SAMPLED, disturbed, gone, ray_cluster
from helpers.servers import RAIN, pids_of, serving_fleet, stream_all

from specsot.engine.cli.run_command import run_command
from specsot.engine.errors import ClusterError, Code
from specsot.engine.prepare.options import LOCAL, ClusterBlock, RunOptions
from specsot.engine.workers import ray_workers
from specsot.engine.workers.protocol import Load
from specsot.engine.workers.ray_workers import reserved


def test_a_killed_worker_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    session = session_of(GRAPH, *SAMPLED, budget=BUDGET)
    expected = alone(session, [BEES])
    with ray_cluster() as source:
        _two_runs_in_turn()
        # Ray's autoscaler would serve its metrics on all interfaces, without the token.
        assert not listeners(44217)
        killed, _ = disturbed(source, session, [BEES], mid_branch, decoder)
        assert killed.digest == expected and killed.director.workers.losses == 1
        assert killed.figures["kv"]["target"]["moved_bytes"]["regroup"] > 0
        ready = killed.director.workers.ready
        pids = [one.greeting.pid for one in ready]
        assert os.getpid() not in pids
        out = err = ""
        until = monotonic() + 10
        while not (out or "(raylet)" in err) and monotonic() < until:
            sleep(0.05)
            more = capsys.readouterr()
            out += more.out
            err += more.err
        assert not out and "A worker died" in err, "Ray's lines go to stderr"
    assert gone(pids), "no process is left"


def _two_runs_in_turn() -> None:
    """A run that cannot have all of its workers gets none, says so, and gets them later."""
    workers = [Load(str(number), {"device": "cpu"}) for number in range(2)]
    with reserved(ClusterBlock(), workers) as place:
        assert place["num_cpus"] == 1
        why = (
            r"is in use: this run needs 1 CPU \(0 of 2 free\), not free within 0.2 s \(cluster.wait"
        )
        with pytest.raises(ClusterError, match=why), reserved(ClusterBlock(wait=0.2), workers[:1]):
            pass
        begin = monotonic()
        ctrl_c = Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        ctrl_c.start()
        # The driver's own handler would end the cluster with the process.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt), reserved(ClusterBlock(), workers):
            pass
        signal.signal(signal.SIGINT, before)
        assert monotonic() - begin < 10
    with reserved(ClusterBlock(wait=20.0), workers * 2) as place:
        assert place["num_cpus"] == 0.5, "more workers than processors"


QUESTIONS = [
    {"text": BEES.text, "model": "bim_dflash", "max_tokens": 96},
    {"text": RAIN, "model": "bim_dflash", "max_tokens": 96, "seed": 4, "temperature": 0.8},
]


def test_answers_go_on_while_replicas_come_and_go(tmp_path: Path) -> None:
    with serving_fleet(tmp_path, "bim_dflash", workers=1) as fleet, ThreadPoolExecutor(1) as pool:
        url, server = fleet.server.url, fleet.server
        wanted = [one.text for one in stream_all(url, QUESTIONS)]
        assert "replica-1 is attached" in fleet.specsot("cluster", "scale", "2")
        assert fleet.specsot("cluster", "status").count(": ready, ") == 2
        pids, killed = fleet.pids, fleet.pid_of("replica-0")
        hearing = pool.submit(stream_all, url, QUESTIONS * 2)
        server.until(lambda: fleet.by_replica("tokens")["replica-0"] > 0)
        os.kill(killed, signal.SIGKILL)
        assert [one.text for one in hearing.result()] == wanted * 2
        assert "replica-0 has ended; it is started again (1)" in server.told
        assert "is detached" in fleet.specsot("cluster", "scale", "1")
        assert server.end() == 0 and not fleet.folder.joinpath("cluster.json").exists()
        assert gone(pids), "no process is left"


# -- addresses without Ray, and clusters of killed drivers ----------------------------------------

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
from specsot.engine.workers.ray_workers import driver_folder, end_with_parent
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
        ray_workers.remove_abandoned()
        assert len(pids_of(folder)) == 2 and Path(folder).exists(), "its driver lives"
        driver.send_signal(signal.SIGKILL)
    assert ended(f"{folder}/child"), "by the kernel"
    assert len(pids_of(folder)) == 1
    assert not gone([int(agent)], 0.0)
    with ray_workers.driver_folder() as other:
        assert gone([int(agent)])
        assert ended(folder) and not Path(folder).exists()
        assert Path(other).exists()
    assert not Path(other).exists()
