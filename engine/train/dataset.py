"""Samples of a drafter's training: conversations and answers of JSONL files, as token ids."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from ...models.files import ModelError
from ...models.load.chat_format import chat_format
from ...states.text.tokens import Encoder, PromptError, check_question
from ..errors import UsageError, first_line
from ..prepare.inputs import json_object, numbered_lines, read_text
from .data import GOLD, Source, Tokens, TrainingBatch, pack, trimmed
from .settings import ConversationFile, DrafterTraining
from .teacher import Teacher

KEYS = ("prompt", "messages", "conversations")
ROLES = {role: role for role in ("system", "user", "assistant")}
ROLES |= {"human": "user", "gpt": "assistant"}
MARK = re.compile(r"Turn(\d+)Mark")
MAX_COUNTED_SAMPLES = 4000  # samples in which frequent ids are counted


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. ids: an answer as the target wrote it, without the end of its turn, which
    belongs to the answer if it `ended`; None for a text of a file."""

    role: str
    text: str
    ids: tuple[int, ...] | None = None
    ended: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """place: file and line. turns: an optional system turn, then user and assistant alternate."""

    place: str
    turns: tuple[Turn, ...]

    @property
    def user_turns(self) -> list[int]:
        return [i for i, turn in enumerate(self.turns) if turn.role == "user"]

    @property
    def text(self) -> str:
        return "\n".join(turn.text for turn in self.turns if turn.role == "user")

    def head(self, count: int) -> "Conversation":
        return Conversation(self.place, self.turns[:count])


def read_conversations(file: Path, *, questions: bool = False) -> list[Conversation]:
    """One per line; of `questions` the answers may be missing. UsageError names the line."""
    conversations = []
    for number, line in numbered_lines(read_text(file, most=None)):
        place = f"{file}:{number}"
        key, value = json_object(line, place, KEYS)
        conversation = _conversation(key, value[key], place)
        if conversation.turns[-1].role == "user" and not questions:
            how = "with `specsot train answers` the target writes it"
            raise UsageError(f"{place}: the last user turn has no answer; {how}")
        conversations.append(conversation)
    if not conversations:
        raise UsageError(f"{file}: no prompts in it")
    return conversations


def _conversation(key: str, content: Any, place: str) -> Conversation:
    if key == "prompt":
        return Conversation(place, (_turn("user", content, f"{place}: 'prompt'"),))
    if not isinstance(content, list) or not content:
        raise UsageError(f"{place}: {key!r} must be a list of messages")
    role, text = ("role", "content") if key == "messages" else ("from", "value")
    turns: list[Turn] = []
    for number, message in enumerate(content, 1):
        where = f"{place}: message {number}"
        if not isinstance(message, dict) or not {role, text} <= message.keys():
            raise UsageError(f"{where} must be an object with {role!r} and {text!r}")
        turn = _turn(message[role], message[text], where)
        expected = "assistant" if turns and turns[-1].role == "user" else "user"
        if turn.role != expected and (turns or turn.role != "system"):
            raise UsageError(f"{where} is from {turn.role!r}; it is the turn of {expected!r}")
        turns.append(turn)
    if turns[-1].role == "system":
        raise UsageError(f"{place}: no user turn")
    return Conversation(place, tuple(turns))


def _turn(role: Any, text: Any, where: str) -> Turn:
    if not isinstance(role, str) or role not in ROLES:
        raise UsageError(f"{where} is from {role!r}, which is none of {', '.join(ROLES)}")
    if not isinstance(text, str):
        raise UsageError(f"{where} must be a text")
    try:
        check_question(text, "text")
    except PromptError as error:
        raise UsageError(f"{where}: {error}") from None
    return Turn(ROLES[role], text)


# The turn, or -1 for text of the format; ids; whether the model has to write them.
Part = tuple[int, list[int], bool]


