"""The tokenizer of a model folder: nothing outside the folder is read, no code of it is run, and
the chat template is tried once, so that one that fails or never ends is refused before a run."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import DecoderConfig, DecoderShape
from ..files import Fields, ModelError, cause_of, inside, panics_as, read_json
from .chat_format import SETTINGS, chat_format

if TYPE_CHECKING:
    from ..drafters.medusa import MedusaConfig

TOKENIZER = "tokenizer.json"
VOCABULARIES = (TOKENIZER, "tokenizer.model", "vocab.json")  # each makes a tokenizer
SUFFIXES = (".json", ".jinja", ".model", ".txt")  # of a tokenizer's files
TEMPLATES = "additional_chat_templates"
TRIAL = "Hello, World! é 12\n"
MAX_EXTRA = 256  # tokens that a drafter's tokenizer may have more, or fewer
TURNS = [
    {"role": "user", "content": "Question0"},
    {"role": "assistant", "content": "Answer0"},
    {"role": "user", "content": "Question1"},
]


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in VOCABULARIES)


def load_tokenizer(folder: Path, config: DecoderConfig) -> Any:
    """The tokenizer of a target's folder, tried; ModelError for none, or one that does not fit."""
    if not has_tokenizer(folder):
        raise ModelError(folder, f"holds no tokenizer ({', '.join(VOCABULARIES)})")
    for path in [*folder.iterdir(), *(folder / TEMPLATES).glob("*")]:
        if path.suffix in SUFFIXES or path.name == TEMPLATES:
            inside(path.parent, path.name)
    if (folder / SETTINGS).exists():
        settings = Fields(folder / SETTINGS, read_json(folder / SETTINGS))
        if settings.get("auto_map"):
            raise settings.wrong("`auto_map` is not supported; remote code is never executed")
        name = settings.get("tokenizer_class")
        if name is not None and not isinstance(name, str):
            raise settings.wrong(f"`tokenizer_class` must be a name, not {name!r}")
        others = settings.get("fast_tokenizer_files") or []
        if not isinstance(others, list):
            raise settings.wrong(f"`fast_tokenizer_files` must be a list, not {others!r}")
        for other in others:
            inside(folder, str(other))
    from transformers import AutoTokenizer

    try:
        with panics_as(RuntimeError):
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        max_id = max(*tokenizer.get_vocab().values(), tokenizer.eos_token_id or 0)
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise ModelError(folder, f"no usable tokenizer: {cause_of(error)}") from None
    if max_id >= config.vocab_size:
        reason = f"the tokenizer's highest id is {max_id}"
        raise ModelError(config.path, f"{reason}, the embedding has {config.vocab_size} rows")
    _check_normalizer(folder, tokenizer)
    if tokenizer.chat_template:
        chat = chat_format(tokenizer)
        with chat.rendering():
            texts = [(turns, chat.text(turns)) for turns in (TURNS[:1], TURNS)]
        for turns, text in texts:
            if not all(turn["content"] in text for turn in turns if turn["role"] == "user"):
                raise ModelError(chat.path, "the chat template drops the text of a user's turn")
    return tokenizer


def _check_normalizer(folder: Path, tokenizer: Any) -> None:
    """Raise ModelError if an ordinary text makes the library panic. An empty pattern is found
    before, because a panic writes a stack trace to standard error."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = getattr(backend, "normalizer", None)
    if normalizer is None:
        return
    path = folder / TOKENIZER
    steps = [json.loads(normalizer.__getstate__())]
    for step in steps:
        steps += step.get("normalizers") or ()
        if step.get("type") == "Replace" and "" in (step.get("pattern") or {}).values():
            reason = "no usable tokenizer: a normalizer of type `Replace` has an empty pattern"
            raise ModelError(path, reason)
    with (
        panics_as(lambda why: ModelError(path, f"no usable tokenizer: {why}")),
        suppress(Exception),  # of a text with letters that the vocabulary lacks
    ):
        backend.encode(TRIAL)


def stop_ids(config: DecoderConfig, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end an answer: those that the model's files name, and the tokenizer's own."""
    return tuple(sorted({*config.eos_ids, tokenizer.eos_token_id} - {None}))


def check_same_tokens(
    drafter: "DecoderShape | MedusaConfig", target: DecoderShape, extra: bool = False
) -> None:
    """Raise ModelError unless the vocabularies have one size and ids mean the same in both
    tokenizers, special tokens included, where both folders have one (a drafter may come without).
    extra: either tokenizer may have up to MAX_EXTRA tokens more, e.g. a mask token."""
    problems: list[str] = []
    same_size = drafter.vocab_size == target.vocab_size
    if not same_size:
        problems.append(f"`vocab_size` is {drafter.vocab_size}, the target has {target.vocab_size}")
    file = inside(drafter.path.parent, TOKENIZER)
    target_file = inside(target.path.parent, TOKENIZER)
    if file.is_file() and target_file.is_file() and file.read_bytes() != target_file.read_bytes():
        ids = _ids(file)
        target_ids = _ids(target_file)
        compared = ids.keys() | target_ids.keys()
        if extra and len(ids.keys() ^ target_ids.keys()) <= MAX_EXTRA:
            compared = ids.keys() & target_ids.keys()
        unlike = [token for token in compared if ids.get(token) != target_ids.get(token)]
        if unlike:  # the token with the lowest id is named
            first = min(unlike, key=lambda token: (ids.get(token, target_ids.get(token, 0)), token))
            here, there = (
                f"has id {table[first]}" if first in table else "does not exist"
                for table in (ids, target_ids)
            )
            more = f" ({len(unlike)} tokens differ)" if len(unlike) > 1 else ""
            problems.append(f"token {first!r} {here}, in the target's tokenizer it {there}{more}")
    if problems:
        raise ModelError(file if same_size else drafter.path, "; ".join(problems))


def _ids(path: Path) -> Mapping[str, int]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(path, f"no usable tokenizer: {cause_of(error)}") from None
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return ids
