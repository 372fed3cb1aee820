"""The parts of a server, each alone: growing texts, stop texts, messages, keys, reading order."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsot.engine.events import (
    HALF,
    BranchFinished,
    OutlineRead,
    ReadingOrder,
    TextStream,
    TextWritten,
)
from specsot.engine.prepare.inputs import Prompt, RequestSettings
from specsot.engine.prepare.options import ClusterBlock, GroupSize, ServeOptions
from specsot.engine.shell import printable
from specsot.engine.workers.process import StopTexts
from specsot.engine.workers.protocol import KINDS, ProtocolError, Text, decode, encode
from specsot.states.request import MigratedRequest

FEW = st.text("abc", max_size=30)


@given(
    FEW, st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.lists(st.integers(1, 4))
)
def test_stop_texts_do_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    whole = StopTexts(stops)
    expected = whole.feed(text) + whole.pending if not any(s in text for s in stops) else None
    pieces, rest = [], text
    for cut in [*cuts, len(text)]:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    parts = StopTexts(stops)
    shown = "".join(parts.feed(piece) for piece in pieces)
    shown += parts.pending if parts.match is None else ""
    if expected is not None:
        assert shown == expected == text and parts.match is None
        return
    single = StopTexts(stops)
    assert shown == "".join(single.feed(c) for c in text) and parts.match == single.match
    ends = (end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stops))
    first = text[: next(ends)]
    assert parts.match is not None and first == shown + parts.match


def example(kind: Any) -> Any:
    plain = {str: "x", Text: "\ud83d ü\n", int: 7, float: 0.5, bool: True, Any: ["x", [1]]}
    plain |= {Prompt: Prompt("1", "Hi"), MigratedRequest: MigratedRequest((1, 2), outline=(3,))}
    plain |= {ClusterBlock: ClusterBlock(workers=3, skeleton=GroupSize(tp=2))}
    plain |= {RequestSettings: RequestSettings(token_ids=(1,), resumed={-1: [2, 3]})}
    if kind in plain:
        return plain[kind]
    origin, inside = get_origin(kind), get_args(kind)
    if origin is tuple:
        return tuple(example(one) for one in inside if one is not ...)
    if origin in (list, Sequence):
        return [example(inside[0])]
    if origin in (dict, Mapping):
        return {"x": example(inside[1])}
    return example(inside[0])  # of a union


def test_every_message_comes_through_as_it_was() -> None:
    for kind in KINDS.values():
        hints = get_type_hints(kind, include_extras=True)
        message = kind(**{name: example(hint) for name, hint in hints.items()})
        line = encode(message)
        assert line.count(b"\n") == 1 and decode(line) == message


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"{}", b"[]", b'{"kind":"Nobody"}', b'{"kind":"Decode"}'),
        b'{"kind":"Regroup","number":1}',
        b'{"kind":"CountWork","number":"x"}',
    ],
)
def test_anything_else_is_no_message(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(line)


def test_keys_are_compared_as_hashes() -> None:
    rules = ServeOptions(keys=("one", "two"))
    assert rules.allows("one") and rules.allows("two")
    assert not any(rules.allows(key) for key in ("", "on", "one ", "three", "\udcff"))
    assert not ServeOptions().allows("one")


TITLES = st.lists(st.text("AB", min_size=1, max_size=3), min_size=1, max_size=3)


@given(TITLES, st.data())
def test_what_is_read_in_order_is_the_answer(titles: list[str], data: st.DataObject) -> None:
    texts = [data.draw(st.text("a \n", max_size=8)) for _ in titles]
    left = dict(enumerate(texts))
    order, shown = ReadingOrder(), ""
    many = len(titles) > 1 or data.draw(st.booleans())
    if many:
        shown += order.read(OutlineRead(tuple(titles)))
    else:
        left = {0: texts[0]}
    while left:
        index = data.draw(st.sampled_from(sorted(left)))
        count = data.draw(st.integers(0, len(left[index])))
        if count:
            shown += order.read(TextWritten(index, left[index][:count], 1))
            left[index] = left[index][count:]
        if not left[index]:
            shown += order.read(BranchFinished(index, "stop", ""))
            del left[index]
    whole = [
        f"{n}. {title}\n\n{text.strip()}"
        for n, (title, text) in enumerate(zip(titles, texts, strict=True), 1)
    ]
    assert shown == ("\n\n".join(whole) if many else texts[0].strip())


def byte_text(ids: list[int]) -> str:
    """A byte-level tokenizer: every token is one byte."""
    return bytes(ids).decode("utf-8", "replace")


@given(st.text(st.characters(exclude_characters=HALF, exclude_categories=("Cs",)), max_size=30))
def test_any_text_in_any_pieces(text: str) -> None:
    ids = list(text.encode())
    stream = TextStream(byte_text)
    for token in ids:
        stream.feed(token)
        assert text.startswith(stream.text)
    stream.feed(final=True)
    assert stream.text == text


def test_half_a_character_waits_for_the_rest() -> None:
    family = list("👨‍👩‍👧".encode())
    stream = TextStream(byte_text)
    assert stream.feed(*family[:2]) == ""
    assert stream.feed(*family[2:4]) == "👨"
    # bytes that never become one are shown in the end
    stream = TextStream(byte_text)
    assert stream.feed(65, 0xFF) == ""
    assert stream.feed(final=True) == f"A{HALF}"
    wrong = [0xFF] * 12
    assert TextStream(byte_text).feed(*wrong) == HALF * 12


def test_printable_disarms_terminal_text() -> None:
    assert printable("\x1b[31mred\x07 \u202eevil\n[bold]ok") == "␛[31mred␇ \ufffdevil\n[bold]ok"
    assert printable("a\nb", keep="") == "a␊b"
    assert printable("👨‍👩‍👧 naïve") == "👨‍👩‍👧 naïve"
