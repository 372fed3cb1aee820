"""The texts that SmolLM2's drafters are trained on, thousands at once on a GPU.

    python -m tools.smollm2.texts --model smollm2 --questions 40000 --out texts.jsonl

All texts are the model's own (the idea is Magpie's, arXiv 2406.08464). It draws questions as the
user of its own chat format, half of them after a common first word. It answers each one greedily,
a tenth of them by sampling at temperature 0.8. For some questions it writes outlines and parts in
the form of the template `list`, in short parts and in paragraphs alike. The output has the format
of `specsot train answers`. Questions of the files in `--without` are left out."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from specsot.engine.prepare.job import model_folder

STARTS = """What|How|Why|Who|When|Where|Which|Is|Are|Can you|Could you|Do|Does|Should|Would|If|
Imagine|Explain|Describe|Compare|Write|Write a|Create|Compose|Draft|Design|List|Give|Tell me|
Discuss|Analyze|Summarize|Suggest|Recommend|Plan|Help me|I want to|I need|I'm|My|Solve|Calculate|
Implement|Write a Python function|Develop|Pretend|Act as|As a|In|What are|How can I|How do|What if|
What is"""
TEMPLATE = Path(__file__).parents[2] / "states" / "text" / "templates" / "list.yaml"
CHECK_EVERY = 16  # steps between looks at which rows have ended


@dataclass(slots=True)
class Text:
    """A prompt and what follows it, of at most `limit` tokens; temperature 0 is greedy."""

    prompt: list[int]
    limit: int
    temperature: float = 0.0
    written: Sequence[int] = ()


class LockstepDecoder:
    """Decodes many texts at once. All rows of a wave are at the same position: a prompt's tokens
    enter one at a time, like written ones, so no row needs padding or a mask."""

    def __init__(self, folder: Path, device: str, rows: int, length: int) -> None:
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors", device=device)
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_size = config["head_dim"]
        self.eps = config["rms_norm_eps"]
        self.stop = config["eos_token_id"][0]
        self.embedding_VH = weights["model.embed_tokens.weight"].to(dtype)
        self.norm_H = weights["model.norm.weight"].to(dtype)
        self.layers = [
            self._layer(weights, f"model.layers.{number}.", dtype)
            for number in range(config["num_hidden_layers"])
        ]
        half = self.head_size // 2
        theta = config["rope_parameters"]["rope_theta"]
        angles = torch.arange(length)[:, None] / theta ** (torch.arange(half) / half)
        self.cos_Td = torch.cat((angles, angles), 1).cos().to(device, dtype)
        self.sin_Td = torch.cat((-angles.sin(), angles.sin()), 1).to(device, dtype)
        self.device = device
        self.rows = rows
        self.length = length
        shape = (len(self.layers), 2, rows, self.kv_heads, length, self.head_size)
        self.cache = torch.empty(shape, dtype=dtype, device=device)

    @staticmethod
    def _layer(weights: dict[str, Tensor], prefix: str, dtype: torch.dtype) -> dict[str, Tensor]:
        def stacked(*names: str) -> Tensor:
            parts = [weights[f"{prefix}{name}.weight"] for name in names]
            return torch.cat(parts).to(dtype)

        return {
            "input_norm": stacked("input_layernorm"),
            "qkv": stacked(*(f"self_attn.{x}_proj" for x in "qkv")).T.contiguous(),
            "out": stacked("self_attn.o_proj").T.contiguous(),
            "mlp_norm": stacked("post_attention_layernorm"),
            "gate_up": stacked("mlp.gate_proj", "mlp.up_proj").T.contiguous(),
            "down": stacked("mlp.down_proj").T.contiguous(),
        }

    def _forward(self, ids_N: Tensor, position: int) -> Tensor:
        """The last hidden states [N, H] of one token a row, at the same position."""
        count = len(ids_N)
        x_NH = self.embedding_VH[ids_N]
        width = x_NH.shape[1:]
        cos, sin = self.cos_Td[position], self.sin_Td[position]
        rotated = self.heads + self.kv_heads
        for layer, cache in zip(self.layers, self.cache, strict=True):
            mixed_NH = F.rms_norm(x_NH, width, layer["input_norm"], self.eps)
            qkv_Nhd = (mixed_NH @ layer["qkv"]).view(count, -1, self.head_size)
            qk_Nhd = qkv_Nhd[:, :rotated]
            qk_Nhd = qk_Nhd * cos + qk_Nhd.roll(self.head_size // 2, -1) * sin
            cache[0, :count, :, position] = qk_Nhd[:, self.heads :]
            cache[1, :count, :, position] = qkv_Nhd[:, rotated:]
            keys, values = cache[:, :count, :, : position + 1]
            # The query heads of a group are the queries of its key head: keys are read once.
            q_Nkgd = qk_Nhd[:, : self.heads].unflatten(1, (self.kv_heads, -1))
            attended = F.scaled_dot_product_attention(q_Nkgd, keys, values).reshape(count, -1)
            x_NH = torch.addmm(x_NH, attended, layer["out"])
            mixed_NH = F.rms_norm(x_NH, width, layer["mlp_norm"], self.eps)
            gate, up = (mixed_NH @ layer["gate_up"]).chunk(2, 1)
            x_NH = torch.addmm(x_NH, F.silu(gate) * up, layer["down"])
        return F.rms_norm(x_NH, width, self.norm_H, self.eps)

    @torch.inference_mode()
    def write(self, texts: Sequence[Text], title: str) -> None:
        """Fill in `written` of all texts, with the stop token if it came."""
        start = time.monotonic()
        texts = sorted(texts, key=lambda text: (len(text.prompt), text.limit))
        for first in range(0, len(texts), self.rows):
            self._wave(texts[first : first + self.rows])
        seconds = time.monotonic() - start
        written = sum(len(text.written) for text in texts)
        print(f"{title}: {len(texts)} texts, {written} tokens, {seconds:.0f} s", flush=True)

    def _wave(self, texts: Sequence[Text]) -> None:
        size = self.length
        ends = [min(len(text.prompt) + text.limit, size) for text in texts]
        forced = torch.full((len(texts), size), -1)
        for row, text in enumerate(texts):
            forced[row, : len(text.prompt)] = torch.tensor(text.prompt)
        forced_NT = forced.to(self.device)
        ends_N = torch.tensor(ends, device=self.device)
        heats_N1 = torch.tensor([[text.temperature] for text in texts], device=self.device)
        samples = any(text.temperature for text in texts)
        shortest = min(len(text.prompt) for text in texts)
        numbers = torch.arange(len(texts), device=self.device)
        ids_NT = forced_NT.clone()
        lengths_N = ends_N.clone()
        open_N = torch.ones_like(ends_N, dtype=torch.bool)
        for position in range(max(ends) - 1):
            hidden_NH = self._forward(ids_NT[:, position], position)
            if position + 1 >= shortest:
                scores_NV = hidden_NH @ self.embedding_VH.T
                if samples:  # the maximum of logits and Gumbel noise is a draw
                    noise_NV = torch.empty_like(scores_NV, dtype=torch.float32).exponential_().log()
                    scores_NV = scores_NV - heats_N1 * noise_NV
                free_N = forced_NT[:, position + 1] < 0
                following_N = scores_NV.argmax(-1)
                ids_NT[:, position + 1] = following_N.where(free_N, forced_NT[:, position + 1])
                stopped_N = open_N & free_N & (following_N == self.stop)
                lengths_N = torch.where(stopped_N, position + 2, lengths_N)
                open_N = open_N & ~stopped_N & (ends_N > position + 2)
            if (position + 1) % CHECK_EVERY:
                continue
            kept = open_N.nonzero().flatten()
            if len(kept) > 0.9 * len(open_N):
                continue
            self._finish(texts, numbers[~open_N], ids_NT[~open_N], lengths_N[~open_N])
            for cache in self.cache:
                cache[:, : len(kept), :, : position + 1] = cache[:, kept, :, : position + 1]
            values = (forced_NT, ends_N, heats_N1, numbers, ids_NT, lengths_N, open_N)
            forced_NT, ends_N, heats_N1, numbers, ids_NT, lengths_N, open_N = (
                value[kept] for value in values
            )
            if not len(kept):
                return
        self._finish(texts, numbers, ids_NT, lengths_N)

    @staticmethod
    def _finish(texts: Sequence[Text], numbers: Tensor, ids_NT: Tensor, lengths_N: Tensor) -> None:
        rows = zip(numbers.tolist(), ids_NT.tolist(), lengths_N.tolist(), strict=True)
        for number, ids, length in rows:
            texts[number].written = ids[len(texts[number].prompt) : length]


def before_loop(ids: Sequence[int], size: int = 8) -> Sequence[int]:
    """The text up to the third occurrence of any `size` tokens: small models fall into loops."""
    counts: Counter[tuple[int, ...]] = Counter()
    for end in range(size, len(ids) + 1):
        gram = tuple(ids[end - size : end])
        counts[gram] += 1
        if counts[gram] == 3:
            return ids[:end]
    return ids


class Writer:
    """Questions, their answers, outlines and parts, as lines of `specsot train answers`."""

    def __init__(self, decoder: LockstepDecoder, folder: Path, seed: int, examples: int) -> None:
        self.decoder = decoder
        self.examples = examples
        self.random = Random(seed)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.template = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))
        marked = self._chat([("user", "MARK")])
        self.opening, self.reply = (self._ids(text) for text in marked.split("MARK"))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _plain(self, text: str) -> list[int]:
        """The tokens of a text that may name control tokens."""
        options = {"add_special_tokens": False, "split_special_tokens": True}
        return list(self.tokenizer.encode(text, **options))

    def _chat(self, turns: Sequence[tuple[str, str]]) -> str:
        messages = [{"role": role, "content": text} for role, text in turns]
        options = {"tokenize": False, "add_generation_prompt": True}
        return str(self.tokenizer.apply_chat_template(messages, **options))

    def questions(self, count: int, without: set[str]) -> list[str]:
        """Different questions that ended within 160 tokens."""
        starts = [start.strip() for start in STARTS.split("|")]
        texts = []
        for number in range(count):
            start = self._ids(self.random.choice(starts)) if number % 2 else []
            texts.append(Text([*self.opening, *start], limit=160, temperature=0.8))
        self.decoder.write(texts, "questions")
        found: dict[str, None] = {}
        for text in texts:
            ids = [*text.prompt[len(self.opening) :], *text.written]
            if ids[-1:] != [self.decoder.stop]:
                continue
            question = self.tokenizer.decode(ids[:-1]).strip()
            if len(question) >= 12 and question.casefold() not in without:
                found[question] = None
        self.random.shuffle(kept := list(found))
        return kept

    def answers(self, questions: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        """A sample for each question."""
        texts = []
        for number, question in enumerate(questions):
            prompt = [*self.opening, *self._plain(question), *self.reply]
            heat = 0.8 if number % 10 == 9 else 0.0
            texts.append(Text(prompt, limit=384, temperature=heat))
        self.decoder.write(texts, "answers")
        for text in texts:
            yield [self._sample("answer", [], [(text.prompt, before_loop(text.written))])]

    def outlined(self, questions: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        """The outline and the parts of each question whose outline can be read."""
        outlines: list[Text] = []
        for number, question in enumerate(questions):
            turns: list[tuple[str, str]] = []
            for example in self.template["examples"] if number % self.examples == 0 else []:
                titles = example["titles"]
                turns.append(("user", self._slots("skeleton", example["question"])))
                turns.append(("assistant", "\n".join(f"{i}. {t}" for i, t in enumerate(titles, 1))))
                branch = self._branch("", number) + titles[example["part"] - 1]
                turns.append(("user", branch.removeprefix("\n\n")))
                turns.append(("assistant", example["text"].strip()))
            text = self._chat([*turns, ("user", self._slots("skeleton", "MARK"))])
            before, after = text.split("MARK")
            prompt = [*self._ids(before), *self._plain(question), *self._ids(after)]
            outlines.append(Text(prompt, limit=96))
        self.decoder.write(outlines, "outlines")
        parts: list[list[tuple[list[int], Text]]] = []
        trunks = []
        for number, (question, outline) in enumerate(zip(questions, outlines, strict=True)):
            branch = self._ids(self._branch("", number))
            trunk = [*self.opening, *self._plain(question), *branch]
            heads = [[*self._plain(title), *self.reply] for title in self._titles(outline)]
            parts.append([(head, Text([*trunk, *head], limit=200)) for head in heads])
            trunks.append(trunk)
        self.decoder.write([text for own in parts for _, text in own], "parts")
        for outline, trunk, own in zip(outlines, trunks, parts, strict=True):
            if own:
                branches = [(head, text.written) for head, text in own]
                first = self._sample("outline", [], [(outline.prompt, outline.written)])
                yield [first, self._sample("parts", trunk, branches)]

    def _titles(self, outline: Text) -> list[str]:
        """Two to eight different titles of a numbered list, else none."""
        lines = self.tokenizer.decode(outline.written[:-1]).strip().split("\n")
        marks = [f"{number}. " for number in range(1, len(lines) + 1)]
        titles = [line.removeprefix(mark) for mark, line in zip(marks, lines, strict=True)]
        numbered = all(line.startswith(mark) for mark, line in zip(marks, lines, strict=True))
        ended = list(outline.written[-1:]) == [self.decoder.stop]
        usable = ended and numbered and 2 <= len(lines) <= 8 and len(set(titles)) == len(titles)
        return titles if usable and max(map(len, titles)) < 80 else []

    def _slots(self, name: str, question: str) -> str:
        return str(self.template[name]).replace("{question}", question)

    def _branch(self, question: str, number: int) -> str:
        size = self.template["sizes"]["short" if number % 2 else "paragraph"]
        text = str(self.template["prompt"]["branch"]).replace("{question}", question)
        return text.replace("{size}", size).replace("{title}", "")

    @staticmethod
    def _sample(
        kind: str, trunk: Sequence[int], branches: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> dict[str, Any]:
        pieces = [[(list(read), False), (list(written), True)] for read, written in branches]
        return {"kind": kind, "trunk": list(trunk), "branches": pieces}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder or a known name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=40000)
    parser.add_argument("--outlined", type=int, default=8000)
    parser.add_argument("--rows", type=int, default=3072)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--examples", type=int, default=1, help="one outline in N has examples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", type=Path, action="append", default=[])
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for every shape
    without = {
        str(text).casefold()
        for file in args.without
        for line in file.read_text(encoding="utf-8").splitlines()
        for text in json.loads(line).get("turns", [json.loads(line).get("prompt")])
    }
    folder = model_folder(args.model, "target")
    decoder = LockstepDecoder(folder, args.device, rows=args.rows, length=720)
    writer = Writer(decoder, folder, args.seed, args.examples)
    questions = writer.questions(args.questions, without)
    print(f"{len(questions)} different questions", flush=True)
    lines = [*writer.answers(questions), *writer.outlined(questions[: args.outlined])]
    with args.out.open("w", encoding="utf-8") as file:
        for number, samples in enumerate(lines):
            value = {"number": number, "question": "", "samples": samples}
            file.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    main()
