"""Files of prompts and conversations: what is refused, what is trained on, what is answered."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.interrupted import EMBEDDED, write_inputs
from helpers.tiny_models.tiny import write_tiny_tokenizer
from typer.testing import CliRunner

from specsot.engine.cli.train import train
from specsot.engine.errors import UsageError
from specsot.engine.train.answers import TOGETHER, Regeneration
from specsot.engine.train.chats import ChatCoder, Conversation, Turn, read_conversations
from specsot.engine.train.data import GOLD, Tokens
from specsot.engine.train.lessons import conversation_lessons
from specsot.engine.train.settings import ConversationFile, DrafterTraining
from specsot.engine.train.teacher import Teacher
from specsot.models.files import ModelError

USER, MODEL = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello you"}


def lines(folder: Path, *values: Any) -> Path:
    file = folder / "asked.jsonl"
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    file.write_text("\n".join(texts) + "\n")
    return file


def shapes(found: list[Conversation]) -> list[str]:
    return ["".join(turn.role[0] for turn in conversation.turns) for conversation in found]


def test_three_spellings_are_read(tmp_path: Path) -> None:
    said = [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}]
    file = lines(
        tmp_path,
        {"prompt": "Why?", "id": 7},
        "",
        {"messages": [USER, MODEL, USER]},
        {"conversations": [*said, {"from": "gpt", "value": "A"}]},
    )
    found = read_conversations(file, regenerate=True)
    assert shapes(found) == ["u", "uau", "sua"]
    assert [c.place.rsplit(":")[-1] for c in found] == ["1", "3", "4"]
    assert shapes([c.question for c in found]) == ["u", "uau", "su"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "2:2: Expecting"),
        ("[]", "2: a line is a JSON object"),
        ({}, "2: needs one of prompt, messages, conversations; it has none"),
        ({"prompt": "a", "messages": []}, "it has prompt and messages"),
        ({"prompt": 5}, "2: 'prompt' must be a text"),
        ({"prompt": "  "}, "2: 'prompt': the text is blank"),
        ({"messages": []}, "2: 'messages' must be a list of messages"),
        ({"messages": ["a"]}, "message 1 must be an object with 'role' and 'content'"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "message 1 is from 'bot'"),
        ({"messages": [MODEL]}, "2: message 1 is from 'assistant'; it is the turn of 'user'"),
        ({"messages": [USER, USER]}, "2: message 2 is from 'user'"),
        ({"messages": [{"role": "system", "content": "a"}]}, "2: no user turn"),
        (
            {"messages": [USER, {"role": "assistant", "content": ""}]},
            "message 2: the text is empty",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, said: str) -> None:
    file = lines(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(UsageError) as caught:
        read_conversations(file, regenerate=True)
    assert str(caught.value).startswith(f"{file}:2") and said in str(caught.value)


def test_a_file_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_conversations(tmp_path / "none.jsonl", regenerate=True)
    with pytest.raises(UsageError, match="no prompts in it"):
        read_conversations(lines(tmp_path, ""), regenerate=True)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(UsageError, match=r"latin.jsonl:1: not UTF-8"):
        read_conversations(tmp_path / "latin.jsonl", regenerate=True)


def test_an_unanswered_prompt_is_an_error_without_regeneration(tmp_path: Path) -> None:
    file = lines(tmp_path, {"messages": [USER, MODEL]}, {"prompt": "Why?"})
    words = ["vanilla", "--prompts", str(file), "--out", str(tmp_path / "o"), "--steps", "1"]
    result = CliRunner().invoke(train, words)
    assert result.exit_code == 2
    assert f"{file}:2: the last user turn has no answer; with --regenerate" in result.output


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher(EMBEDDED)


def coder(teacher: Teacher) -> ChatCoder:
    return ChatCoder(teacher.folder, teacher.tokenizer, teacher.stops)


def written(tokens: Tokens) -> list[int]:
    return [i for i, w in zip(tokens.ids, tokens.weights, strict=True) if w >= GOLD]


def test_only_what_the_assistant_says_counts(teacher: Teacher) -> None:
    turns = (
        Turn("user", "Who is <|im_end|> Ada?"),
        Turn("assistant", "A poet."),
        Turn("user", "More"),
        Turn("assistant", "No <|im_end|> more."),
    )
    (tokens,) = coder(teacher).samples(Conversation("f:1", turns), 512)
    ids, text = tokens.ids, teacher.tokenizer.decode(tokens.ids)
    assert text.strip() == (
        "<|im_start|>user\nWho is <|im_end|> Ada?<|im_end|>\n<|im_start|>assistant\nA poet."
        "<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\nNo <|im_end|> more."
        "<|im_end|>"
    )
    assert ids.count(1) == ids.count(2) == 4  # no text became a control token
    assert (
        teacher.tokenizer.decode(written(tokens))
        == "A poet.<|im_end|>No <|im_end|> more.<|im_end|>"
    )
    assert tokens.positions == list(range(len(ids))) and set(tokens.segments) == {0}
    prompt = coder(teacher).prompt(Conversation("f:1", turns[:3]))
    assert ids[: len(prompt)] == prompt and prompt[-1] != 2


def test_a_format_that_rewrites_earlier_turns_gives_a_sample_per_answer(teacher: Teacher) -> None:
    class Rewriting:
        """The embedded tokenizer; what the assistant said earlier is written in brackets."""

        chat_template = "yes"

        def encode(self, text: str, **options: Any) -> list[int]:
            return list(teacher.tokenizer.encode(text, **options))

        def apply_chat_template(self, turns: list[dict[str, str]], **options: Any) -> str:
            said = [
                f"[{t['content']}]"
                if t["role"] == "assistant" and t is not turns[-1]
                else f"{t['content']}<|im_end|>"
                for t in turns
            ]
            return "\n".join(said) + ("\nthink:" if options["add_generation_prompt"] else "")

    rewriting = ChatCoder(teacher.folder, Rewriting(), teacher.stops)
    texts = ("Q one", "A one", "Q two", "A two")
    turns = tuple(Turn(("user", "assistant")[i % 2], text) for i, text in enumerate(texts))
    found = list(rewriting.samples(Conversation("f:1", turns), 512))
    assert [teacher.tokenizer.decode(tokens.ids) for tokens in found] == [
        "Q one<|im_end|>\nthink:A one<|im_end|>",
        "Q one<|im_end|>\n[A one]\nQ two<|im_end|>\nthink:A two<|im_end|>",
    ]
    assert [teacher.tokenizer.decode(written(tokens)) for tokens in found] == [
        "A one<|im_end|>",
        "A two<|im_end|>",
    ]


def test_what_does_not_fit_is_left_out(teacher: Teacher) -> None:
    long = Conversation("f:1", (Turn("user", "word " * 60), Turn("assistant", "Yes.")))
    assert list(coder(teacher).samples(long, 50)) == []
    assert len(list(coder(teacher).samples(long, 500))) == 1


def test_a_model_without_a_chat_format_is_refused(tmp_path: Path, teacher: Teacher) -> None:
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(write_tiny_tokenizer(tmp_path))
    with pytest.raises(ModelError, match="no chat template"):
        ChatCoder(tmp_path, plain, ())


def training(folder: Path) -> DrafterTraining:
    return DrafterTraining(target=str(EMBEDDED), out=folder, run=folder, length=160)


def test_the_target_writes_the_answers_and_they_are_kept(tmp_path: Path, teacher: Teacher) -> None:
    file = lines(
        tmp_path,
        {"messages": [USER, MODEL, {"role": "user", "content": "What is bread?"}]},
        *({"prompt": f"What is tea number {i}?"} for i in range(TOGETHER)),
        {"prompt": "too long " * 200},
    )
    made = coder(teacher)
    asked = read_conversations(file, regenerate=True)
    again = Regeneration(training(tmp_path), teacher, made)
    done = again.answered(asked)
    assert shapes(done) == ["uaua", *["ua"] * TOGETHER]
    for conversation in done[:3]:
        for end in range(1, len(conversation.turns), 2):
            before = Conversation("", conversation.turns[:end])
            (answer,) = teacher.answer([made.prompt(before)], 100)
            turn = conversation.turns[end]
            assert turn.ids is not None and turn.ended
            assert [*turn.ids, answer[-1]] == answer and turn.text != MODEL["content"]
    kept = again.file.read_text().splitlines(keepends=True)
    assert len(kept) == len(done)
    # Half of a batch was written when the process died: that batch is answered again.
    again.file.write_text("".join(kept[: TOGETHER // 2]) + kept[TOGETHER // 2][:20])
    assert again.answered(asked) == done
    again.file.write_text("".join(kept[:TOGETHER]) + "{}")
    assert again.answered(asked) == done
    other = [Conversation("", (Turn("user", "Why?"),)), *asked[1:]]
    assert again.answered(other)[1:] == done[1:] != done
    (sample,) = made.samples(done[1], 160)
    assert done[1].turns[1].ids is not None
    assert written(sample)[:-1] == list(done[1].turns[1].ids) and written(sample)[-1] == 2


def test_an_answer_that_was_cut_does_not_teach_its_end(teacher: Teacher) -> None:
    turns = (Turn("user", "Q"), Turn("assistant", "", (300, 301, 302), ended=False))
    (tokens,) = coder(teacher).samples(Conversation("f:1", turns), 100)
    assert written(tokens) == [300, 301, 302] and tokens.ids[-2] == 2


def test_held_out_prompts_are_not_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "inputs"
    folder.mkdir()
    words = write_inputs(folder)
    teacher, file = Teacher(Path(words[1])), Path(words[3])
    settings = DrafterTraining(target=words[1], out=tmp_path, length=100, held_out=5)
    found = conversation_lessons(ConversationFile(prompts=file), settings, teacher)
    assert found.distinct == 27 and len(found.held_out) == 3  # a tenth of thirty
    epoch = [found.source(i).ids for i in range(27)]
    assert sorted(epoch) == sorted(found.source(i).ids for i in range(27, 54))
    assert epoch != [found.source(i).ids for i in range(27, 54)]
    for held in found.held_out:
        prompt = list(held.ids[: held.first])
        assert all(ids[: len(prompt)] != prompt for ids in epoch)
        answer = teacher.answer([prompt], 100 - max(h.first for h in found.held_out))
        assert list(held.ids[held.first :]) == answer[0]
    assert torch.is_grad_enabled()
