"""Files of prompts and conversations: what is refused, what is trained on, what is answered."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.interrupted import EMBEDDED, write_inputs
from helpers.tiny import write_tiny_tokenizer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from specsot.engine.cli.train import train
from specsot.engine.errors import UsageError
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.prepare.job import prepare
from specsot.engine.prepare.options import RunOptions
from specsot.engine.run.session import load
from specsot.engine.train import dataset
from specsot.engine.train.answers import answer_file
from specsot.engine.train.data import GOLD, Tokens, pack
from specsot.engine.train.settings import ConversationFile, DrafterTraining
from specsot.engine.train.teacher import Teacher
from specsot.models.files import ModelError

USER, MODEL = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello you"}


def lines(folder: Path, *values: Any) -> Path:
    file = folder / "asked.jsonl"
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    file.write_text("\n".join(texts) + "\n")
    return file


def shapes(found: list[dataset.Conversation]) -> list[str]:
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
    found = dataset.read_conversations(file, questions=True)
    assert shapes(found) == ["u", "uau", "sua"]
    assert [c.place.rsplit(":")[-1] for c in found] == ["1", "3", "4"]
    questions = [c.head(c.user_turns[-1] + 1) for c in found]
    assert shapes(questions) == ["u", "uau", "su"]


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
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "2: the text is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, said: str) -> None:
    file = lines(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(UsageError) as caught:
        dataset.read_conversations(file, questions=True)
    assert str(caught.value).startswith(f"{file}:2") and said in str(caught.value)


def test_a_file_that_is_none_and_an_unanswered_prompt(tmp_path: Path) -> None:
    for data, said in (
        (None, "cannot be read: No such file"),
        (b"\n", "no prompts in it"),
        (b'{"prompt": "caf\xe9"}\n', "asked.jsonl:1: not UTF-8"),
    ):
        file = tmp_path / "asked.jsonl"
        if data is not None:
            file.write_bytes(data)
        with pytest.raises(UsageError, match=said):
            dataset.read_conversations(file, questions=True)
    file = lines(tmp_path, {"messages": [USER, MODEL]}, {"prompt": "Why?"})
    words = ["vanilla", "--prompts", str(file), "--out", str(tmp_path / "o"), "--steps", "1"]
    result = CliRunner().invoke(train, words)
    assert result.exit_code == 2
    assert f"{file}:2: the last user turn has no answer; with `specsot train" in result.output


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher(EMBEDDED)


def coder(teacher: Teacher) -> dataset.ChatCoder:
    return dataset.ChatCoder(teacher.folder, teacher.tokenizer, teacher.stops)


def talk(*texts: str) -> dataset.Conversation:
    roles = ("user", "assistant")
    turns = (dataset.Turn(roles[i % 2], text) for i, text in enumerate(texts))
    return dataset.Conversation("f:1", tuple(turns))


def written(tokens: Tokens) -> list[int]:
    return [i for i, w in zip(tokens.ids, tokens.weights, strict=True) if w >= GOLD]


def test_a_user_cannot_write_a_control_token_that_is_not_special(teacher: Teacher) -> None:
    tokenizer = deepcopy(teacher.tokenizer)
    tokenizer.add_tokens(["<think>"])
    think = tokenizer.convert_tokens_to_ids("<think>")
    said = talk("What is <think> for?", "<think>It starts a thought.")
    (tokens,) = dataset.ChatCoder(teacher.folder, tokenizer, teacher.stops).samples(said)
    assert tokens.ids.count(think) == written(tokens).count(think) == 1, "the answer's alone"
    assert "What is <think> for?" in tokenizer.decode(tokens.ids)


def test_only_what_the_assistant_says_counts(teacher: Teacher) -> None:
    said = talk("Who is <|im_end|> Ada?", "A poet.", "More", "No <|im_end|> more.")
    (tokens,) = coder(teacher).samples(said)
    ids, text = tokens.ids, teacher.tokenizer.decode(tokens.ids)
    assert text.strip() == (
        "<|im_start|>user\nWho is <|im_end|> Ada?<|im_end|>\n<|im_start|>assistant\nA poet."
        "<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\nNo <|im_end|> more."
        "<|im_end|>"
    )
    assert ids.count(1) == ids.count(2) == 4  # no text became a control token
    answers = teacher.tokenizer.decode(written(tokens))
    assert answers == "A poet.<|im_end|>No <|im_end|> more.<|im_end|>"
    assert tokens.positions == list(range(len(ids))) and set(tokens.segments) == {0}
    prompt = coder(teacher).prompt(said.head(3))
    assert ids[: len(prompt)] == prompt and prompt[-1] != 2
    # an answer that was cut does not teach its end
    turns = (dataset.Turn("user", "Q"), dataset.Turn("assistant", "", (300, 301, 302), ended=False))
    (tokens,) = coder(teacher).samples(dataset.Conversation("f:1", turns))
    assert written(tokens) == [300, 301, 302] and tokens.ids[-2] == 2


def test_a_format_that_rewrites_earlier_turns_gives_a_sample_per_answer(teacher: Teacher) -> None:
    class Rewriting:
        """The embedded tokenizer; what the assistant said earlier is written in brackets."""

        chat_template = "yes"

        def __getattr__(self, name: str) -> Any:
            return getattr(teacher.tokenizer, name)

        def apply_chat_template(self, turns: list[dict[str, str]], **options: Any) -> str:
            said = [
                f"[{t['content']}]"
                if t["role"] == "assistant" and t is not turns[-1]
                else f"{t['content']}<|im_end|>"
                for t in turns
            ]
            return "\n".join(said) + ("\nthink:" if options["add_generation_prompt"] else "")

    rewriting = dataset.ChatCoder(teacher.folder, Rewriting(), teacher.stops)
    found = list(rewriting.samples(talk("Q one", "A one", "Q two", "A two")))
    decode = teacher.tokenizer.decode
    assert [decode(tokens.ids) for tokens in found] == [
        "Q one<|im_end|>\nthink:A one<|im_end|>",
        "Q one<|im_end|>\n[A one]\nQ two<|im_end|>\nthink:A two<|im_end|>",
    ]
    expected = ["A one<|im_end|>", "A two<|im_end|>"]
    assert [decode(written(tokens)) for tokens in found] == expected


def test_what_does_not_fit_and_no_chat_format(tmp_path: Path, teacher: Teacher) -> None:
    long = {"role": "user", "content": "word " * 60}
    file = ConversationFile(prompts=[lines(tmp_path, {"messages": [long, MODEL]})])
    settings = DrafterTraining(target=str(EMBEDDED), out=tmp_path, length=50)
    with pytest.raises(UsageError, match="no answer of two tokens or more within 50 tokens"):
        dataset.conversation_dataset(file, settings, teacher)
    assert dataset.conversation_dataset(file, replace(settings, length=500), teacher).distinct == 1
    plain = AutoTokenizer.from_pretrained(write_tiny_tokenizer(tmp_path))
    with pytest.raises(ModelError, match="no chat template"):
        dataset.ChatCoder(tmp_path, plain, ())


def asked(graph: str = "autoregressive") -> RunOptions:
    return RunOptions(graph=graph, model=str(EMBEDDED), max_new_tokens=40, dtype="float32")


def pieces(sample: dataset.Written) -> list[Any]:
    (branch,) = sample.branches
    return [[list(ids), written] for ids, written in branch]


def test_the_target_writes_the_answers_and_they_are_kept(tmp_path: Path, teacher: Teacher) -> None:
    file = lines(
        tmp_path,
        {"messages": [USER, MODEL, {"role": "user", "content": "What is bread?"}]},
        *({"prompt": f"What is tea number {i}?"} for i in range(6)),
        {"prompt": "too long " * 200},
    )
    out = tmp_path / "answers.jsonl"
    assert answer_file(asked(), file, out, 3, 160) == 8
    (both,), *others, nothing = dataset.read_lines(out)
    assert nothing == [] and all(len(samples) == 1 for samples in others)
    assert [written for _, written in pieces(both)] == [False, True, False, True]
    for sample, prompt in ((others[2][0], 0), (both, 0), (both, 2)):
        parts = pieces(sample)
        before = [i for ids, _ in parts[: prompt + 1] for i in ids]
        assert parts[prompt + 1][0] == teacher.answer([before], 40)[0], "greedily its own"
    fourth = dataset.read_conversations(file, questions=True)[3]
    assert pieces(others[2][0])[0][0] == coder(teacher).prompt(fourth)
    kept = out.read_text().splitlines(keepends=True)
    out.write_text("".join(kept[2:5]) + kept[5][:20])  # a process that died while it wrote
    assert answer_file(asked(), file, out, 3, 160) == 8
    assert sorted(out.read_text().splitlines(keepends=True)) == sorted(kept)
    with pytest.raises(UsageError, match="holds answers to other prompts"):
        answer_file(asked(), lines(tmp_path, {"prompt": "Why?"}), out, 3, 160)


@pytest.mark.parametrize("share", ["outline", "prompt"])
def test_outlines_and_parts_are_trained_on_as_they_were_seen(
    share: str, tmp_path: Path, teacher: Teacher
) -> None:
    file, out = lines(tmp_path, {"prompt": "Plan a weekend camping trip."}), tmp_path / "a.jsonl"
    options = replace(asked("bim_plain"), sets=(f"skeleton.share={share}",))
    answer_file(options, file, out, 8, 768)
    ((outline, parts),) = dataset.read_lines(out)
    assert (outline.kind, parts.kind) == ("outline", "parts") and len(parts.branches) > 2
    tokens = parts.tokens()
    assert tokens.positions[: len(parts.trunk)] == list(range(len(parts.trunk)))
    for sample, least in ((outline, 4), (parts, 40)):
        tokens = sample.tokens()
        batch = pack([[tokens]], len(tokens.ids))
        best_S = teacher.read(batch, best=True, exact=True).best_BS[0]
        counted_S = batch.weights[0] >= GOLD
        first_S = torch.tensor(tokens.segments) != torch.tensor([*tokens.segments[1:], -1])
        assert counted_S.sum() > least and not (counted_S & first_S & (batch.samples[0] > 0)).any()
        right_S = best_S == batch.labels[0]
        assert right_S[counted_S].all(), "every token is the target's own, at its place"


def test_an_outline_is_trained_on_after_its_whole_prompt(tmp_path: Path) -> None:
    """Its parts share only the start of this prompt."""
    file, out = lines(tmp_path, {"prompt": "Plan a weekend camping trip."}), tmp_path / "a.jsonl"
    sets = ("skeleton.share=prompt", "skeleton.template=list")
    options = replace(asked("bim_plain"), sets=sets)
    answer_file(options, file, out, 8, 768)
    ((outline, parts),) = dataset.read_lines(out)
    request = load(prepare(options)).request(Prompt("0", "Plan a weekend camping trip."))
    assert (outline.kind, parts.kind) == ("outline", "parts")
    assert [*outline.trunk, *outline.branches[0][0][0]] == [*request.prefix.ids, *request.tail.ids]


def test_a_held_out_line_is_drafted_branch_by_branch(tmp_path: Path, teacher: Teacher) -> None:
    file = tmp_path / "answers.jsonl"
    pieces = [[[[5, 6], False], [[7, 8, 2], True]], [[[9], False], [[10, 2], True]]]
    sample = {"kind": "parts", "trunk": [3, 4], "branches": pieces}
    made = [{"number": n, "question": "Q", "samples": [sample]} for n in range(20)]
    file.write_text("".join(json.dumps(line) + "\n" for line in reversed(made)))
    settings = DrafterTraining(target=str(EMBEDDED), out=tmp_path, length=100, held_out=5)
    found = dataset.conversation_dataset(ConversationFile(prompts=[file]), settings, teacher)
    assert found.distinct == 18 and len(found.held_out) == 4  # a tenth of twenty, of two parts
    assert found.held_out[:2] == [
        dataset.HeldOutPrompt("parts", (3, 4, 5, 6, 7, 8, 2), 4),
        dataset.HeldOutPrompt("parts", (3, 4, 9, 10, 2), 3),
    ]
    tokens = found.source(0)
    assert tokens.ids == [3, 4, 5, 6, 7, 8, 2, 9, 10, 2]
    assert tokens.segments == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    assert tokens.positions == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4]
    assert written(tokens) == [7, 8, 2, 10, 2]
    file.write_text('{"number": 0, "samples": [{"kind": "parts"}]}\n')
    with pytest.raises(UsageError, match=r"answers.jsonl:1: not a line of answers"):
        dataset.conversation_dataset(ConversationFile(prompts=[file]), settings, teacher)


def test_held_out_prompts_are_not_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "inputs"
    folder.mkdir()
    words = write_inputs(folder)
    teacher, file = Teacher(Path(words[1])), Path(words[3])
    settings = DrafterTraining(target=words[1], out=tmp_path, length=100, held_out=5)
    found = dataset.conversation_dataset(ConversationFile(prompts=[file]), settings, teacher)
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
