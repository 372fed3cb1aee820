"""One worker for one driver after another: nothing of an earlier one reaches the next."""

import socket
from threading import Thread

from helpers.clusters import BEES, session_of

from specsot.engine.workers.process import WorkerProcess
from specsot.engine.workers.protocol import Assign, Heartbeat, Load, Ready, WorkerSocket
from specsot.states.request import MigratedRequest


def test_a_driver_that_is_gone_leaves_nothing_for_the_next() -> None:
    process = WorkerProcess(lambda job: session_of("autoregressive"))

    def drive(*orders: Load | Assign) -> tuple[WorkerSocket, Thread]:
        ours, theirs = socket.socketpair()
        thread = Thread(target=process.serve, args=(theirs,), daemon=True)
        thread.start()
        driver = WorkerSocket(ours)
        for order in orders:
            driver.send(order)
        return driver, thread

    first, thread = drive(Load({}), Assign("1", BEES, MigratedRequest()))
    replies = iter(one for one in first if not isinstance(one, Heartbeat))
    assert isinstance(next(replies), Ready)
    loop = process.loop
    first.close()
    thread.join(20)
    second, thread = drive(Load({}))
    replies = iter(one for one in second if not isinstance(one, Heartbeat))
    assert isinstance(next(replies), Ready) and process.loop is loop, "its models stay loaded"
    heard = [next(iter(second)) for _ in range(3)]
    assert all(isinstance(one, Heartbeat) for one in heard)
    second.close()
    thread.join(20)
    assert not thread.is_alive()
