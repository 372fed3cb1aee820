"""Tokenizers: those that are refused, and that a drafter's tokens are the target's."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import Spoil, write_tiny_target, write_tiny_tokenizer

from specsot.engine.errors import Code, code_of
from specsot.engine.models import load_models
from specsot.models.families import decoder_config
from specsot.models.files import ModelError
from specsot.models.load import chat_format
from specsot.models.load.chat_format import SETTINGS, TEMPLATE
from specsot.models.load.tokenizer import TEMPLATES, TOKENIZER, load_tokenizer
from specsot.models.load.weights import load_target, load_vanilla
from specsot.states.text.prompts import PastTurn, PromptBook, load_template
from specsot.states.text.tokens import Encoder, PromptError

QWEN3_THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_tiny_tokenizer(write_tiny_target(folder))
    return folder


@pytest.fixture
def drafter(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "drafter"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "target"))


Document = dict[str, Any]


def rewrite(folder: Path, name: str, change: Callable[[Document], object]) -> None:
    document = json.loads((folder / name).read_text())
    change(document)
    (folder / name).write_text(json.dumps(document))


def children_of(pid: int) -> set[str]:
    """Children that run, or that were not waited for."""
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def refusal(drafter: Path, target: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_vanilla(drafter, load_target(target))
    return str(caught.value)


def swapped(document: Document) -> None:
    words = document["model"]["vocab"]
    words["w20"], words["w30"] = words["w30"], words["w20"]


def renamed(document: Document) -> None:
    words = document["model"]["vocab"]
    words["new"] = words.pop("w77")


def special(document: Document) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document["added_tokens"].append({"id": 129, "content": "<tool>", "special": True} | flags)


@pytest.mark.parametrize(
    "change", [None, lambda document: document.update(truncation=None)], ids=["same", "bytes"]
)
def test_the_same_tokens_are_accepted(drafter: Path, made: Path, change: Any) -> None:
    if change:  # other bytes, the same ids
        rewrite(drafter, TOKENIZER, change)
    assert load_vanilla(drafter, load_target(made)).vocab_size == 130


@pytest.mark.parametrize("bare", ["drafter", "target"])
def test_without_both_tokenizers_the_size_is_enough(bare: str, drafter: Path, made: Path) -> None:
    target = Path(shutil.copytree(made, drafter.parent / "target"))
    rewrite(drafter, TOKENIZER, swapped)
    ({"drafter": drafter, "target": target}[bare] / TOKENIZER).unlink()
    load_vanilla(drafter, load_target(target))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swapped, "token 'w30' has id 20, in the target's tokenizer it has id 30"),
        (renamed, "token 'new' has id 77, in the target's tokenizer it does not exist"),
        (special, "token '<tool>' has id"),
    ],
)
def test_other_ids_are_refused_by_the_first_token(
    drafter: Path, made: Path, change: Callable[[Document], None], message: str
) -> None:
    rewrite(drafter, TOKENIZER, change)
    (drafter / "model.safetensors").unlink()  # before the weights are read
    error = refusal(drafter, made)
    assert error.startswith(f"{drafter / TOKENIZER}: {message}")
    assert change is special or error.endswith(" (2 tokens differ)")


def test_another_size_is_told_with_the_first_token(made: Path, tmp_path: Path) -> None:
    other = write_tiny_tokenizer(write_tiny_target(tmp_path, vocab=90), vocab=90)
    message = refusal(other, made)
    size = f"{other / 'config.json'}: `vocab_size` is 90, the target has 130"
    token = "token 'w90' does not exist, in the target's tokenizer it has id 90"
    assert message.startswith(f"{size}; ") and token in message
    (other / TOKENIZER).unlink()
    assert refusal(other, made) == size


def test_a_broken_tokenizer_is_refused(drafter: Path, made: Path) -> None:
    (drafter / TOKENIZER).write_text("{}")
    assert refusal(drafter, made).startswith(f"{drafter / TOKENIZER}: no usable tokenizer: ")


# -- tokenizers and chat templates that are refused, and named for what they are


def edit(**changes: Any) -> Spoil:
    return lambda folder: rewrite(folder, SETTINGS, lambda document: document.update(changes))


def template(text: Any) -> Spoil:
    return edit(chat_template=text)


def write(name: str, text: str) -> Spoil:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return change


def link(name: str) -> Spoil:
    def change(folder: Path) -> None:
        outside, path = folder.parent / Path(name).name, folder / name
        path.parent.mkdir(exist_ok=True)
        outside.write_text(path.read_text() if path.exists() else "{}")
        path.unlink(missing_ok=True)
        path.symlink_to(outside)

    return change


def add_id(folder: Path) -> None:
    rewrite(folder, TOKENIZER, lambda document: document["model"]["vocab"].update(new=130))


def normalize(pattern: dict[str, str]) -> Spoil:
    """A normalizer that puts a text at every match of a pattern, in a sequence of others."""
    replace = {"type": "Replace", "pattern": pattern, "content": "x"}
    steps = {"type": "Sequence", "normalizers": [{"type": "NFC"}, replace]}
    cuts = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    changes = {"normalizer": steps, "pre_tokenizer": cuts}
    return lambda folder: rewrite(folder, TOKENIZER, lambda document: document.update(changes))


BAD: dict[str, tuple[Spoil, str]] = {
    "none": (lambda f: (f / TOKENIZER).unlink(), r"target: holds no tokenizer \(tokenizer\.json"),
    "empty": (write(TOKENIZER, ""), "no usable tokenizer: JSONDecodeError"),
    "an empty object": (write(TOKENIZER, "{}"), "no usable tokenizer: KeyError"),
    "one id too many": (add_id, "highest id is 130, the embedding has 130 rows"),
    "settings cut off": (write(SETTINGS, "{"), r"tokenizer_config\.json: invalid JSON at line 1"),
    "settings a list": (write(SETTINGS, "[]"), "must hold an object, not a list"),
    "own code": (edit(auto_map={"AutoTokenizer": ["x.Y", None]}), "`auto_map` .* never executed"),
    "class a number": (edit(tokenizer_class=3), "`tokenizer_class` must be a name, not 3"),
    "eos a number": (edit(eos_token=5), "no usable tokenizer: TypeError"),
    "empty pattern": (normalize({"String": ""}), "tokenizer.json: .* `Replace` .* empty pattern"),
    "empty regex": (normalize({"Regex": ""}), "tokenizer.json: .* `Replace` .* empty pattern"),
    "pattern that panics": (normalize({"Regex": "q*"}), "no usable tokenizer: the library panics"),
    "added tokens": (edit(added_tokens_decoder={"x": 1}), "no usable tokenizer: "),
    "other file": (edit(fast_tokenizer_files=["../tokenizer.1.json"]), "not a plain file name"),
    "other files": (edit(fast_tokenizer_files=5), "`fast_tokenizer_files` must be a list"),
    "tokenizer outside": (link(TOKENIZER), "is a link that leaves its folder"),
    "settings outside": (link(SETTINGS), "is a link that leaves its folder"),
    "added tokens outside": (link("added_tokens.json"), "is a link that leaves its folder"),
    "template outside": (link(TEMPLATE), r"chat_template\.jinja: is a link that leaves"),
    "more templates outside": (link(f"{TEMPLATES}/tool.jinja"), r"tool\.jinja: is a link that"),
    "template raises": (template("{{ raise_exception('no') }}"), "TemplateError: no$"),
    "template unfinished": (template("{% if %}"), "fails on a plain .* TemplateSyntaxError"),
    "template of other keys": (template("{{ a.b.c }}"), "UndefinedError: 'a' is undefined"),
    "template a number": (template(5), r"tokenizer_config\.json: the chat template fails"),
    "first turn alone": (template("{{ messages[0].content }}"), "drops the text of a user's turn"),
    "own file": (write(TEMPLATE, "{{ 1 / 0 }}"), r"chat_template\.jinja: .*ZeroDivisionError"),
    "no default template": (
        template([{"name": "tool", "template": "{{ messages[0].content }}"}]),
        "multiple chat templates with no default",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_tokenizer_is_refused_in_one_line(name: str, folder: Path) -> None:
    spoil, message = BAD[name]
    spoil(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load_models(folder, None)
    assert str(caught.value).startswith(str(folder)) and "\n" not in str(caught.value)
    assert code_of(caught.value) is Code.MODEL


def test_a_text_that_makes_the_tokenizer_panic_is_no_prompt(folder: Path) -> None:
    normalize({"Regex": "(?=q)"})(folder)
    encoder = Encoder(load_tokenizer(folder, decoder_config(folder)))
    with pytest.raises(PromptError, match="the library panics: "):
        encoder.text("qé \n")


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='aa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ENDLESS, r"TimeoutError: not done after 0\.5 s"),
        ("{{ 10**(10**9) }}", r"TimeoutError: not done after 0\.5 s"),
        ("{{ 'a' * 10**10 }}", "MemoryError"),
        ("{% set a = messages[0].content %}{{ a * 10**10 }}", "MemoryError"),
        ("{{ '%9999999999d' % 1 }}", "MemoryError"),
        ("{{ '{:>9999999999}'.format(1) }}", "MemoryError"),
        ("{{ 'a'.center(10**10) }}", "MemoryError"),
        (DOUBLED + "{% endfor %}{{ n.x }}", "MemoryError"),
        ("{{ 'a' * 10**7 }}", "MemoryError: it writes 10000000 characters, at most"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError|its process has ended"),
    ],
)
def test_a_template_has_limits_of_time_and_memory(
    folder: Path, text: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "Timeout" in reason:
        monkeypatch.setattr(chat_format, "TEMPLATE_SECONDS", 0.5)
    write(TEMPLATE, text)(folder)
    before = children_of(os.getpid())
    with pytest.raises(ModelError, match=rf"chat_template\.jinja: .* conversation: ({reason})"):
        load_tokenizer(folder, decoder_config(folder))
    assert children_of(os.getpid()) == before, "no process is left"


def test_a_template_that_fails_on_long_conversations_alone(folder: Path) -> None:
    bomb = "{% if messages|length > 5 %}{{ 'a' * 10**10 }}{% endif %}"
    template(QWEN3_THINKING + bomb)(folder)
    tokenizer = load_tokenizer(folder, decoder_config(folder))
    book = PromptBook(tokenizer, load_template("embedded"))
    with pytest.raises(ModelError, match="conversation: MemoryError"):
        book.behind([PastTurn("Why?", "So.")] * 3)
    assert book.behind([PastTurn("Why?", "So.")]).plain("And?").ids


@pytest.mark.parametrize("text", [QWEN3_THINKING, None, ""])
def test_templates_that_are_taken(folder: Path, text: str | None) -> None:
    template(text)(folder)
    assert load_tokenizer(folder, decoder_config(folder)).chat_template == text


def test_a_list_of_templates_with_a_default(folder: Path) -> None:
    own = [{"name": "default", "template": QWEN3_THINKING}, {"name": "tool", "template": "x"}]
    template(own)(folder)
    assert load_tokenizer(folder, decoder_config(folder)).chat_template["tool"] == "x"
