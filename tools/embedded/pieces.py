"""Samples as pieces of text: a trunk and branches that each continue the trunk alone.

Every piece is tokenized on its own, so pieces are cut exactly where the engine joins template
text with filled-in text."""

from __future__ import annotations

from dataclasses import dataclass

USER = "<|im_start|>user\n"
END = "<|im_end|>"
ANSWER = f"{END}\n<|im_start|>assistant\n"
OUTLINE = f"\nWrite an outline.{ANSWER}"
NEXT_USER = "\n<|im_start|>user\n"
DIRECT = "DIRECT"
ANSWER_DIRECTLY = f"Answer directly.{ANSWER}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A text tokenized on its own; ``weight`` is its share in the training loss."""

    text: str
    weight: float


Pieces = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A shared beginning and the continuations that do not see each other."""

    kind: str
    trunk: Pieces
    branches: tuple[Pieces, ...] = ()


def given(*texts: str, weight: float = 0.1) -> Pieces:
    """Pieces that the model reads."""
    return tuple(Piece(text, weight) for text in texts if text)


def gold(text: str) -> Pieces:
    """A text that the model has to write, with the end of its turn."""
    return (Piece(text, 1.0), Piece(END, 1.0))


def turn(question: str) -> Pieces:
    """A user turn and the start of the answer."""
    return given(USER, question, ANSWER)


def outline_turn(question: str) -> Pieces:
    """A user turn that asks for an outline."""
    return given(USER, question, OUTLINE)


def branch_turn(number: int, title: str, parts: tuple[tuple[int, str], ...] = ()) -> Pieces:
    """The turn after an outline that asks for one part; ``parts`` are the quoted parts."""
    return given(f"{NEXT_USER}Write part ", str(number), ": ", title) + _quotes(parts)


def combination(lines: tuple[Line, ...], texts: list[str]) -> Pieces:
    """Finished parts one after another and the turn that asks for one answer from them."""
    pieces: Pieces = ()
    for number, (line, text) in enumerate(zip(lines, texts, strict=True), 1):
        pieces += branch_turn(number, line.title) + given(text, END, weight=0.05)
    return pieces + given(f"{NEXT_USER}Combine the parts.{ANSWER}")


def plan_prompt(question: str, titles: tuple[str, ...]) -> Pieces:
    """The start of a single user turn that holds the question and the plan."""
    lines = "\n".join(f"{i}. {title}" for i, title in enumerate(titles, 1))
    return given(USER, question, "\nThe plan:\n", lines)


def plan_part(number: int, title: str, parts: tuple[tuple[int, str], ...] = ()) -> Pieces:
    """The end of that turn, which names the part to write."""
    return given("\nWrite part ", str(number), ": ", title) + _quotes(parts)


def _quotes(parts: tuple[tuple[int, str], ...]) -> Pieces:
    quoted: Pieces = ()
    for number, text in parts:
        quoted += given("\nPart ", str(number), " says: ", text, weight=0.0)
    return quoted + given(ANSWER)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an outline; ``length`` counts tokens."""

    title: str
    length: int
    tool: str = "-"
    needs: tuple[int, ...] = ()


def outline_text(lines: tuple[Line, ...]) -> str:
    """The outline as the model writes it."""
    rows = [
        f"{i}|{line.length}|{line.tool}|{','.join(map(str, line.needs)) or '-'}|{line.title}"
        for i, line in enumerate(lines, 1)
    ]
    return "\n".join(["PLAN", *rows, "END"])


def rounded_length(tokens: int) -> int:
    """Tokens of a part and its end mark, rounded up to a multiple of ten."""
    return min(990, max(10, -(-(tokens + 1) // 10) * 10))
