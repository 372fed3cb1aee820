"""Whether a small language model speaks of the same tokens as the target it drafts for."""

from collections.abc import Mapping
from pathlib import Path

from ..config import DecoderConfig
from ..files import ModelError, inside

TOKENIZER = "tokenizer.json"


def check_same_tokens(drafter: DecoderConfig, target: DecoderConfig) -> None:
    """Raise ModelError unless ids mean the same to both: every difference there is, in one line.

    The sizes of the vocabularies must agree; and the tokenizers, special tokens included, where
    both folders hold one (a drafter may come without).
    """
    sizes = drafter.vocab_size != target.vocab_size
    found = []
    if sizes:
        found.append(f"`vocab_size` is {drafter.vocab_size}, the target has {target.vocab_size}")
    ours, theirs = (one.path.parent / TOKENIZER for one in (drafter, target))
    if ours.is_file() and theirs.is_file() and (difference := _first_difference(ours, theirs)):
        found.append(difference)
    if found:
        raise ModelError(drafter.path if sizes else ours, "; ".join(found))


def _first_difference(drafter: Path, target: Path) -> str | None:
    """The token with the lowest id that has another id, or none, in the other tokenizer."""
    if drafter.read_bytes() == target.read_bytes():
        return None
    ours, theirs = _ids(drafter), _ids(target)
    unlike = [token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token)]
    if not unlike:
        return None
    first = min(unlike, key=lambda token: (ours.get(token, theirs.get(token, 0)), token))
    here, there = _shown(ours, first), _shown(theirs, first)
    more = f" ({len(unlike)} tokens differ)" if len(unlike) > 1 else ""
    return f"token {first!r} {here}, in the target's tokenizer it {there}{more}"


def _ids(path: Path) -> Mapping[str, int]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(inside(path.parent, path.name)))
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(path, f"no usable tokenizer: {error}") from None
    found: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return found


def _shown(ids: Mapping[str, int], token: str) -> str:
    return f"has id {ids[token]}" if token in ids else "does not exist"
