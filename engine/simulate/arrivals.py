"""Arrivals of requests, one after another: Poisson, bursts, or a recorded file."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    at: seconds from the start. prompt: tokens of its prompt; the first `shared` of them are those
    of all requests with this `stem`. outline: tokens that it writes before its parts, 0 without an
    outline. texts: tokens of each part, or of its one answer. budget: tokens that it asks for, of
    each text; 0 leaves that to the graph.
    """

    at: float
    prompt: int
    texts: tuple[int, ...]
    outline: int = 0
    stem: int = 0
    shared: int = 0
    budget: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """The distribution of generated requests; ranges are uniform, both ends included. The budget of
    a request is the next power of two above its longest text. stems: how many beginnings there are,
    of `shared` tokens each; 0 for none. parts: (0, 0) for plain answers."""

    prompt: tuple[int, int] = (20, 120)
    answer: tuple[int, int] = (16, 256)
    outline: tuple[int, int] = (20, 60)
    parts: tuple[int, int] = (0, 0)
    stems: int = 0
    shared: int = 0

    def draw(self, at: float, chance: random.Random) -> Arrival:
        parts = chance.randint(*self.parts)
        texts = tuple(chance.randint(*self.answer) for _ in range(parts or 1))
        outline = chance.randint(*self.outline) if parts else 0
        shared = self.shared if self.stems else 0
        stem = chance.randrange(self.stems) if self.stems else 0
        prompt = shared + chance.randint(*self.prompt)
        budget = 1 << max(texts).bit_length()
        return Arrival(at, prompt, texts, outline, stem=stem, shared=shared, budget=budget)


def arrivals(spec: str, count: int, work: Workload, seed: int) -> Iterator[Arrival]:
    """The arrivals that `--arrivals` names: `poisson:RATE`, `bursts:RATE:SIZE`, or a file. Raises
    UsageError: it is none of these."""
    kind, *numbers = spec.split(":")
    try:
        if (kind, len(numbers)) in (("poisson", 1), ("bursts", 2)):
            rate = float(numbers[0])
            size = int(numbers[1]) if kind == "bursts" else 1
            if rate > 0 and size > 0:
                chance = random.Random(f"{kind} {seed}")
                return _generated(rate, size, work, count=count, chance=chance)
    except ValueError:
        raise UsageError(f"--arrivals {spec}: no such numbers") from None
    if not Path(spec).is_file():
        raise UsageError(f"--arrivals {spec}: neither poisson:RATE, bursts:RATE:SIZE, nor a file")
    return _recorded(Path(spec))


def _generated(
    rate: float, size: int, work: Workload, *, count: int, chance: random.Random
) -> Iterator[Arrival]:
    """`rate` requests a second, `size` of them at once, with exponential gaps."""
    at = 0.0
    for number in range(count):
        if number % size == 0:
            at += chance.expovariate(rate / size)
        yield work.draw(at, chance)


def _recorded(path: Path) -> Iterator[Arrival]:
    """Arrivals from a file of JSON lines with the fields of `Arrival`, in the order of time. Raises
    UsageError: a line is not one."""
    before = 0.0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
                one = Arrival(**values | {"texts": tuple(values["texts"])})
                valid = bool(one.texts) and min(one.texts) >= 1 and one.at >= before
                valid &= 0 <= one.shared <= one.prompt and one.prompt >= 1
                valid &= min(one.outline, one.budget) >= 0
            except (ValueError, TypeError, KeyError) as error:
                raise UsageError(f"{path}:{number}: not an arrival: {error}") from None
            if not valid:
                raise UsageError(f"{path}:{number}: invalid arrival: {line.strip()[:80]}")
            before = one.at
            yield one
