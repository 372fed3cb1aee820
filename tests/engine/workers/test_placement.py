"""The router and the placement of branches, against what a look at everybody would find."""

import random
from time import perf_counter

from specsot.engine.workers.placement import (
    MAX_HOLDERS,
    Holders,
    Loads,
    PrefixIndex,
    assign_branches,
    candidates,
    place_branches,
    prefix_keys,
    route,
)
from specsot.states.request import Branch, Request
from specsot.states.text.tokens import PromptTokens


def test_keys_of_beginnings() -> None:
    ids = list(range(200))
    keys = prefix_keys(ids, 64)
    assert len(keys) == 3 and prefix_keys(ids[:63], 64) == []
    assert prefix_keys(ids[:130], 64) == keys[:2]
    assert prefix_keys([9, *ids[1:]], 64)[2] != keys[2], "a key is of all that stands before it"


def test_the_least_loaded_are_those_of_a_full_scan() -> None:
    chance, loads = random.Random(5), Loads(20)
    for _ in range(4000):
        worker = chance.randrange(20)
        loads.add_(worker, chance.randrange(-loads.tokens[worker], 100))
        wanted = sorted(range(20), key=lambda one: (loads.tokens[one], one))
        count = chance.randrange(1, 25)
        assert loads.least(count) == wanted[:count]
        assert len(loads._heap) <= 4 * 20 + 65


def test_who_has_a_beginning() -> None:
    index, ids = PrefixIndex(block=4, size=40), list(range(20))
    keys = prefix_keys(ids, 4)
    assert index.find(keys) == Holders(0, ())
    index.note_(keys[:3], 7)
    index.note_(keys[:1], 8)
    assert index.find(keys) == Holders(12, (7,))
    assert index.find(prefix_keys([*ids[:4], 99, 98, 97, 96], 4)) == Holders(4, (8, 7))
    for worker in range(20):
        index.note_(keys, worker)
    assert index.find(keys) == Holders(20, (19, 18, 17, 16)) and MAX_HOLDERS == 4
    for number in range(100):
        index.note_(prefix_keys([number] * 8, 4), 1)
    assert index.find(keys) == Holders(0, ()) and len(index._workers) == 40


def test_a_request_goes_where_it_is_read_first() -> None:
    loads = Loads(4)
    for worker in range(4):
        loads.add_(worker, 10 + worker)
    assert route(100, Holders(0, ()), loads) == 0
    assert route(100, Holders(96, (2,)), loads) == 2, "96 tokens less to read, 32 more to wait for"
    loads.add_(2, 50)
    assert route(100, Holders(96, (2,)), loads) == 0


def greedy(lengths: list[int], waits: dict[int, int]) -> list[int]:
    placed, ends = [0] * len(lengths), dict(waits)
    for index in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        placed[index] = min(ends, key=lambda worker: (ends[worker], worker))
        ends[placed[index]] += lengths[index]
    return placed


def test_the_longest_branch_first_to_whoever_is_free_first() -> None:
    chance = random.Random(3)
    for _ in range(300):
        lengths = [chance.randrange(1, 200) for _ in range(chance.randrange(1, 12))]
        waits = {worker: chance.randrange(300) for worker in range(chance.randrange(1, 9))}
        assert place_branches(lengths, waits) == greedy(lengths, waits)
    assert place_branches([10, 50, 30, 20], {1: 0, 2: 0}) == [1, 1, 2, 2]
    assert place_branches([1], {}) == [None]


def test_a_prefix_that_costs_too_much_to_bring_stays() -> None:
    loads = Loads(10)
    loads.add_(3, 40)
    assert candidates([3], 2, 25, loads) == {3: 40, 0: 25, 1: 25}
    near = place_branches([60, 60], candidates([3], 2, 25, loads))
    far = place_branches([60, 60], candidates([3], 2, 1000, loads))
    assert near == [0, 1] and far == [3, 3]


def test_ten_thousand_workers_cost_hardly_more_than_ten() -> None:
    times = []
    for count in (10, 10_000):
        loads, chance = Loads(count), random.Random(1)
        began = perf_counter()
        for _ in range(4000):
            worker = route(chance.randrange(50, 500), Holders(0, ()), loads)
            loads.add_(worker, 60)
            place_branches([60, 50, 40], candidates([worker], 3, 5, loads))
            loads.add_(worker, -50)
        times.append(perf_counter() - began)
    assert times[1] < 8 * times[0], times


def test_whoever_has_no_room_gets_no_more() -> None:
    room = {0: 1, 1: 2, 2: 0}
    assert place_branches([5, 9, 7, 1], {0: 0, 1: 3, 2: 0}, room) == [1, 0, 1, None]
    assert room == {0: 1, 1: 2, 2: 0}, "what the caller has stays as it is"
    assert place_branches([5], {2: 0}, {2: 0}) == [None]


def test_of_equals_the_one_that_has_the_prefix_is_taken() -> None:
    branch = Branch(Request("1", 0, "", PromptTokens(), PromptTokens(), frozenset(), 9, 0), 0, 0, 9)
    loads, room = dict.fromkeys("abc", 4), dict.fromkeys("abc", 1)
    assert assign_branches([branch], loads, room, {"b"}) == [(branch, "b")]
    assert assign_branches([branch], {**loads, "c": 3}, room, {"b"}) == [(branch, "c")]
    assert assign_branches([branch], {}, {}, set()) == []
