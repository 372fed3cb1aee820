"""`specsot serve --workers` with real Ray, scaled and killed while it answers; nothing is left."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers.ray_clusters import gone
from helpers.servers import BEES, RAIN, serving_fleet, stream_all

QUESTIONS = [
    {"text": BEES, "model": "bim_dflash", "max_tokens": 40},
    {"text": RAIN, "model": "bim_dflash", "max_tokens": 40, "seed": 4, "temperature": 0.8},
]


def test_answers_go_on_while_replicas_come_and_go(tmp_path: Path) -> None:
    with serving_fleet(tmp_path, "bim_dflash", workers=1) as fleet, ThreadPoolExecutor(1) as pool:
        url, server = fleet.server.url, fleet.server
        wanted = [one.text for one in stream_all(url, QUESTIONS)]
        assert "replica-1 is attached" in fleet.specsot("cluster", "scale", "2")
        assert fleet.specsot("cluster", "status").count(": ready, ") == 2
        pids, killed = fleet.pids, fleet.pid_of("replica-0")
        hearing = pool.submit(stream_all, url, QUESTIONS * 2)
        server.until(lambda: fleet.by_replica("replica_tokens")["replica-0"] > 0)
        os.kill(killed, signal.SIGKILL)
        assert [one.text for one in hearing.result()] == wanted * 2
        assert "replica-0 has ended; it is started again (1)" in server.told
        assert "is detached" in fleet.specsot("cluster", "scale", "1")
        assert server.end() == 0 and not fleet.folder.joinpath("cluster.json").exists()
        assert gone(pids), "no process is left"
