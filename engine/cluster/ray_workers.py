"""Workers as Ray actors: a process each, which live on while process groups change.

Ray authenticates by token, has no dashboard and sends no statistics here; but it listens on all
interfaces of the machine, whatever it is told: docs/cluster.md.
"""

import json
import os
import secrets
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from hashlib import sha256
from ipaddress import ip_address
from time import monotonic
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from ..prepare.cluster_block import ClusterBlock
from ..prepare.job import Job
from ..workers.ray_cluster import ray_driver
from .driver.membership import Membership
from .driver.ports import WorkerPort
from .worker_job import job_text, loaded, parts_of
from .workers.messages import Greet, packed
from .workers.worker import ClusterWorker

STARTING = 180.0  # seconds until a worker's process has to answer for the first time
BEAT = 0.5  # seconds after which a worker answers that it has nothing to say
STALE = 15.0  # seconds after which nobody has a worker that nobody listens to


class RayWorker:
    """What an actor does: it hands texts on to a worker, and back.

    Args:
        who: the first to hear its replies.
    """

    def __init__(self, text: str, folder: str, local: bool, who: str) -> None:
        with suppress(OSError):  # another machine may not have it
            os.chdir(folder)
        runtime: Any = ray.util
        address = "127.0.0.1" if local else runtime.get_node_ip_address()
        self._worker = ClusterWorker(lambda: loaded(text), address)
        self._worker.tell_only(who)
        self._holder = ""
        self._heard = 0.0

    def ask(self, order: str) -> None:
        self._worker.ask(order)

    def hear(self, seconds: float, who: str) -> list[str]:
        self._heard = monotonic()
        heard = self._worker.hear(seconds, who)
        self._heard = monotonic()
        return heard

    def reserve(self, who: str) -> bool:
        """Whether it is this driver's from now on: nobody else hears it. who: new each time."""
        if who and self._holder and monotonic() - self._heard < STALE:
            return False
        self._holder = who
        self._heard = monotonic()
        self._worker.tell_only(who)
        return True

    def state(self) -> str:
        """Whether somebody has it."""
        return "in use" if self._holder else "free"

    def where(self) -> tuple[str, int]:
        """The machine and the process."""
        return socket.gethostname(), os.getpid()


class RayPort:
    """A worker that is an actor.

    Args:
        who: as whom it is listened to.

    Attributes:
        adopted: it was there before, and stays.
    """

    def __init__(
        self, name: str, actor: Any, who: str, deadline: float, *, adopted: bool = False
    ) -> None:
        self.name = name
        self.actor = actor
        self.adopted = adopted
        self._who = who
        self.lost = ""
        self.pid = 0
        self._deadline = deadline
        self._heard = False
        self.listens = self._listen()

    def _listen(self) -> Any:
        self.asked = monotonic()
        return self.actor.hear.remote(BEAT, self._who)

    def ask(self, order: str) -> None:
        try:
            ray.get(self.actor.ask.remote(order), timeout=self._patience)
        except (RayError, GetTimeoutError) as error:
            self.lost = self.lost or _why(error)

    @property
    def _patience(self) -> float:
        return self._deadline if self._heard else STARTING

    def take(self) -> list[str]:
        """What was said, once `listens` is ready; then it is listened to again."""
        try:
            heard: list[str] = ray.get(self.listens)
        except RayError as error:
            self.lost = _why(error)
            return []
        if not self._heard:
            machine, pid = ray.get(self.actor.where.remote())
            self.pid = pid if machine == socket.gethostname() else 0
        self._heard, self.listens = True, self._listen()
        return heard

    def look(self) -> None:
        """A worker that has not answered for too long is lost."""
        if monotonic() - self.asked > self._patience + BEAT and not self.lost:
            self.lost = f"no answer for {self._patience:g} s"

    def kill(self) -> None:
        with suppress(RayError, ValueError):
            ray.kill(self.actor, no_restart=True)
        if self.pid:  # one that is stopped hears nothing
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


def _why(error: Exception) -> str:
    return "it did not answer" if isinstance(error, GetTimeoutError) else "its process has ended"


