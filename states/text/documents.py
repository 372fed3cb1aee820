"""Documents that questions are answered from, and their token ids as they stand in prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .chat_format import ChatTokenizer
from .prompts import PromptError, check_question

MAX_TITLE = 200
CHUNK_TOKENS = 512  # most tokens of a chunk; what cuts otherwise finds other chunks in a cache


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a title; two with the same title and text are the same document."""

    title: str
    text: str


def check_document(document: Document) -> None:
    """Refuse what cannot stand in a prompt; needs no tokenizer.

    Raises:
        PromptError: as of `check_question`, or a title that is blank, longer than MAX_TITLE or not
            printable.
    """
    check_question(document.text, "document")
    title = document.title
    if not title.strip() or len(title) > MAX_TITLE or not title.isprintable():
        limit = f"1 to {MAX_TITLE} printable characters"
        raise PromptError(f"the title of the document must be {limit}, it is {title[:80]!r}")


def split_ids(token_ids: Sequence[int], most: int) -> tuple[tuple[int, ...], ...]:
    """Token ids cut into the fewest chunks of at most ``most``, their lengths at most one apart.

    Ids and not text: what is cut, put together or cached is always what stands in the prompt. The
    cuts depend on these ids alone, so a document has the same chunks in every prompt. Even lengths,
    because a chunk of a few tokens would be all seam.
    """
    if most < 1:
        raise ValueError(f"chunks of at most {most} tokens")
    count = -(-len(token_ids) // most)
    cuts = [len(token_ids) * i // count for i in range(count + 1)] if count else []
    return tuple(tuple(token_ids[begin:end]) for begin, end in pairwise(cuts))


def leading_id(tokenizer: ChatTokenizer) -> int | None:
    """The beginning-of-text token that this tokenizer puts before every text; None if it does not.

    A chunk is prefilled behind it, so that it has the attention sink that the model expects.
    """
    first = tokenizer.encode("a")[:1]
    bos = tokenizer.bos_token
    return first[0] if bos and first == tokenizer.encode(str(bos))[:1] else None
