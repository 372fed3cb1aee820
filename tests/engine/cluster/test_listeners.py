"""Who hears a worker's replies: the driver that has it, and no call that an earlier one left."""

from concurrent.futures import ThreadPoolExecutor

from helpers.clusters import session_of

from specsot.engine.cluster.workers.messages import Greet, Loaded, packed, reply_of
from specsot.engine.cluster.workers.worker import ClusterWorker

LONG = 20.0  # seconds


def test_a_call_that_an_earlier_driver_left_takes_nothing_from_the_next() -> None:
    worker = ClusterWorker(lambda: session_of("autoregressive"), "127.0.0.1")
    try:
        with ThreadPoolExecutor() as pool:
            worker.tell_only("first")
            assert worker.hear(LONG, "first"), "its models are loaded"
            left = pool.submit(worker.hear, LONG, "first")
            worker.tell_only("")
            worker.tell_only("second")
            worker.ask(packed(Greet()))
            (heard,) = worker.hear(LONG, "second")
            assert isinstance(reply_of(heard), Loaded)
            assert left.result(LONG) == [] and worker.hear(LONG, "first") == []
    finally:
        worker.die()
        worker.join(LONG)