class ChatCoder:
    """Conversations as ids, in the target's own chat format; ModelError if it has none. Text of the
    format and of the turns is encoded separately, as in a run: no turn becomes a control token. In
    an answer, those that are not special (`<think>`) are the target's own words."""

    def __init__(self, folder: Path, tokenizer: Any, stops: Sequence[int]) -> None:
        if not tokenizer.chat_template:
            raise ModelError(folder, "the tokenizer has no chat template to write conversations in")
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._stops = frozenset(stops)

    def prompt(self, conversation: Conversation) -> list[int]:
        """The ids up to the start of the next answer."""
        return [i for _, ids, _ in self._parts(conversation, generation=True) for i in ids]

    def samples(self, conversation: Conversation) -> Iterator[Tokens]:
        """One sample, or one per answer if the format renders earlier turns differently."""
        answers = [i for i, turn in enumerate(conversation.turns) if turn.role == "assistant"]
        if not answers:
            return
        whole = self._parts(conversation.head(answers[-1] + 1))
        prompts = {answer: self.prompt(conversation.head(answer)) for answer in answers}
        ends = [[part[0] for part in whole].index(answer) for answer in answers]
        starts = [[token for _, ids, _ in whole[:end] for token in ids] for end in ends]
        samples = [whole]
        if starts != list(prompts.values()):
            samples = [
                [(-1, ids, False), *(p for p in self._parts(conversation.head(i + 1)) if p[0] == i)]
                for i, ids in prompts.items()
            ]
        for parts in samples:
            weights = [GOLD * counts for _, ids, counts in parts for _ in ids]
            yield Tokens.linear([i for _, ids, _ in parts for i in ids], weights)

    def _parts(self, conversation: Conversation, generation: bool = False) -> list[Part]:
        """The turns and the format's text between them; what ends an answer's turn is its part."""
        turns = conversation.turns
        marked = [{"role": turn.role, "content": f"Turn{i}Mark"} for i, turn in enumerate(turns)]
        where = f"{conversation.place}: the target's chat format"
        try:
            text = chat_format(self._tokenizer).text(marked, generation=generation)
        except Exception as error:  # a chat format can raise anything
            raise UsageError(f"{where} refuses it: {first_line(error)}") from None
        pieces = MARK.split(str(text))
        if [int(number) for number in pieces[1::2]] != list(range(len(turns))):
            raise UsageError(f"{where} drops or moves a turn")
        first, *others = map(self._encoder.literal, pieces[::2])
        parts = [(-1, first, False)]
        for number, (turn, after) in enumerate(zip(turns, others, strict=True)):
            answers = turn.role == "assistant"
            try:
                ids = self._ids(turn) if turn.ids is None else list(turn.ids)
            except PromptError as error:
                raise UsageError(f"{conversation.place}: {error}") from None
            parts.append((number, ids, answers))
            end = 0
            if answers:
                end = next((i + 1 for i, token in enumerate(after) if token in self._stops), 0)
                parts.append((number, after[:end], turn.ended))
            parts.append((-1, after[end:], False))
        return parts

    def _ids(self, turn: Turn) -> list[int]:
        if turn.role != "assistant":
            return self._encoder.text(turn.text)
        options = {"add_special_tokens": False, "verbose": False, "split_special_tokens": True}
        return list(self._tokenizer.encode(turn.text, **options))


Piece = tuple[Sequence[int], bool]  # token ids, and whether the target wrote them


@dataclass(frozen=True, slots=True)
class Written:
    """kind: answer, outline or parts. trunk: ids shared by all branches. branches: their pieces."""

    kind: str
    trunk: Sequence[int]
    branches: Sequence[Sequence[Piece]]

    def tokens(self) -> Tokens:
        """As a training sample; the trunk has no loss weight."""
        size = len(self.trunk)
        tokens = Tokens.linear(list(self.trunk), [0.0] * size)
        for number, pieces in enumerate(self.branches, 1):
            ids = [token for part, _ in pieces for token in part]
            tokens.ids += ids
            tokens.weights += [GOLD * written for part, written in pieces for _ in part]
            tokens.segments += [number] * len(ids)
            tokens.positions += range(size, size + len(ids))
        return tokens


