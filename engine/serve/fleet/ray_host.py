"""Replicas as Ray actors: each hosts what the engine's process of an ordinary server hosts."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

import ray
from ray.exceptions import RayError

from ..wire.hosts import HostError, Pipe
from .reception import ArrivedReplica, Reception, arrive

STARTING = 120.0  # seconds until a replica's process has to come in
# seconds that it has to end by itself, and between two looks
LEAVING = 1.0
LOOK = 0.02


class ReplicaActor:
    """The process of one replica."""

    def __init__(self, folder: str) -> None:
        with suppress(OSError):  # another machine may not have it
            os.chdir(folder)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

    def serve(self, address: str, port: int, secret: str) -> None:
        """Decode what comes from there; ends with its process."""
        pipe = arrive(address, port, secret, os.getpid())
        from ..worker.process import Worker

        Worker(pipe).run()
        leave: Any = ray.actor.exit_actor
        leave()


class RayHost:
    """Starts a replica's process on the cluster that this one is a driver of.

    Args:
        gpus: of each process.
    """

    def __init__(self, reception: Reception, caller: ThreadPoolExecutor, gpus: int = 0) -> None:
        self._reception = reception
        self._caller = caller
        kind: Any = ray.remote(ReplicaActor)
        # No processor of Ray's count: else there could be no more replicas than the cluster began
        # with, and nobody could scale.
        resources = {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": "SPREAD"}
        self._kind = kind.options(max_restarts=0, max_task_retries=0, **resources)
        self._actor: Any = None
        self._arrival: ArrivedReplica | None = None
        self._expected: asyncio.Future[ArrivedReplica] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._arrival is None else self._arrival.local_pid

    async def start(self) -> Pipe:
        secret, self._expected = self._reception.expect()
        try:
            async with asyncio.timeout(STARTING):
                self._arrival = await self._came(secret, self._expected)
        except TimeoutError:
            raise HostError(f"its process has not come in within {STARTING:g} s") from None
        finally:
            self._reception.give_up(secret)
        return self._arrival.pipe

    async def _came(
        self, secret: str, expected: "asyncio.Future[ArrivedReplica]"
    ) -> ArrivedReplica:
        loop = asyncio.get_running_loop()
        there = (self._reception.address, self._reception.port)

        def begin() -> Any:
            self._actor = self._kind.remote(os.getcwd())
            return self._actor.serve.remote(*there, secret).future()

        try:
            gone = asyncio.wrap_future(await loop.run_in_executor(self._caller, begin))
            gone.add_done_callback(lambda one: one.cancelled() or one.exception())
            await asyncio.wait({expected, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not expected.done():
                gone.result()
        except (RayError, OSError, RuntimeError, ValueError) as error:
            raise HostError(_reason(error)) from None
        if not expected.done():
            raise HostError("its process has ended")
        return expected.result()

    def end(self) -> None:
        """Once its pipe is closed it ends by itself; one that has not come in is not waited for."""
        if self._expected is not None and not self._expected.done():
            self._expected.set_exception(HostError("it is not wanted any more"))

    async def reap(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._caller, self._reap)

    def _reap(self) -> None:
        actor = self._actor
        arrival = self._arrival
        self._actor = None
        self._arrival = None
        if actor is not None:
            with suppress(RayError, ValueError, RuntimeError):
                ray.kill(actor, no_restart=True)
        if arrival is not None and arrival.local_pid is not None:
            until = monotonic() + LEAVING
            while _lives(arrival.local_pid) and monotonic() < until:
                sleep(LOOK)
            with suppress(OSError):  # one that is stopped hears nothing
                os.kill(arrival.local_pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    with suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


def _reason(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
