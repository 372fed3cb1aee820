"""The replicas of a fleet: started, attached, drained, detached; what they count and show."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from ...shell import complain
from ..wire.engines import LinkState
from ..wire.hosts import EngineHost
from ..wire.link import EngineLink
from ..wire.protocol import Failed, Picture, Start
from ..wire.tickets import EngineGoneError
from .router import Replica, Router
from .totals import ended, summed

TRIES = 3  # lives in a row in which a replica says nothing; then it is given up
LOOKED = 0.1  # seconds between two looks at who has drained


@dataclass(frozen=True, slots=True)
class Berth:
    """What a replica is started with. start: its first message; host: where it runs."""

    start: Start
    host: EngineHost


class ScaleError(RuntimeError):
    """There cannot be as many replicas as were asked for; says why."""


class Members:
    """Who the replicas are.

    Args:
        berth: what replica number i is started with.
        deadline: seconds of silence after which one has hung.
        router: is told who gets requests.
        changed: is called when a replica has come, gone or become another. saw: with pictures.

    Attributes:
        all: every replica that has not ended, those that drain too. failed: why the last of them
            cannot start, if there is none left.
    """

    def __init__(
        self,
        berth: Callable[[int], Berth],
        deadline: float,
        router: Router,
        changed: Callable[[], None],
        saw: Callable[[Picture], None],
    ) -> None:
        self._berth = berth
        self._deadline = deadline
        self._router = router
        self._changed = changed
        self._saw = saw
        self.all: list[Replica] = []
        self.failed: Failed | None = None
        self._wanted = 0
        self._closed = False
        self._looked_at = False
        self._lives = set[asyncio.Task[None]]()
        self._gone: dict[str, dict[str, Any]] = {}
        self._shown: dict[str, tuple[Replica, int]] = {}

    @property
    def state(self) -> LinkState:
        """Of the best of them."""
        states = {one.link.state for one in self.all}
        order = (LinkState.READY, LinkState.STARTING)
        return next((one for one in order if one in states), LinkState.DEAD)

    @property
    def counts(self) -> Mapping[str, Mapping[str, Any]]:
        return summed([self._gone, *(one.link.counts for one in self.all)])

    @property
    def _staying(self) -> list[Replica]:
        return [one for one in self.all if not one.draining]

    # -- one of them ------------------------------------------------------------------------------

    def begin(self, count: int) -> None:
        """Start so many."""
        self._wanted = count
        for _ in range(count):
            self._add()

    def _add(self) -> Replica:
        """One more, which gets nothing until its models are loaded."""
        taken = {one.name for one in self.all}
        number = next(i for i in range(len(taken) + 1) if f"replica-{i}" not in taken)
        berth = self._berth(number)
        name = f"replica-{number}"
        link = EngineLink(
            berth.start,
            berth.host,
            name,
            deadline=self._deadline,
            tries=TRIES,
            told=lambda: self._moved(replica),
        )
        replica = Replica(name, link)
        self.all.append(replica)
        self._show(replica)
        life = asyncio.create_task(self._live(replica))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)
        return replica

    async def _live(self, replica: Replica) -> None:
        """Until it has drained, or is given up."""
        await replica.link.run()
        self.all.remove(replica)
        why = replica.link.failed
        if why is not None and not self._closed:
            if self.all:
                complain(f"{replica.name} is given up: {why.message}")
            else:
                self.failed = why
        self._changed()

    def _moved(self, replica: Replica) -> None:
        """Its state has changed."""
        link = replica.link
        if not link.ready:
            self._router.lose_(replica)
            self._gone = summed([self._gone, ended(link.counts)])
            link.counts = {}
        else:
            where = f" (process {link.pid})" if link.pid is not None else ""
            complain(f"{replica.name} is ready{where}")
            if not replica.draining:
                self._router.attach_(replica)
        self._changed()

    # -- how many ---------------------------------------------------------------------------------

    async def look(self) -> None:
        """End those that have drained."""
        for one in self.all:
            if one.draining and not one.link.open and one.link.state is not LinkState.CLOSED:
                await one.link.close()

    async def close(self) -> None:
        """End all of them."""
        self._closed = True
        for one in [*self.all]:
            await one.link.close()

    async def ended(self) -> None:
        """Wait until nothing of them is left."""
        if self._lives:
            await asyncio.wait(self._lives)

    async def scale(self, count: int, tell: Callable[[str], None]) -> None:
        """Have so many: new ones get requests once they are loaded, those too many end when they
        have answered what they have.

        Args:
            tell: is given a line for each thing that has been done.

        Raises:
            ScaleError: some cannot start, or somebody asked for another number meanwhile.
        """
        self._wanted = count
        for one in self.all:
            if one.draining and len(self._staying) < count and one.link.ready:
                one.draining = False
                self._router.attach_(one)
                tell(f"{one.name} stays")
        new = [self._add() for _ in range(count - len(self._staying))]
        going = sorted(self._staying, key=lambda one: (one.link.ready, one.link.open))
        for one in going[: len(going) - count]:
            one.draining = True
            self._router.detach_(one)
            tell(f"{one.name} drains, {one.link.open} requests are open")
        await self._until_scaled(count, new, tell)

    async def _until_scaled(
        self, count: int, new: Sequence[Replica], tell: Callable[[str], None]
    ) -> None:
        """Wait for what was begun, and tell of it."""
        begun = dict.fromkeys(new, monotonic())
        going = [one for one in self.all if one.draining]
        while begun or going:
            await asyncio.sleep(LOOKED)
            for one in [*begun]:
                if one.link.ready:
                    tell(f"{one.name} is attached after {monotonic() - begun.pop(one):.1f} s")
                elif one.link.failed is not None:
                    self._wanted = len(self._staying)
                    raise ScaleError(one.link.failed.message)
            for one in [one for one in going if one not in self.all]:
                going.remove(one)
                tell(f"{one.name} is detached")
            if self._wanted != count or self._closed:
                raise ScaleError("the server ends" if self._closed else "another number is wanted")

    # -- pictures ---------------------------------------------------------------------------------

    def show(self, on: bool) -> None:
        """Whether pictures are wanted."""
        self._looked_at = on
        for one in self.all:
            self._show(one)
            with suppress(EngineGoneError):
                one.link.look(on)

    def _show(self, replica: Replica) -> None:
        wanted = {lambda picture: self._pictured(replica, picture)}
        replica.link.watchers = wanted if self._looked_at else set()

    def _pictured(self, replica: Replica, picture: Picture) -> None:
        """Of each graph one replica is shown: the same one as long as it has something to do."""
        shown, running = self._shown.get(picture.graph, (replica, 0))
        if shown is not replica and shown.link.ready and (running or not picture.running):
            return
        self._shown[picture.graph] = replica, picture.running
        self._saw(picture)
