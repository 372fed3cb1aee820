"""Workers write what one engine writes: every drafter, layout, number of branches, coin."""

import pytest
from helpers.clusters import BEES, CAMPING, alone, on_workers, session_of
from helpers.support import outline_of

from specsot.engine.prepare.inputs import Prompt

SAMPLED = "sampling.temperature=0.8"
GRAPHS = (
    ("bim_eagle",),
    ("paged_eagle", SAMPLED),
    ("batching_eagle", SAMPLED),
    ("bim_dflash",),
    ("bim_dflash", SAMPLED, "layout.kind=paged"),
    ("bim_vanilla", SAMPLED),
    ("bim_ngram", SAMPLED, "layout.kind=paged"),
    ("bim_plain", "skeleton.share=prompt"),
    ("bim_eagle", SAMPLED, "skeleton.share=prompt"),
)


@pytest.mark.parametrize("graph", GRAPHS, ids=" ".join)
def test_workers_write_what_one_engine_writes(graph: tuple[str, ...]) -> None:
    session = session_of(*graph)
    ran = on_workers(session, [CAMPING, BEES])
    assert ran.digest == alone(session, [CAMPING, BEES])
    assert len(ran.director.tokens) == 2, "both workers have written"
    assert not ran.director.workers.losses


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_any_number_of_branches(count: int) -> None:
    outline = outline_of(count)
    kind = "paged" if count % 2 else "bim"
    session = session_of("bim_eagle", SAMPLED, f"layout.kind={kind}", budget=12, outline=outline)
    assert on_workers(session, [CAMPING]).digest == alone(session, [CAMPING])


def test_an_answer_without_an_outline() -> None:
    session = session_of("eagle", SAMPLED)
    prompts = [Prompt(str(number), f"What is {number}?") for number in range(6)]
    ran = on_workers(session, prompts, workers=3)
    assert ran.digest == alone(session, prompts)
    assert len(ran.director.tokens) == 3


def test_several_samples_of_a_prompt() -> None:
    session = session_of("eagle", "sampling.temperature=1.0", "limits.n=5", budget=12)
    assert on_workers(session, [CAMPING]).digest == alone(session, [CAMPING])


def test_a_pool_that_is_too_small_for_the_prefix_that_arrives() -> None:
    """What has no room is read when its turn comes; nothing waits for it."""
    session = session_of("bim_eagle", "layout.kv_slots=640", "layout.max_num_branches=2")
    assert on_workers(session, [CAMPING, BEES]).digest == alone(session, [CAMPING, BEES])


def test_a_prompt_that_never_fits_is_refused_as_alone() -> None:
    session = session_of("bim_eagle", "layout.kv_slots=450", "layout.max_num_branches=2")
    long = Prompt("3", "Tell me about tea. " * 60)
    ran = on_workers(session, [long, CAMPING])
    assert ran.digest == alone(session, [long, CAMPING])
    assert ran.answers[0].sections[0].finish == "refused"
    assert "slots" in ran.answers[0].sections[0].note


def test_parts_that_depend_on_others() -> None:
    outline = outline_of(4, deps={2: (1,), 3: (1,), 4: (2, 3)})
    session = session_of("bim_eagle", SAMPLED, outline=outline)
    ran = on_workers(session, [CAMPING])
    assert ran.digest == alone(session, [CAMPING])
    assert len(ran.told("placed")) == 3, "each wave once the one before has ended"


def test_branches_that_nobody_has_room_for_go_to_whoever_is_free_first() -> None:
    outline = outline_of(4)
    session = session_of("bim_plain", "layout.max_num_branches=1", budget=12, outline=outline)
    ran = on_workers(session, [CAMPING])
    assert ran.digest == alone(session, [CAMPING])
    first, *later = [one["branches"] for one in ran.told("placed")]
    assert len(set(first.values())) == len(first) == 2, "one for each"
    assert sum(map(len, later)) == 2 and all(len(one) <= 2 for one in later)
