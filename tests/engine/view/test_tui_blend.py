"""The live view of cached documents: a cell per layer, and which rows were recomputed."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.screens import screenshot

from specsot.engine.record.run_view import BRANCH, PICKED, REUSED, slot_codes
from specsot.engine.view.panels import STATUS_STYLES, cell_of, layers_line
from specsot.ops.kv.pool import KVCache
from specsot.ops.layer_plan import LayerStatus
from specsot.states.blend import Reused
from specsot.states.request import Branch, Request
from specsot.states.round import BlendSummary

from .test_tui import picture, scene

BLENDED = BlendSummary((0, 1, 2, 2), (370, 370, 97, 97), (47,), 320, 0, 50, ((320, 50),))


def test_every_layer_has_a_cell_with_its_rows() -> None:
    line = layers_line(BLENDED, 100)
    assert line.plain == "layers F370 C370 A97 A97  cached 320 · picked 47 · fresh 50"
    styles = [str(span.style) for span in line.spans]
    wanted = [STATUS_STYLES[LayerStatus(status)] for status in BLENDED.plan]
    assert [style for style in styles if style in wanted] == wanted


def test_a_deep_model_shows_letters_alone() -> None:
    deep = replace(BLENDED, plan=(0, 1, *[2] * 38), live=(370, 370, *[97] * 38))
    line = layers_line(deep, 60)
    assert line.plain == "layers FC" + "A" * 38 and line.cell_len <= 60
    assert layers_line(deep, 20).cell_len == 20


@pytest.mark.parametrize(("width", "height"), [(110, 34), (80, 24)])
def test_layers_are_shown_where_rows_were_cached(width: int, height: int) -> None:
    snap = picture()
    before = screenshot(scene(), snap, width, height).export_text()
    after = screenshot(scene(), replace(snap, blend=BLENDED), width, height).export_text()
    assert "layers" not in before and "F370 C370 A97" in after
    assert len(after.splitlines()) == len(before.splitlines())


def test_cached_rows_are_told_from_recomputed_ones() -> None:
    pool = KVCache(1, 1, 2, 16)
    pool.commit_(pool.append_([4] * 6, list(range(6))), list(range(6)))
    request = Request("1", 0, "", [], [], frozenset(), 1, 0, prefix_owner=3)
    request.branches = [Branch(request, 0, 4, 1)]
    codes = slot_codes(pool, [request], {4: Reused({1, 2, 3, 4}, {2})})
    wanted = [BRANCH, REUSED, PICKED, REUSED, REUSED, BRANCH]
    assert codes[:6].tolist() == wanted and not codes[6:].any()
    assert slot_codes(pool, [request], {9: Reused({1}, {1})})[:6].tolist() == [BRANCH] * 6
    assert np.unique([cell_of(code)[0] for code in (BRANCH, REUSED, PICKED)]).size == 3
