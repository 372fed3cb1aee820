"""Several replicas: who gets what, and that nobody notices who comes, goes or is lost."""

import asyncio
import random
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from threading import Event, Lock
from time import monotonic
from typing import Any

import pytest
from helpers.clusters import ThreadHost
from helpers.servers import BEES, RAIN

from specsot.engine.cli.serve import plain_options
from specsot.engine.prepare.inputs import Prompt, RequestSettings
from specsot.engine.prepare.options import RunOptions
from specsot.engine.workers import tickets
from specsot.engine.workers.link import HangLimits, LinkState, WorkerGoneError, WorkerSource
from specsot.engine.workers.placement import PrefixIndex
from specsot.engine.workers.process import WorkerProcess
from specsot.engine.workers.protocol import Admitted, Encode, Ended, Message, Start, Submit, Wrote
from specsot.engine.workers.router import MAX_LOSSES, Router
from specsot.states.text.grammar import schema_grammar

LOADS = Lock()
READY = b'"kind":"Ready"'
GRAPHS, BUDGET, DEADLINE = ("bim_dflash", "dflash"), 24, 2.0


def start_of(*graphs: str, budget: int = BUDGET) -> Start:
    return Start(graphs or GRAPHS, plain_options(RunOptions(threads=1, max_new_tokens=budget)))


def engine_host(start: Start) -> ThreadHost:
    """The engine process of a server in a thread. Models are loaded in one thread at a time: until
    a message says that they are loaded."""
    loading = Event()

    def serve(connection: socket.socket) -> None:
        LOADS.acquire()
        loading.set()
        try:
            WorkerProcess().serve(connection)
        finally:
            loaded(READY)

    def loaded(data: bytes) -> None:
        if READY in data and loading.is_set():
            loading.clear()
            LOADS.release()

    return ThreadHost(start, serve, loaded)


class Heard(list[Message]):
    """What whoever asked was told."""

    @property
    def wrote(self) -> list[Wrote]:
        return [message for message in self if isinstance(message, Wrote)]

    @property
    def ended(self) -> bool:
        return bool(self) and isinstance(self[-1], Ended)

    @property
    def result(self) -> tuple[Any, ...]:
        once: list[tuple[str, int, Any]] = []
        pieces: dict[int, list[str]] = defaultdict(list)
        scores: dict[int, list[Any]] = defaultdict(list)
        for message in self.wrote:
            for name, branch, more in message.events:
                if name == "wrote":
                    pieces[branch] += [piece for piece, _ in more]
                else:
                    once.append((name, branch, more))
            for branch, token, text, score, _ in message.scores:
                scores[branch].append([token, text, score and round(score, 4)])
        text = "".join(message.text for message in self.wrote)
        ended = self[-1]
        assert isinstance(ended, Ended)
        usage = {name: count for name, count in ended.usage.items() if name != "cached"}
        end = ended.text, ended.finish, ended.stop, usage
        return text, pieces, sorted(once, key=repr), scores, end


async def hear(engines: Router, asked: Submit, into: list[Heard] | None = None) -> Heard:
    heard, ticket = Heard(), engines.ask(asked)
    if into is not None:
        into.append(heard)
    while not heard.ended:
        heard.append(await ticket.next())
    ticket.close()
    return heard


async def hear_all(
    engines: Router, asked: Sequence[Submit], into: list[Heard] | None = None
) -> list[Heard]:
    return [*await asyncio.gather(*(hear(engines, one, into) for one in asked))]


@asynccontextmanager
async def running(engines: Router, replicas: int = 1) -> AsyncIterator[None]:
    running = asyncio.create_task(engines.run())
    try:
        await until(lambda: sum(one["state"] == "ready" for one in engines.replicas) == replicas)
        yield
    finally:
        await engines.close()
        await running


async def until(holds: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.01)


def one_engine(start: Start) -> Router:
    return Router(WorkerSource(lambda number, part: engine_host(start)), single=True)


