"""The workers of a router or of a director: started, started again or replaced, and ended."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from ..shell import complain
from .link import BackgroundService, WorkerLink, WorkerSpec
from .protocol import Failed, Message

RESTART_PAUSES = (0.1, 0.5, 2.0, 5.0)  # seconds, by the number of deaths in a row
STABLE_SECONDS = 60.0  # of a life after which deaths are counted anew


@dataclass(frozen=True, slots=True)
class WorkerSource:
    """Where workers come from.

    Attributes:
        spec: of worker number i with part p of the target's weights. parts: of the weights.
        services: open while workers run.
    """

    spec: Callable[[int, int], WorkerSpec]
    parts: int = 1
    services: Sequence[BackgroundService] = ()


class Membership:
    """The links of all workers that have not ended for good.

    Args:
        deadline: seconds of silence after which a worker is lost; None: they are not watched.
        restarts: a worker whose process ends is started again under its name; else it leaves.
        tries: lives in a row without a message after which a worker fails; None: any number.
        on_message, on_state: see `WorkerLink`; on_state also follows a worker that leaves.

    Attributes:
        links: of the workers; a link that has left is not among them.
    """

    def __init__(
        self,
        source: WorkerSource,
        *,
        deadline: float | None,
        restarts: bool,
        tries: int | None = None,
        on_message: Callable[[WorkerLink, Message], None],
        on_state: Callable[[WorkerLink], None],
    ) -> None:
        self.source = source
        self.links: list[WorkerLink] = []
        self.closed = False
        self._deadline = deadline
        self._restarts = restarts
        self._tries = tries
        self._on_message = on_message
        self._on_state = on_state
        self._lives = set[asyncio.Task[None]]()

    async def open(self) -> None:
        """Open the services of the source."""
        for service in self.source.services:
            await service.open()

    def start(self, name: str, number: int, part: int = 0) -> WorkerLink:
        """Start one more worker, from code that runs in the loop."""
        link = WorkerLink(
            name,
            self.source.spec(number, part),
            deadline=self._deadline,
            on_message=self._on_message,
            on_state=self._on_state,
        )
        self.links.append(link)
        life = asyncio.create_task(self._live(link))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)
        return link

    async def _live(self, link: WorkerLink) -> None:
        """All lives of a worker."""
        deaths = 0
        failures = 0
        try:
            while not link.over:
                started = monotonic()
                await link.live()
                if link.over or not self._restarts:
                    return
                deaths = 1 if monotonic() - started > STABLE_SECONDS else deaths + 1
                failures = 0 if link.messages else failures + 1
                if self._tries is not None and failures >= self._tries:
                    why = f"{link.name} {link.why}, {failures} times in a row"
                    link.failed = Failed(1, why)
                    return
                complain(f"{link.name} {link.why}; it is started again ({link.lives})")
                await asyncio.sleep(RESTART_PAUSES[min(deaths, len(RESTART_PAUSES)) - 1])
        finally:
            self.remove(link)
            self._on_state(link)

    def remove(self, link: WorkerLink) -> None:
        """Count a worker as one of them no longer."""
        if link in self.links:
            self.links.remove(link)

    async def close(self) -> None:
        """Ask all workers to end."""
        self.closed = True
        for link in [*self.links]:
            await link.close()

    async def ended(self) -> None:
        """Wait until all processes have ended, then close the services."""
        if self._lives:
            await asyncio.wait(self._lives)
        for service in self.source.services:
            service.close()
