"""Many requests through one run, block by block: what is held and done must not grow."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch

from helpers.support import TokenBook, graphs
from specsot.engine.models import Models
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import Session

Sizes = Counter[str]


def sizes(value: Any) -> Sizes:
    """Lengths of all containers that can be reached from an object of ours, by their paths."""
    found, seen, queue = Sizes(), {id(value)}, [("", value)]
    while queue:
        path, one = queue.pop()
        for name, part in _parts(one):
            below = f"{path}.{name}".lstrip(".")
            if isinstance(part, np.ndarray | torch.Tensor):
                found[below] += part.size if isinstance(part, np.ndarray) else part.numel()
            elif id(part) not in seen and _is_followed(part):
                seen.add(id(part))
                found[below] += len(part) if isinstance(part, dict | list | set | tuple) else 0
                queue.append((below, part))
    return found


def _is_followed(value: Any) -> bool:
    ours = type(value).__module__.startswith("specsot.") and not isinstance(value, torch.nn.Module)
    return ours or isinstance(value, dict | list | set | tuple)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds; the elements of a container go by one name."""
    if isinstance(value, dict):
        yield from (("[]", one) for one in (*value, *value.values()))
    elif isinstance(value, list | set | tuple):
        yield from (("[]", one) for one in value)
    else:
        slots = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())]
        names = [*getattr(value, "__dict__", ()), *slots]
        yield from ((name, getattr(value, name)) for name in names if hasattr(value, name))


@dataclass
class Calls:
    """Counts calls of our functions: each step of a generator or comprehension is one."""

    count: int = 0

    def __enter__(self) -> "Calls":
        sys.setprofile(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event == "call" and "/specsot/states/" in frame.f_code.co_filename


@dataclass
class Served:
    """What was held after each block, and the calls of functions in states/ in some blocks."""

    requests: int = 0
    tokens: int = 0
    held: list[Sizes] = field(default_factory=list)
    calls: dict[int, int] = field(default_factory=dict)


def short(layout: str, models: Models) -> Session:
    """A session of drawn answers of two tokens, twenty at a time."""
    sets = (f"layout.kind={layout}", "layout.max_num_branches=20", "sampling.temperature=0.7")
    sets = (*sets, "sampling.repetition_penalty=1.2")  # what was written is counted
    sets = (*sets, "scheduler.prefix_cache=false")  # what is kept fills the pool in time
    book = TokenBook(models.target.vocab_size, "outline", ())
    return graphs.session("autoregressive", models, book, budget=2, sets=sets)


def serve(session: Session, texts: Sequence[str], blocks: int) -> Served:
    """A run that is given the same texts again and again, and never comes to its end."""
    run, served = session.start([], lambda event: None), Served()
    branches = run.manager
    counted = (blocks // 4, blocks - 1)  # when everything that is kept for good is there
    for number in range(blocks):
        for at, text in enumerate(texts):
            key = f"{number}/{at}"
            branches.lifecycle.submit(session.request(Prompt(key, text, seed=at)))
        with Calls() if number in counted else nullcontext(Calls()) as calls:
            while branches.table.unfinished:
                run.advance()
        if number in counted:
            served.calls[number] = calls.count
        ended = branches.table.forget_finished()
        served.requests += len(ended)
        served.tokens += sum(len(b.tokens) for one in ended for b in one.all_branches())
        served.held.append(sizes(branches))
        assert branches.kv.current_length == 0
    run.close()
    return served


def check(served: Served, requests: int) -> None:
    assert served.requests == requests
    first, last = served.held[len(served.held) // 4], served.held[-1]
    grown = {path: (first[path], last[path]) for path in first | last if first[path] != last[path]}
    assert not grown, f"held after a quarter of the requests, and after all: {grown}"
    assert len(set(served.calls.values())) == 1, f"calls of a block: {served.calls}"
