"""Where the rows of a request will lie: shares of the pool, so that requests lie side by side."""

import pytest
from helpers import managers
from hypothesis import given
from hypothesis import strategies as st

from specsot.ops.attention.metadata import SlotRun
from specsot.ops.forward import plan_attention
from specsot.states.admission import REGION_STEP, Admission, CapacityModel, request_slots


def admission(capacity: int, most: int) -> Admission:
    return managers.manager(capacity=max(capacity, 8), most=most).admission


@given(st.integers(8, 3000), st.integers(1, 9), st.integers(0, 400), st.integers(1, 400))
def test_a_region_holds_its_request(capacity: int, most: int, prompt: int, budget: int) -> None:
    one = managers.request(prefix=[1] * prompt, budget=budget)
    found = admission(capacity, most)
    needed = request_slots(one) + found.capacity.tree_slots(1)
    share = capacity // most
    size = found.region(one)[0]
    assert size >= needed
    assert size == share or (
        needed > share and size % REGION_STEP == 0 and size - needed < REGION_STEP
    )


@pytest.mark.parametrize(("nodes", "beams", "size"), [(0, 1, 64), (30, 1, 128), (0, 4, 192)])
def test_beams_and_trees_are_counted(nodes: int, beams: int, size: int) -> None:
    model = CapacityModel(4096, 64, nodes, beams=beams)
    rules = Admission(capacity=model, limits=managers.limits(capacity=4096, most=64))
    assert rules.region(managers.request(budget=40))[0] == size


def test_requests_that_run_together_are_one_group() -> None:
    made = managers.manager(drafter="ngram", capacity=512, most=4)
    managers.running(made, *(managers.request(key, prefix=[5] * 9) for key in "abcd"))
    batch = managers.tree_rows_(made, managers.proposal(*[managers.chain(50)] * 4))
    (group,) = plan_attention(batch.rows, made.kv).groups
    assert group.keys == SlotRun(0, 13, 128, 4)


def test_a_share_is_used_again_when_its_request_has_ended() -> None:
    made = managers.manager(capacity=512, most=4)
    made_branches = managers.running(made, *(managers.request(key) for key in "abcd"))
    second = made_branches[1].request
    made.table.cancel("b")
    made.lifecycle.release_and_prepare_()
    assert second.prefix_owner not in made.kv.regions
    late = managers.request("e")
    batch = managers.open_requests_(made, late)
    assert [b.request for b in batch.newcomers] == [late]
    assert made.kv.regions[late.prefix_owner].first == 128


@pytest.mark.parametrize("drafter", ["none", "vanilla"])
def test_every_pool_has_a_region_for_a_request(drafter: str) -> None:
    made, one = managers.manager(drafter=drafter, capacity=512), managers.request()
    managers.open_requests_(made, one)
    for pool in made.pools:
        region = pool.regions[one.prefix_owner]
        assert (region.first, region.size) == (0, 128)


def test_rows_of_a_pool_need_no_regions() -> None:
    made, one = managers.manager("batching"), managers.request()
    managers.open_requests_(made, one)
    assert not made.kv.regions
