"""Replicas on Ray: scaled under 16 streams, killed and stopped at random moments, of unequal speed.

SPECSOT_KILLS is how many replicas are killed. Reports figures; whether they are good is not judged
where they are times."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from threading import Event
from time import monotonic, sleep
from typing import Any

import pytest
from helpers import servers
from helpers.ray_clusters import gone
from helpers.support import SEED

KILLS = int(os.environ.get("SPECSOT_KILLS", "10"))
CLIENTS, SECONDS, NICE = 16, 40.0, 19  # the lowest rank; Ray gives its workers 15
GRAPHS = ("bim_dflash", "dflash")
ASKED: list[dict[str, Any]] = [
    {
        "text": f"{servers.RAIN if number % 3 else servers.BEES} {number}",
        "model": GRAPHS[number % 2],
        "max_tokens": 120 if number % 2 == 0 else 80,
        "seed": number,
        "temperature": 0.8 if number % 4 > 1 else 0.0,
    }
    for number in range(CLIENTS)
]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with servers.serving(tmp_path_factory.mktemp("alone"), *GRAPHS, SPECSOT_THREADS="1") as server:
        return [one.text for one in servers.stream_all(server.url, ASKED)]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[servers.ServedFleet]:
    with servers.serving_fleet(tmp_path, *GRAPHS) as fleet:
        pids = fleet.pids
        yield fleet
        assert fleet.server.end() == 0, fleet.server.told
        assert gone([*pids]), "no process is left"


def busiest(fleet: servers.ServedFleet) -> str:
    tokens = fleet.by_replica("tokens")
    return max(tokens, key=lambda name: tokens[name])


def test_replicas_come_and_go_under_16_streams(
    fleet: servers.ServedFleet, wanted: list[str], report: Callable[[str], None]
) -> None:
    stop, began = Event(), monotonic()

    def client(number: int) -> int:
        answers = 0
        while not stop.is_set():
            assert servers.stream(fleet.server.url, **ASKED[number]).text == wanted[number]
            answers += 1
        return answers

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            for count in (3, 1, 2, 4, 2):
                fleet.specsot("cluster", "scale", str(count))
                assert fleet.server.http.get("/health").json()["ready"] == count
        finally:
            stop.set()
        answers = sum(one.result() for one in clients)
    assert fleet.server.metric("specsot:request_reruns_total") == 0
    shown = f"{answers} answers in {monotonic() - began:.0f} s while there were 2, 3, 1, 2, 4, 2"
    report(f"{shown} replicas: none lost, all as of one engine")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_streams_go_on_when_replicas_are_lost(
    fleet: servers.ServedFleet,
    wanted: list[str],
    number: signal.Signals,
    report: Callable[[str], None],
) -> None:
    dice, server = random.Random(SEED), fleet.server
    times = 2 if number == signal.SIGSTOP else KILLS
    pauses, calm = list[float](), list[float]()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(times):
            fleet.all_ready(2)
            hearing = pool.submit(servers.stream_all, server.url, ASKED)
            server.until(lambda: sum(fleet.by_replica("tokens").values()) > 0)
            sleep(dice.random() * 2)
            with suppress(ProcessLookupError):
                os.kill(fleet.pid_of(busiest(fleet)), number)
            heard: list[servers.Streamed] = hearing.result()
            assert [one.text for one in heard] == wanted
            pauses.append(max(map(longest_pause, heard)))
            fleet.all_ready(2)
            calm.append(max(map(longest_pause, servers.stream_all(server.url, ASKED))))
    reruns = server.metric("specsot:request_reruns_total")
    assert reruns >= times // 2
    shown = f"median {median(pauses):.1f} s, at most {max(pauses):.1f} s"
    undisturbed = f"median {median(calm):.1f} s, at most {max(calm):.1f} s"
    line = f"{times} replicas {number.name}, {times * CLIENTS} streams continuous and identical"
    report(f"{line}, {reruns:.0f} went on elsewhere; longest pauses {shown}")
    report(f"the same streams undisturbed: longest pauses {undisturbed}")


def longest_pause(one: servers.Streamed) -> float:
    return max(b - a for a, b in zip(one.times, one.times[1:], strict=False))


def test_load_follows_speed(fleet: servers.ServedFleet, report: Callable[[str], None]) -> None:
    """Both replicas on one core, one at a lower rank: its share of the core is its speed."""
    pids = {name: fleet.pid_of(name) for name in ("replica-0", "replica-1")}
    core = {max(os.sched_getaffinity(0))}
    for pid in pids.values():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), core)
            if pid == pids["replica-1"]:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), NICE)
    until = monotonic() + SECONDS

    def client(number: int) -> None:
        asked = {**ASKED[1], "max_tokens": 100, "ignore_eos": True}
        while monotonic() < until:
            servers.stream(fleet.server.url, **{**asked, "text": f"{number} {servers.RAIN}"})

    wrote, spent = fleet.by_replica("written"), cpu_of(pids)
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        sleep(SECONDS)
        more, used = fleet.by_replica("written"), cpu_of(pids)
        for one in clients:
            one.result()
    tokens = {name: more[name] - wrote[name] for name in pids}
    seconds = {name: used[name] - spent[name] for name in pids}
    share = tokens["replica-0"] / sum(tokens.values())
    speed = seconds["replica-0"] / sum(seconds.values())
    report(f"replica-0 had {speed:.0%} of the core and wrote {share:.0%} of the tokens")
    assert speed > 0.55 and abs(share - speed) < 0.15


def cpu_of(pids: dict[str, int]) -> dict[str, float]:
    found = {}
    for name, pid in pids.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def test_whatever_ends_a_server_ends_its_replicas(tmp_path: Path) -> None:
    with servers.serving_fleet(tmp_path, "dflash") as fleet:
        replicas = [fleet.pid_of(name) for name in ("replica-0", "replica-1")]
        fleet.server.process.kill()
        fleet.server.process.wait()
        assert gone(replicas, 30)
        pids = fleet.pids
        assert "no server with --workers" in fleet.specsot("cluster", "scale", "3", code=1)
        fleet.specsot("cluster", "down")
        assert gone(pids)
    with servers.serving_fleet(tmp_path, "dflash") as fleet:
        pids = fleet.pids
        fleet.specsot("cluster", "down")
        assert fleet.server.process.wait(30) == 0
        assert gone(pids)


@pytest.mark.parametrize("pause", [0.3, 1.0])
def test_a_second_signal_leaves_nothing(tmp_path: Path, pause: float) -> None:
    with servers.serving_fleet(tmp_path, "dflash", workers=1) as fleet:
        pids = fleet.pids
        fleet.server.process.send_signal(signal.SIGINT)
        sleep(pause)
        assert fleet.server.end() == 0, fleet.server.told
        assert gone(pids)
