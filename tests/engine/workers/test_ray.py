"""Real Ray workers of a run and of a server, killed and scaled: same text, no orphans. Stopped ones
are in tests/full; in threads they hang in test_losses.py."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from time import monotonic

import pytest
from helpers.clusters import BEES, alone, decoder, listeners, mid_branch, session_of
from helpers.ray_clusters import BUDGET, GRAPH, SAMPLED, disturbed, gone, ray_cluster
from helpers.servers import RAIN, serving_fleet, stream_all

from specsot.engine.errors import ClusterError
from specsot.engine.prepare.options import ClusterBlock
from specsot.engine.workers.protocol import Load
from specsot.engine.workers.ray_workers import reserved


def test_a_killed_worker_changes_nothing() -> None:
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
        pids = [one.greeting.pid for one in ready if one.greeting]
        assert os.getpid() not in pids
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
