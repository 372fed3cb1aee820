"""Real Ray workers: the same text, with one of them killed and one of them stopped; no orphans."""

import os
import signal

from helpers.clusters import BEES, alone, decoder, mid_branch, session_of
from helpers.ray_clusters import BUDGET, DEADLINE, GRAPH, SAMPLED, disturbed, gone, ray_cluster


def test_a_killed_worker_and_a_stopped_one_change_nothing() -> None:
    session = session_of(GRAPH, *SAMPLED, budget=BUDGET)
    expected = alone(session, [BEES])
    pids: list[int] = []
    with ray_cluster() as hosts:
        killed, _ = disturbed(hosts, session, [BEES], mid_branch, decoder)
        assert killed.digest == expected and killed.director.workers.losses == 1
        assert killed.figures["kv"]["target"]["moved_bytes"]["regroup"] > 0
        stopped, _ = disturbed(hosts, session, [BEES], mid_branch, decoder, signal.SIGSTOP)
        assert stopped.digest == expected and stopped.director.workers.losses == 1
        (lost,) = stopped.told("lost")
        assert lost["why"] in (f"has not answered for {DEADLINE:g} s", "has ended")
        for ran in (killed, stopped):
            pids += [one.greeting.pid for one in ran.director.workers.ready if one.greeting]
        assert os.getpid() not in pids
    assert gone(pids), "no process is left"
