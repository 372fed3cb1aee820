"""A small language model that drafts must speak of the target's tokens."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models.tiny import write_tiny_target, write_tiny_tokenizer

import specsot
from specsot.models.files import ModelError
from specsot.models.load.tokenizer import TOKENIZER
from specsot.models.load.weights import load_target, load_vanilla

EMBEDDED = Path(specsot.__file__).parent / "models" / "embedded"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_tiny_tokenizer(write_tiny_target(folder))
    return folder


@pytest.fixture
def drafter(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "drafter"))


def rewrite(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((folder / name).read_text())
    change(document)
    (folder / name).write_text(json.dumps(document))


def refusal(drafter: Path, target: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_vanilla(drafter, load_target(target))
    return str(caught.value)


def swap(one: str, two: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        words = document["model"]["vocab"]
        words[one], words[two] = words[two], words[one]

    return change


def test_the_same_tokens_are_accepted(drafter: Path, made: Path) -> None:
    assert load_vanilla(drafter, load_target(made)).vocab_size == 130
    rewrite(drafter, TOKENIZER, lambda document: document.update(truncation=None))
    load_vanilla(drafter, load_target(made))  # other bytes, the same ids


def test_a_drafter_without_a_tokenizer_needs_the_size_alone(drafter: Path, made: Path) -> None:
    (drafter / TOKENIZER).unlink()
    load_vanilla(drafter, load_target(made))


def test_a_target_without_a_tokenizer_has_nothing_to_compare(drafter: Path, made: Path) -> None:
    bare = Path(shutil.copytree(made, drafter.parent / "bare"))
    (bare / TOKENIZER).unlink()
    rewrite(drafter, TOKENIZER, swap("w20", "w30"))
    load_vanilla(drafter, load_target(bare))


def test_the_embedded_drafter_is_accepted() -> None:
    assert not (EMBEDDED / "vanilla" / TOKENIZER).exists()
    load_vanilla(EMBEDDED / "vanilla", load_target(EMBEDDED / "target"))


def test_other_ids_are_refused_by_the_first_token(drafter: Path, made: Path) -> None:
    rewrite(drafter, TOKENIZER, swap("w20", "w30"))
    assert refusal(drafter, made) == (
        f"{drafter / TOKENIZER}: token 'w30' has id 20, in the target's tokenizer it has id 30"
        " (2 tokens differ)"
    )


def test_a_token_that_one_side_lacks_is_refused(drafter: Path, made: Path) -> None:
    def rename(document: dict[str, Any]) -> None:
        words = document["model"]["vocab"]
        words["new"] = words.pop("w77")

    rewrite(drafter, TOKENIZER, rename)
    assert refusal(drafter, made).endswith(
        "token 'new' has id 77, in the target's tokenizer it does not exist (2 tokens differ)"
    )


def test_special_tokens_are_compared_too(drafter: Path, made: Path) -> None:
    def rename(document: dict[str, Any]) -> None:
        document["added_tokens"].append(
            {"id": 129, "content": "<tool>", "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        )

    rewrite(drafter, TOKENIZER, rename)
    assert "token '<tool>' has id" in refusal(drafter, made)


def test_another_size_is_told_with_the_first_token(made: Path, tmp_path: Path) -> None:
    other = write_tiny_tokenizer(write_tiny_target(tmp_path, vocab=90), vocab=90)
    message = refusal(other, made)
    assert message.startswith(f"{other / 'config.json'}: `vocab_size` is 90, the target has 130; ")
    assert re.search(r"token 'w90' does not exist, in the target's tokenizer it has id 90", message)


def test_a_size_alone_is_told_where_there_is_no_tokenizer(made: Path, tmp_path: Path) -> None:
    message = refusal(write_tiny_target(tmp_path, vocab=90), made)
    assert message.endswith("`vocab_size` is 90, the target has 130")


def test_a_broken_tokenizer_is_refused(drafter: Path, made: Path) -> None:
    (drafter / TOKENIZER).write_text("{}")
    assert refusal(drafter, made).startswith(f"{drafter / TOKENIZER}: no usable tokenizer: ")


def test_it_is_refused_before_the_weights_are_read(drafter: Path, made: Path) -> None:
    rewrite(drafter, TOKENIZER, swap("w20", "w30"))
    (drafter / "model.safetensors").unlink()
    assert "token 'w30'" in refusal(drafter, made)