def read_lines(file: Path) -> list[list[Written]]:
    """The samples of every conversation in a file of answers, by number; raises UsageError."""
    samples: dict[int, list[Written]] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            value = json.loads(line)
            samples[value["number"]] = [Written(**sample) for sample in value["samples"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file}:{number}: not a line of answers ({error})") from None
    return [samples[number] for number in sorted(samples)]


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A prompt with the target's greedy answer from index `first` on; `kind`: for the log."""

    kind: str
    ids: tuple[int, ...]
    first: int

    def batch(self, device: torch.device) -> TrainingBatch:
        """The sample as a batch [1, S] without loss weights."""
        tokens = Tokens.linear(list(self.ids), [0.0] * len(self.ids))
        return pack([[tokens]], len(self.ids)).to(device)


@dataclass(frozen=True, slots=True)
class Dataset:
    """source: the samples. distinct: their number, None if endless. held_out: for evaluation."""

    source: Source
    distinct: int | None
    held_out: list[HeldOutPrompt]


DatasetBuilder = Callable[[DrafterTraining, Teacher], Dataset]  # of a training's target


def conversation_dataset(
    file: ConversationFile, settings: DrafterTraining, teacher: Teacher
) -> Dataset:
    """Conversations, shuffled in every epoch; at most a tenth of each file's lines is held out."""
    samples: list[Tokens] = []
    held_out: list[HeldOutPrompt] = []
    for path in file.prompts:
        with path.open("rb") as stream:
            is_answers = stream.readline(1 << 16).startswith(b'{"number": ')
        lines: list[Any] = read_lines(path) if is_answers else read_conversations(path)
        order = Random(f"held:{settings.seed}").sample(range(len(lines)), len(lines))
        most = min(settings.held_out, max(len(lines) // 10, 1)) if len(lines) > 1 else 0
        evaluated = [lines[number] for number in sorted(order[:most])]
        trained = [lines[number] for number in sorted(order[most:])]
        if is_answers:
            samples += [written.tokens() for line in trained for written in line]
            held_out += _held_out_branches(chain.from_iterable(evaluated), settings.length)
        else:
            coder = ChatCoder(teacher.folder, teacher.tokenizer, teacher.stops)
            samples += [tokens for talk in trained for tokens in coder.samples(talk)]
            prompts = [coder.prompt(talk.head(talk.user_turns[-1] + 1)) for talk in evaluated]
            prompts = [ids for ids in prompts if len(ids) < settings.length]
            limit = settings.length - max(map(len, prompts), default=0)
            held_out += held_out_prompts(teacher, "prompt", prompts, limit)
        size = teacher.config.vocab_size
        if any(token >= size for tokens in samples for token in tokens.ids):
            raise UsageError(f"{path}: has tokens that the target lacks; it has {size}")
    samples = [trimmed(sample, settings.length) for sample in samples]
    samples = [s for s in samples if sum(weight >= GOLD for weight in s.weights) > 1]
    if not samples:
        what = f"no answer of two tokens or more within {settings.length} tokens"
        raise UsageError(f"{', '.join(map(str, file.prompts))}: {what}")
    count = len(samples)

    @lru_cache(2)
    def shuffled(epoch: int) -> list[int]:
        return Random(f"{settings.seed}:{epoch}").sample(range(count), count)

    def sample(index: int) -> Tokens:
        epoch, place = divmod(index, count)
        return samples[shuffled(epoch)[place]]

    return Dataset(sample, count, held_out)


def _held_out_branches(samples: Iterable[Written], length: int) -> Iterator[HeldOutPrompt]:
    """One prompt per branch, whose last piece is the drafted answer, of `length` ids at most."""
    for written in samples:
        for pieces in written.branches:
            ids = (*written.trunk, *(token for part, _ in pieces for token in part))
            first = len(ids) - len(pieces[-1][0])
            if first < len(ids) <= length:
                yield HeldOutPrompt(written.kind, ids, first)


def held_out_prompts(
    teacher: Teacher, kind: str, prompts: list[list[int]], limit: int
) -> list[HeldOutPrompt]:
    """Prompts with the target's answers of at most ``limit`` tokens."""
    answers = teacher.answer(prompts, limit) if prompts else []
    return [
        HeldOutPrompt(kind, (*prompt, *answer), len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def frequent_ids(dataset: Dataset, size: int, vocabulary: int) -> Tensor:
    """The most frequent ids of the answers, increasing, int64 [size]."""
    counts: Counter[int] = Counter(dict.fromkeys(range(vocabulary), 0))
    for index in range(min(MAX_COUNTED_SAMPLES, dataset.distinct or MAX_COUNTED_SAMPLES)):
        tokens = dataset.source(index)
        counts.update(i for i, w in zip(tokens.ids, tokens.weights, strict=True) if w >= GOLD)
    return torch.tensor(sorted(i for i, _ in counts.most_common(size)))


def rounds(hits_SK: Tensor, first: int) -> list[int]:
    """Tokens committed by each round of a chain of drafts, including the target's own token. A
    draft counts only if all before it are right, so the hits of every root determine the rounds."""
    rights = hits_SK.long().cumprod(1).sum(1).tolist()
    root = first
    last = len(rights) - 1
    gains = []
    while root < last:
        gains.append(min(rights[root] + 1, last - root))
        root += gains[-1]
    return gains


@torch.no_grad()
def held_out_tau(
    samples: Iterable[HeldOutPrompt], draft_hits: Callable[[HeldOutPrompt], Tensor]
) -> dict[str, float]:
    """Tokens per round over all samples, and per kind; `draft_hits` as in `loop.Trainer`."""
    gains: defaultdict[str, list[int]] = defaultdict(list)
    for sample in samples:
        tokens = rounds(draft_hits(sample), sample.first)
        gains[f"held_{sample.kind}"] += tokens
        gains["held_tau"] += tokens
    return {kind: sum(tokens) / len(tokens) for kind, tokens in sorted(gains.items()) if tokens}
