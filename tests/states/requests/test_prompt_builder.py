"""Documents in prompts: where they stand, and that their ids never become text again."""

from random import Random

import pytest
from transformers import AutoTokenizer

from specsot.engine.prepare.job import embedded_folder
from specsot.states.prompt_builder import PromptBuilder, search_all
from specsot.states.text.documents import Document, DocumentSearch
from specsot.states.text.outline import Outline, Point
from specsot.states.text.prompts import PromptBook, load_template
from specsot.states.text.tokens import Chunk, PromptTokens
from tools.embedded.documents import opening
from tools.embedded.pieces import ANSWER, branch_turn, given

BEES = Document("Bees", "Mira keeps bees.\nShe lives in Oslo.")
RAIN = Document("Rain", "Rain falls on Bergen.")
TEA = Document("Tea", "Tea grows in Assam.")
POINTS = (
    Point(1, 20, "Search", (), "Rain over Bergen"),
    Point(2, 20, "Search", (), "Tea and rain"),
    Point(3, 20, "Search", (), "Mira and the rain"),
)
OUTLINE = Outline("plan", POINTS, (), "ok")


def book_of(template: str = "embedded", share: str = "outline") -> PromptBook:
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder("target"))
    return PromptBook(tokenizer, load_template(template), share)  # type: ignore[arg-type]


def ids_of(pieces: object) -> list[int]:
    """The ids that training makes of a sample's pieces: each on its own."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder("target"))
    return [
        i
        for piece in pieces  # type: ignore[attr-defined]
        for i in tokenizer.encode(piece.text, add_special_tokens=False)
    ]


class InPieces(Random):
    """Draws the way in which `opening` cuts documents into pieces."""

    def random(self) -> float:
        return 0.9


def test_the_embedded_model_reads_documents_as_it_learned_to() -> None:
    book, texts = book_of(), [BEES.text, RAIN.text]
    front = PromptBuilder(book).in_front((BEES, RAIN))
    asked = book.plain("Who?", front)
    learned = opening(InPieces(), texts) + given("Who?", ANSWER)
    assert list(asked.ids) == ids_of(learned)
    own = PromptBuilder(book).behind((BEES, RAIN))
    hoist, rest = book.branch(POINTS[0], OUTLINE, (), PromptTokens(), own)
    head = branch_turn(1, POINTS[0].title)[:-1]
    for text in texts:
        head += given("\nDocument: ", text)
    assert [*hoist.ids, *rest.ids][-len(ids_of(head)) - len(ids_of(given(ANSWER))) :] == ids_of(
        head + given(ANSWER)
    )


@pytest.mark.parametrize("template", ["embedded", "instruct"])
@pytest.mark.parametrize("share", ["outline", "prompt"])
def test_chunks_stand_where_they_are_said_to(share: str, template: str) -> None:
    book = book_of(template, share)
    builder = PromptBuilder(book, most=4)
    written = [
        book.plain("Who?", builder.in_front((BEES, RAIN))),
        book.skeleton("Who?", builder.in_front((BEES,)))[0],
        book.direct(documents=builder.behind((TEA,))),
    ]
    shared = (builder.in_front if share == "outline" else builder.behind)((TEA,))
    own = builder.behind((RAIN,))
    written += book.branch(POINTS[1], OUTLINE, [(1, [20, 21])], shared, own)
    found = [[book.decode(c.ids) for c in one.chunks] for one in written]
    wanted = [(BEES, RAIN), (BEES,), (TEA,), (TEA,), (RAIN,)]
    for one, texts, documents in zip(written, found, wanted, strict=True):
        assert "".join(texts) == "".join(
            book.decode(book.document(d.title, d.text)) for d in documents
        )
        for chunk in one.chunks:
            assert one.ids[chunk.at : chunk.at + len(chunk.ids)] == chunk.ids
            assert 0 < len(chunk.ids) <= 4


def test_shared_documents_come_before_what_the_turn_says() -> None:
    book = book_of()
    shared = PromptBuilder(book).in_front((TEA,))
    hoist, rest = book.branch(POINTS[0], OUTLINE, (), shared)
    assert rest.ids == book.branch(POINTS[0], OUTLINE, ())[1].ids
    assert book.decode(hoist.ids).endswith("user\nDocument: Tea grows in Assam.\nWrite part ")


def test_written_ids_are_joined_with_their_chunks() -> None:
    one = PromptTokens((1, 2)) + PromptTokens((3, 4), (Chunk(0, (3, 4), "a"),)) + [5]
    two = one + one
    assert two.ids == (1, 2, 3, 4, 5, 1, 2, 3, 4, 5)
    assert two.chunks == (Chunk(2, (3, 4), "a"), Chunk(7, (3, 4), "a"))


def test_parts_get_what_they_search_for() -> None:
    documents = (BEES, RAIN, TEA)
    shared, own = search_all(POINTS, documents, 2)
    assert shared == (RAIN,) and own == [(), (TEA,), (BEES,)]
    assert search_all(POINTS[:1], documents, 2) == ((), [(RAIN,)])
    quiet = (*POINTS, Point(4, 20, None, (), "Rain"))
    assert search_all(quiet, documents, 2) == ((), [(RAIN,), (RAIN, TEA), (BEES, RAIN), ()])
    assert [len(one) for one in search_all(quiet, documents, 1)[1]] == [1, 1, 1, 0]
    assert [*DocumentSearch(documents).find("Where does Mira live?", 2)] == [documents.index(BEES)]