@dataclass
class ThreadFleet:
    """A router, and where its replicas run, by number."""

    start: Start
    count: int = 2
    deadline: float = DEADLINE
    hosts: dict[int, ThreadHost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fleet = Router(WorkerSource(self._host), self.count, HangLimits(self.deadline))

    def _host(self, number: int, part: int) -> ThreadHost:
        self.hosts[number] = engine_host(self.start)
        return self.hosts[number]

    @property
    def busiest(self) -> int:
        facts = max(self.fleet.replicas, key=lambda one: one["tokens"])
        return int(facts["name"].rpartition("-")[2])


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WARM = {"temperature": 0.9}
REQUESTS = (
    Submit("bim_dflash", Prompt("outlined", BEES)),
    Submit("bim_dflash", Prompt("drawn", BEES, seed=5), sampling=WARM),
    Submit("dflash", Prompt("scored", RAIN, seed=7), sampling=WARM, logprobs=1),
    Submit("dflash", Prompt("held", RAIN), RequestSettings(grammar=schema_grammar(SCHEMA))),
    Submit("dflash", Prompt("stopped", BEES, max_new_tokens=20), stop=("e", "zz")),
    Submit(
        "dflash",
        Prompt("raw", "Rain is ", max_new_tokens=30),
        RequestSettings(ignore_eos=True),
        raw=True,
        echo=True,
        logprobs=0,
    ),
)


def replicas(count: int) -> tuple[Any, list[tickets.Replica]]:
    host = engine_host(start_of())
    fleet = Router(WorkerSource(lambda number, part: host))
    choose = partial(tickets.choose_, index=PrefixIndex())
    return choose, [tickets.Replica(f"{i}", host, fleet) for i in range(count)]


def asked(id: str, question: str, rules: str = "", salt: str = "") -> Submit:
    return Submit("dflash", Prompt(id, question, rules=rules, cache_salt=salt))


def test_who_has_read_a_beginning_gets_it_again_unless_others_have_less_to_do() -> None:
    routes, members = replicas(3)
    choose = partial(routes, replicas=members)
    long, other = "You answer in one line. " * 60, "You answer like a poet. " * 60
    first = choose(asked("1", RAIN, long))
    assert first is not None
    first.expected["1"] = 40
    second = choose(asked("2", BEES, other))
    assert second is not None and second is not first
    first.expected.clear()
    second.expected["2"] = 1
    for number in range(5):
        assert choose(asked(str(number), BEES * number, long)) is first
        assert choose(asked(str(number), BEES * number, other)) is second
    first.expected["3"] = 1000
    assert choose(asked("4", RAIN, long)) is not first, "waiting would take longer"
    salted = asked("5", RAIN, long, salt="mine")
    first.expected.clear()
    assert choose(salted) is members[0], "others' rows are not shared"


def test_who_drains_gets_nothing_and_who_is_lost_has_read_nothing() -> None:
    routes, (first, second) = replicas(2)
    long = "You answer in one line. " * 60
    assert routes(asked("1", RAIN, long), [first, second]) is first
    assert routes(asked("2", RAIN, long), [second]) is second
    first.lives += 1
    first.expected["3"] = 1
    assert routes(asked("4", RAIN, long), [first, second]) is second
    assert routes(asked("5", RAIN), []) is None


@pytest.mark.parametrize("speeds", [(3, 1), (1, 1), (1, 5)])
def test_load_follows_speed(speeds: tuple[int, int]) -> None:
    routes, members = replicas(2)
    dice, numbers = random.Random(3), count()
    left: dict[tickets.Replica, dict[str, int]] = {one: {} for one in members}
    wrote = dict.fromkeys(members, 0)

    def ask() -> None:
        number = str(next(numbers))
        chosen = routes(asked(number, f"{number} {RAIN}"), members)
        assert chosen is not None
        left[chosen][number] = dice.randrange(20, 60)
        chosen.expected[number] = 40

    for _ in range(16):
        ask()
    for tick in range(9000):
        for one, speed in zip(members, speeds, strict=True):
            for id in [] if tick % (max(speeds) // speed) else [*left[one]]:
                left[one][id] -= 1
                wrote[one] += 1
                one.expected[id] = max(left[one][id], 8)
                if not left[one][id]:
                    del left[one][id], one.expected[id]
                    ask()
    share = wrote[members[0]] / sum(wrote.values())
    assert share == pytest.approx(speeds[0] / sum(speeds), abs=0.08)


def said(dice: random.Random, text: str, pieces: dict[int, list[str]]) -> list[Wrote]:
    left, steps, at = {branch: list(some) for branch, some in pieces.items()}, [], 0
    opened = [["opened", branch, ""] for branch in pieces]
    while at < len(text) or any(left.values()):
        events, scores = [], []
        for branch, some in left.items():
            new, left[branch] = some[: (n := dice.randrange(3))], some[n:]
            if new:
                events.append(["wrote", branch, [[piece, "t"] for piece in new]])
                scores += [[branch, 1, piece, -0.5, []] for piece in new]
        more = dice.randrange(4)
        steps.append(Wrote("r", text[at : at + more], [*opened, *events], 0, at, scores))
        at, opened = at + more, []
    return steps


def test_a_second_run_says_what_the_first_has_not_said() -> None:
    dice = random.Random(1)
    text, pieces = "a long answer, in parts", {-1: [*"outline"], 0: [*"one"], 1: [*"and two"]}
    for _ in range(200):
        told, heard = tickets.DeliveredStream(), list[Wrote]()
        for lives in range(3):
            steps = said(dice, text, pieces)
            for one in steps[: dice.randrange(len(steps))] if lives < 2 else steps:
                if more := told.new_part(one):
                    heard.append(more)
            told.restart_()
        assert "".join(one.text for one in heard) == text
        events = [event for one in heard for event in one.events]
        assert sum(event[0] == "opened" for event in events) == 3
        for branch, some in pieces.items():
            wrote = [event for event in events if event[0] == "wrote" and event[1] == branch]
            assert [piece for _, _, more in wrote for piece, _ in more] == some
            rows = [row[2] for one in heard for row in one.scores if row[0] == branch]
            assert rows == some
    told = tickets.DeliveredStream()
    told.new_part(Wrote("r", "a lo", (), 0, 1))
    told.restart_()
    with pytest.raises(tickets.DiffersError):
        told.new_part(Wrote("r", "a s", (), 0, 1))


def test_a_prompt_does_not_wait_for_texts_to_tokenize() -> None:
    async def check() -> None:
        alone = one_engine(start_of("dflash"))
        text = "Honey bees live in large families. " * 1000
        async with running(alone):
            texts = [
                asyncio.create_task(
                    alone.answer(Encode("dflash", Prompt(f"t{number}", text)), None)
                )
                for number in range(12)
            ]
            await asyncio.sleep(0)
            ticket = alone.ask(Submit("dflash", Prompt("asked", RAIN)))
            assert (alone.open, alone.tokenizing) == (1, 12)
            assert isinstance(await ticket.next(), Admitted)
            assert not all(one.done() for one in texts)
            lengths = [len((await one).token_ids) for one in texts]
            assert len({*lengths}) == 1 and lengths[0] > 1000
            ticket.close()
            assert (alone.open, alone.tokenizing) == (0, 0)

    asyncio.run(check())


def test_an_engine_that_hangs_is_noticed_recovers_or_is_started_again() -> None:
    async def check() -> None:
        host = engine_host(start_of("dflash"))
        limits = HangLimits(silence=1.0, kill_after=1.0)
        alone = Router(WorkerSource(lambda number, part: host), limits=limits, single=True)
        short = Submit("dflash", Prompt("short", RAIN), timeout=0.5)
        async with running(alone):
            wanted = (await hear(alone, asked("1", RAIN))).result
            host.flows.clear()
            start = monotonic()
            late = asyncio.create_task(hear(alone, short))
            slow = asyncio.create_task(hear(alone, asked("2", RAIN)))
            with pytest.raises(TimeoutError):
                await alone.answer(Encode("dflash", Prompt("text", RAIN)), timeout=0.1)
            last = (await late)[-1]
            assert isinstance(last, Ended) and last.finish == "timeout"
            assert monotonic() - start < 5
            await until(lambda: alone.state is LinkState.HUNG)
            with pytest.raises(WorkerGoneError):
                alone.ask(asked("3", RAIN))
            host.flows.set()
            await until(lambda: alone.ready)
            assert (await slow).result == wanted, "it only had to wait"
            assert alone.replicas[0]["restarts"] == 0
            host.flows.clear()
            lost = asyncio.create_task(hear(alone, asked("4", RAIN)))
            with pytest.raises(WorkerGoneError):
                await lost
            await until(lambda: alone.ready)
            assert alone.replicas[0]["restarts"] == 1
            assert (await hear(alone, asked("5", RAIN))).result == wanted

    asyncio.run(check())


def test_a_lost_replica_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed: list[Any] = []
    send = tickets.Replica.send

    def noted(self: tickets.Replica, message: Any) -> bool:
        if isinstance(message, Submit):
            resumed.append(message.settings.resumed)
        return send(self, message)

    monkeypatch.setattr(tickets.Replica, "send", noted)

    async def check() -> None:
        start = start_of()
        alone = one_engine(start)
        async with running(alone):
            wanted = [one.result for one in await hear_all(alone, REQUESTS)]
        own = ThreadFleet(start)
        async with running(own.fleet, 2):
            for way in ("killed", "hung"):
                begun, reruns = list[Heard](), own.fleet.reruns
                hearing = asyncio.create_task(hear_all(own.fleet, REQUESTS, begun))
                await until(lambda begun=begun: begun and all(one.wrote for one in begun))
                lost = own.hosts[own.busiest]
                if way == "hung":
                    lost.flows.clear()
                else:
                    lost.end()
                heard = await hearing
                assert [one.result for one in heard] == wanted, way
                counts = [[message.tokens for message in one.wrote] for one in heard]
                assert counts == [sorted(one) for one in counts]
                assert own.fleet.reruns > reruns
                await until(lambda: sum(one["state"] == "ready" for one in own.fleet.replicas) == 2)
            assert sum(one["restarts"] for one in own.fleet.replicas) == 2
            assert own.fleet.counts["dflash"]["submitted"] >= 8
            assert any(resumed), "none continued behind its last token"

    asyncio.run(check())


def test_replicas_come_and_go_under_load_and_a_request_that_kills_fails_alone() -> None:
    async def check() -> None:
        lines = list[str]()
        own = ThreadFleet(start_of("dflash"), 1)
        prompts = [Prompt(f"q{i}", f"{RAIN} {i}", seed=i) for i in range(16)]
        many = [Submit("dflash", prompt, sampling=WARM) for prompt in prompts]
        async with running(own.fleet, 1):
            wanted = await hear_all(own.fleet, many)
            hearing = asyncio.create_task(hear_all(own.fleet, many))
            await own.fleet.scale(3, lines.append)
            assert [one.result for one in await hearing] == [one.result for one in wanted]
            bad = asyncio.create_task(hear(own.fleet, asked("bad", BEES)))
            for _ in range(MAX_LOSSES):
                await until(lambda: any(one["open"] for one in own.fleet.replicas))
                again = own.fleet.reruns + 1
                own.hosts[own.busiest].end()
                await until(lambda again=again: own.fleet.reruns == again or bad.done())
            told = (await bad)[-1]
            assert isinstance(told, Ended) and told.finish == "failed"
            assert f"{MAX_LOSSES} replicas" in told.note
            await until(lambda: sum(one["state"] == "ready" for one in own.fleet.replicas) == 3)
            hearing, reruns = asyncio.create_task(hear_all(own.fleet, many)), own.fleet.reruns
            await until(lambda: all(one["open"] for one in own.fleet.replicas))
            await own.fleet.scale(1, lines.append)
            assert [one.result for one in await hearing] == [one.result for one in wanted]
            assert own.fleet.reruns == reruns and len(own.fleet.replicas) == 1
        assert [line.split()[1] for line in lines] == ["is"] * 2 + ["drains,"] * 2 + ["is"] * 2

    asyncio.run(check())
