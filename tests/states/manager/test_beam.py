"""The hypotheses of a search on the host."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from specsot.ops.beam import first_beams
from specsot.states.beam import BeamSearch, BeamStep, extend_


def search_of(live: Sequence[Sequence[int]], kept: Sequence[Sequence[int] | None]) -> BeamSearch:
    tokens_Wn = np.array(live)
    ended = [None if one is None else np.array(one) for one in kept]
    owners_Wm = np.zeros((len(live), tokens_Wn.shape[1] - 1), np.int32)
    return BeamSearch(first_beams(len(live), torch.device("cpu")), tokens_Wn, owners_Wm, ended)


@pytest.mark.parametrize(
    ("live", "best", "common"),
    [
        ([[5, 6, 7], [5, 6, 8]], None, [5, 6]),
        ([[5, 6, 7], [5, 6, 8]], [5, 2], [5]),
        ([[5, 6, 7], [5, 6, 8]], [5, 6, 7, 1, 2], [5, 6]),
        ([[5, 6, 7], [5, 6, 8]], [2], []),
        ([[5, 6], [4, 6]], None, []),
        ([[5, 6]], None, [5, 6]),
    ],
)
def test_common_tokens_are_those_of_all_that_can_win(
    live: list[list[int]], best: list[int] | None, common: list[int]
) -> None:
    assert search_of(live, [best, *[None] * (len(live) - 1)]).common_tokens == common


def test_kept_hypotheses_may_change_places() -> None:
    search = search_of([[5, 6], [5, 7], [4, 6]], [[9, 2], [8, 2], None])
    origin, parents, tokens = [[1, 4, 0]], [[2, 1, 0, 0, 1, 2]], [[3, 2, 3, 2, 5, 6]]
    fields = [[[2, 0, 0]], [[3, 3, 2]], origin, parents, tokens, [[1, 1, 0]], [[0, 0, 0]], [0]]
    extend_(search, BeamStep(*(np.array(field) for field in fields)), 0)
    assert search.tokens_Wn.tolist() == [[4, 6, 3], [5, 6, 3], [5, 6, 2]]
    assert [None if one is None else one.tolist() for one in search.ended] == [
        *([8, 2], [5, 7, 2]),
        None,
    ]