class RayLauncher:
    """Workers of one job on a Ray cluster, which is started here if it is to be `local`.

    Args:
        keeps: its workers stay when it is closed.

    Raises:
        ClusterError: there is no such cluster, or it lets nobody in.
    """

    def __init__(self, job: Job, block: ClusterBlock, *, keeps: bool = False) -> None:
        self.job = job
        self.block = block
        self.keeps = keeps
        self.parts = parts_of(job, block)
        self._ports: list[RayPort] = []
        self._number = 0
        self._stack = ExitStack()
        self._local = ip_address(block.interface).is_loopback
        self._connect()
        groups = {"orders": 1, "replies": 1}
        actor: Any = ray.remote
        self._kind = actor(max_restarts=0, max_task_retries=0, concurrency_groups=groups)(
            _with_groups(RayWorker)
        )

    def _connect(self) -> None:
        self._stack.enter_context(ray_driver(self.block.address, self.block.workers))

    def start(self, name: str, part: int) -> RayPort:
        text = job_text(self.job, self.block, self._number, part)
        digest = sha256(text.encode()).hexdigest()[:12]
        who = secrets.token_hex(8)
        port = self._adopted(name, digest, who) or self._new(name, text, digest, who)
        self._number += 1
        self._ports.append(port)
        return port

    def _adopted(self, name: str, digest: str, who: str) -> RayPort | None:
        """A worker of the same job that is there and free."""
        mine = {port.actor._actor_id for port in self._ports}
        for one in ray.util.list_named_actors(all_namespaces=False):
            if one.startswith(f"{digest}-"):
                actor = ray.get_actor(one)
                if actor._actor_id not in mine and _reserved(actor, who, self.block.deadline):
                    port = RayPort(name, actor, who, self.block.deadline, adopted=True)
                    port.ask(packed(Greet()))
                    return port
        return None

    def _new(self, name: str, text: str, digest: str, who: str) -> RayPort:
        # Over the machines of a cluster: Ray would fill one first.
        settings: dict[str, Any] = {"name": f"{digest}-{who}", "scheduling_strategy": "SPREAD"}
        if self.keeps:
            settings["lifetime"] = "detached"
        if json.loads(text)["options"]["device"].startswith("cuda"):
            settings["num_gpus"] = 1
        actor = self._kind.options(**settings).remote(text, os.getcwd(), self._local, who)
        return RayPort(name, actor, who, self.block.deadline)

    def wait(self, ports: Sequence[WorkerPort], seconds: float) -> list[tuple[WorkerPort, str]]:
        mine = {port.listens: port for port in self._ports if port in ports and not port.lost}
        heard: list[tuple[WorkerPort, str]] = []
        if mine:
            ray.wait([*mine], timeout=seconds)
            ready, _ = ray.wait([*mine], num_returns=len(mine), timeout=0)
            for one in ready:
                heard += [(mine[one], text) for text in mine[one].take()]
        for port in mine.values():
            port.look()
        return heard

    def release(self) -> None:
        """Its workers are free for others, those that are lost are gone."""
        for port in self._ports:
            if not port.lost:
                with suppress(RayError, GetTimeoutError):
                    ray.get(port.actor.reserve.remote(""), timeout=self.block.deadline)
        self._ports.clear()

    def close(self) -> None:
        for port in self._ports:
            if not (port.adopted or self.keeps):
                port.lost = port.lost or "closed"
                port.kill()
        self.release()
        self._stack.close()


def _reserved(actor: Any, who: str, deadline: float) -> bool:
    with suppress(RayError, GetTimeoutError):
        return bool(ray.get(actor.reserve.remote(who), timeout=deadline))
    return False


def _with_groups(kind: type[Any]) -> type[Any]:
    """Orders stay in their order, and wait for no replies."""
    for name in ("ask", "hear", "reserve", "state", "where"):
        group = "replies" if name == "hear" else "orders"
        setattr(kind, name, ray.method(concurrency_group=group)(getattr(kind, name)))
    return kind


def load_workers(job: Job, block: ClusterBlock, token: str) -> None:
    """Workers of a job on a cluster, which stay.

    Raises:
        ClusterError: they cannot begin.
    """
    os.environ["RAY_AUTH_TOKEN"] = token
    launcher = RayLauncher(job, block, keeps=True)
    try:
        Membership(launcher, block, lambda record: None).begin_()
    finally:
        launcher.close()


def states_of(address: str, patience: float = 5.0) -> Iterator[tuple[str, str]]:
    """The workers of a cluster, and whether they are in use; raises ClusterError."""
    with ray_driver(address):
        for name in sorted(ray.util.list_named_actors(all_namespaces=False)):
            with suppress(RayError, GetTimeoutError, ValueError):
                yield name, str(ray.get(ray.get_actor(name).state.remote(), timeout=patience))
