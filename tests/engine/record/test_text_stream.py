"""Growing text: the same as decoding everything at once, never half a character."""

from hypothesis import given
from hypothesis import strategies as st

from specsot.engine.events import HALF, TextStream, printable


def decode(ids: list[int]) -> str:
    """A byte-level tokenizer: every token is one byte."""
    return bytes(ids).decode("utf-8", "replace")


@given(st.text(st.characters(exclude_characters=HALF, exclude_categories=("Cs",)), max_size=30))
def test_any_text_in_any_pieces(text: str) -> None:
    ids = list(text.encode())
    stream = TextStream(decode)
    for end in range(len(ids) + 1):
        shown = stream.update(ids[:end])
        assert text.startswith(shown)
    assert stream.update(ids, final=True) == text


def test_half_a_character_waits_for_the_rest() -> None:
    family = list("👨‍👩‍👧".encode())
    stream = TextStream(decode)
    assert stream.update(family[:2]) == ""
    assert stream.update(family[:4]) == "👨"


def test_bytes_that_never_become_a_character_are_shown_in_the_end() -> None:
    stream = TextStream(decode)
    assert stream.update([65, 0xFF]) == ""
    assert stream.update([65, 0xFF], final=True) == f"A{HALF}"
    wrong = [0xFF] * 12
    assert TextStream(decode).update(wrong) == HALF * 12


def test_printable_disarms_terminal_text() -> None:
    assert printable("\x1b[31mred\x07 \u202eevil\n[bold]ok") == "␛[31mred␇ \ufffdevil\n[bold]ok"
    assert printable("a\nb", keep="") == "a␊b"
    assert printable("👨‍👩‍👧 naïve") == "👨‍👩‍👧 naïve"
