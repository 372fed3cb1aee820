"""Whole runs on two ranks, each of which makes the same decisions: the tokens of one process."""

from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.sharded_work import runs

DRAWN = ("sampling.temperature=0.8", "sampling.top_p=0.9")
CASES = (
    ("autoregressive", "", ()),
    ("ngram", "", ()),
    ("eagle", "eagle3", ()),
    ("eagle", "eagle3", DRAWN),
    ("eagle2", "eagle2", ()),
    ("dflash", "dflash", ()),
    ("ddtree", "dflash", ()),
    ("speculative", "vanilla", ()),
    ("bim_eagle", "eagle3", ()),
    ("bim_eagle", "eagle3", DRAWN),
    ("paged_eagle", "eagle3", ()),
    ("batching_eagle", "eagle3", ()),
)
NAMES = [" ".join((graph, *sets)) for graph, _, sets in CASES]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    return runs(None, CASES), run_ranks(2, runs, tmp_path_factory.mktemp("ranks"), CASES)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_one_process(name: str, found: tuple[Any, list[Any]]) -> None:
    whole, both = found
    assert both[0][name] == both[1][name], "a rank has decided otherwise"
    assert both[0][name] == whole[name]
    assert sum(len(ids) for texts in whole[name].values() for ids in texts) > 20
