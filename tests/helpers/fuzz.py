"""Odd graphs, inputs and command lines, drawn by a seed; and what may never come of them."""

import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any
from unittest.mock import patch

from click.testing import CliRunner

from specsot.engine.cli.main import main
from specsot.engine.errors import Code
from specsot.engine.prepare.files import SHIPPED, graph_names, open_graph
from specsot.engine.prepare.repeat import graph_yaml
from specsot.engine.run import session

SECONDS = 60  # in which every command has to come to its end
NEVER = ("Traceback", "fault of specsot", "Exception ignored")
CODES = {int(code) for code in Code}
ODD = ["null", "true", "-1", "0", "1", "2", "1e999", ".nan", ".inf", "-0.0", "[]", "{}", "''",
       "[a, [b]]", "{a: {b: c}}", "$x", "$drafter.top_k", "0x10", "012", "on", "2026-01-01",
       "&a b", "*a", "!t x", '"\\u2028"', "x: y", "- - -", "🙂", "'", "|", "99999999999999999999",
       "1024", "65536", "1048576", "0.5", "3.0", "none", "bim", "batching", "eagle3", "dflash",
       "ngram", "vanilla", "eagle1", "rejection", "match", "sampled", "distinct", "../x",
       "/dev/zero", "~", "{1: 4}", "{1: 4, 2: 2}", "{2: 2}", "[1]", "[1, 2]", "\t", "#",
       "%YAML 1.1", "---", "{1: 100000}", "plan_a", "list", "instruct", "\x07",
       "ünïcode"]  # fmt: skip
TEXTS = ["", " ", "\n", "a", "?", "\t\t", "🙂", "\u202eabc", "\ufeffBOM", "x" * 3000,
         "long " * 3000, "<|im_end|>", "<|endoftext|>", "PLAN\n1|60|-|-|First\nEND",
         "1. One\n2. Two", "[bold]x[/]", "{question}", "{{ 7*7 }}", "\x1b[31mred", "\\",
         "'\"`$(ls)", "--help", "-", "@x", "NaN", "é" * 500, "\u0301" * 60, "中文提示", "<s>",
         "</s>", "\r\n\r\n", "%s%n", "a\u2028b",
         "\U0001f468\u200d\U0001f469\u200d\U0001f467"]  # fmt: skip


@dataclass
class Ended:
    words: list[str]
    code: int
    out: str
    err: str

    def faults(self) -> list[str]:
        """Everything that may never be."""
        told = f"{self.words} ended with {self.code}: {self.err[-600:]!r}"
        found = [f"{word}: {told}" for word in NEVER if word in self.out + self.err]
        if self.code not in CODES:
            found.append(f"no such code: {told}")
        if self.code and not self.err.strip():
            found.append(f"not a word: {told}")
        return found


@dataclass
class Tally:
    """What was tried, by how it ended; and what was wrong with it."""

    ended: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def report(self, what: str) -> str:
        codes = ", ".join(f"{count} x {code}" for code, count in sorted(self.ended.items()))
        return f"{what}: {self.ended.total()} tried ({codes}), {len(self.faults)} faults"


class HangError(BaseException):
    """A command that does not end; no code of ours may catch it."""


def command(words: list[str], stdin: str = "") -> Ended:
    def stop(number: int, frame: FrameType | None) -> None:
        raise HangError

    code, hidden = 0, ""
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    with (
        patch.object(sys, "argv", ["specsot", *words]),
        CliRunner().isolation(stdin.encode("utf-8", "replace")) as (out, err, _),
    ):
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        except HangError:
            code = 124
        except BaseException as error:
            code, hidden = 1, f"Traceback: {type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        sys.stdout.flush()
        sys.stderr.flush()
        return Ended(words, code, out.getvalue().decode(), err.getvalue().decode() + hidden)


# -- graphs ---------------------------------------------------------------------------------------


@cache
def good_graphs() -> tuple[str, ...]:
    files = [*SHIPPED.glob("*.yaml"), *SHIPPED.glob("machines/*.yaml")]
    texts = [path.read_text(encoding="utf-8") for path in sorted(files)]
    return (*texts, *(graph_yaml(open_graph(name).graph) for name in graph_names()))


def odd_graph(draw: Random) -> str:
    text = re.sub(r"^extends: (\w+)\.yaml", r"extends: \1", draw.choice(good_graphs()), flags=re.M)
    for _ in range(draw.choice([1, 1, 2, 3])):
        text = draw.choice(CHANGES)(draw, text)
    return text


def _line(draw: Random, text: str) -> tuple[list[str], int]:
    lines = text.split("\n")
    wanted = [at for at, one in enumerate(lines) if one.strip() and not one.startswith("#")]
    return lines, draw.choice(wanted or [0])


def _drop(draw: Random, text: str) -> str:
    lines, at = _line(draw, text)
    return "\n".join(lines[:at] + lines[at + 1 :])


def _repeat(draw: Random, text: str) -> str:
    lines, at = _line(draw, text)
    return "\n".join([*lines[:at], draw.choice(lines), *lines[at:]])


def _other(draw: Random, text: str, pattern: str, new: Callable[[str, list[str]], str]) -> str:
    """The text with one match of the pattern replaced by what `new` makes of it and of all."""
    places = [*re.finditer(pattern, text)]
    if not places:
        return text
    at = draw.choice(places)
    return text[: at.start()] + new(at[0], [p[0] for p in places]) + text[at.end() :]


def _value(draw: Random, text: str) -> str:
    return _other(draw, text, r"(?<=: )[^,{}\[\]#\n]+", lambda *_: draw.choice(ODD))


def _number(draw: Random, text: str) -> str:
    def new(old_text: str, _: list[str]) -> str:
        old = float(old_text)
        value = draw.choice([old + 1, old - 1, old * 2, old / 2, old * 1000, -old, 0, 1])
        return f"{value:g}" if draw.random() < 0.3 else str(int(value))

    return _other(draw, text, r"(?<=[ \[{])\d+(\.\d+)?", new)


def _word(draw: Random, text: str) -> str:
    """A word in the place of another one: ops, states, guards, keys."""
    return _other(draw, text, r"[a-z_.]{3,}", lambda _, words: draw.choice(words))


def _character(draw: Random, text: str) -> str:
    at = draw.randrange(len(text) + 1)
    new = draw.choice(["", ":", " ", "-", "}", "]", '"', "\n", "\t", "x", "\0"])
    return text[:at] + new + text[at + 1 :]


def _block(draw: Random, text: str) -> str:
    block = draw.choice(BLOCKS)
    name = block.partition(":")[0]
    kept = re.sub(rf"^{name}:.*\n(?:[ #].*\n|\n)*", "", text, flags=re.M)
    return f"{kept.rstrip()}\n{block}\n"


CHANGES: list[Callable[[Random, str], str]] = [
    *(_drop, _repeat, _value, _value, _number, _number, _word, _word, _character, _block, _block)
]
BLOCKS = [
    "drafter: {kind: none}", "drafter: {kind: ngram}", "drafter: {kind: dflash}",
    "drafter: {kind: vanilla, gamma: 9}",
    "drafter: {kind: eagle3, num_draft_tokens: 1, draft_depth: 1, top_k: 1}",
    "drafter: {kind: eagle3, num_draft_tokens: 60, draft_depth: 8, top_k: 10}",
    "drafter: {kind: dflash, num_draft_tokens: 30}",
    "drafter: {kind: eagle3, num_draft_tokens: {1: 8, 3: 2}, draft_depth: 4, top_k: 3,"
    " rows_per_round: 3}",
    "drafter: {kind: vanilla, gamma: 3, draws: sampled}", "layout: {kind: bim, kv_slots: 700}",
    "layout: {kind: batching, kv_slots: 700, max_num_branches: 2}",
    "layout: {kind: bim, max_num_branches: 1}",
    "layout: {kind: batching, max_num_branches: 3, order: longest}", "attention: dense",
    "attention: grouped", "sampling: {temperature: 1.0}", "sampling: {temperature: 0.7, top_k: 3}",
    "sampling: {temperature: 1.0, accept: rejection}", "sampling: {top_p: 0.0001, temperature: 2}",
    "sampling: {temperature: 1.0, min_p: 0.3, repetition_penalty: 1.3}",
    "sampling: {banned: [0, 1, 2, 3, 4, 5]}", "sampling: {forced: [7, 8, 9], min_new_tokens: 2}",
    "sampling: {logit_bias: {5: 100}}", "sampling: {banned: [1000000]}",
    "limits: {max_new_tokens: 1}", "limits: {max_new_tokens: 3, max_rounds: 2}",
    "limits: {max_new_tokens: 4000}", "skeleton: {}", "skeleton: {share: prompt}",
    "skeleton: {grammar: false, max_tokens: 8}", "skeleton: {max_branches: 1}",
    "skeleton: {max_tokens: 1, direct_tokens: 1}", "skeleton: {format: list, template: list}",
    "skeleton: {tools: []}", "skeleton: {documents: branches}", "skeleton: {merge: plain}",
    "skeleton: {template: instruct}", "beam: {num_beams: 2}", "beam: {num_beams: 9}",
    "blend: {check_layers: [1]}", "blend: {plan: reuse}",
    "blend: {check_layers: [1, 3], ratios: [0.5, 0.1]}",
    "blend: {mask: bottom_right}", "extends: eagle", "extends: bim_eagle", "name: ''", "version: 7",
]  # fmt: skip


# -- inputs ---------------------------------------------------------------------------------------


def odd_json(draw: Random, depth: int = 0) -> Any:
    kind = draw.randrange(9 if depth < 3 else 6)
    if kind < 3:
        return draw.choice([None, True, 0, -1, 7, 1.5, 10**30, 1e308, "", "x"])
    if kind < 6:
        return draw.choice(TEXTS)
    parts = [odd_json(draw, depth + 1) for _ in range(draw.randrange(4))]
    return parts if kind < 7 else {draw.choice(KEYS): part for part in parts}


KEYS = ["id", "prompt", "question", "turns", "task", "seed", "max_new_tokens", "documents",
        "text", "title", "temperature", "messages", "", "role", "deps", "length",
        "tool"]  # fmt: skip
OPTIONS = ["--seed", "--device", "--dtype", "--threads", "--max-new-tokens", "--stop-id",
           "--outline", "--set", "--prompts", "--document", "--cache-dir", "--expect-digest",
           "--runs-dir", "--trace", "--profile", "--model", "--drafter-model"]  # fmt: skip
VALUES = ["", "-1", "0", "1", "x", "1e9", "99999999999999999999", "/dev/null", "/dev/zero", "/",
          ".", "nothing", "cpu", "float32", "float64", "kv", "drafter.num_draft_tokens=2",
          "drafter.kind=none", "a=b", "=", "layout.kv_slots=1", "layout.kv_slots=300", "\0",
          "\ud800", "é", "a" * 300, "deadbeef0000", "embedded", "smollm2", "[]", "cuda:99",
          "sampling.temperature=1.0", "limits.max_rounds=1"]  # fmt: skip


@dataclass
class Case:
    """A command line with what stands around it."""

    kind: str
    words: list[str]
    stdin: str = ""
    environ: dict[str, str] = field(default_factory=dict)


def odd_input(draw: Random, number: int) -> Case:
    graph = draw.choice(["autoregressive", "autoregressive", "eagle", "bim_plain", "bim_dflash"])
    words = ["run", graph, "Why?", "--max-new-tokens", "2", "--no-tui"]
    kind = sorted(MAKERS)[number % len(MAKERS)]
    return MAKERS[kind](draw, kind, words)


def _prompt(draw: Random, kind: str, words: list[str]) -> Case:
    text = "".join(draw.choice(TEXTS) for _ in range(draw.choice([1, 1, 2, 3])))
    if draw.random() < 0.5:
        return Case(kind, [*words[:2], "-", *words[3:]], stdin=text)
    return Case(kind, [*words[:2], *words[3:], "--", text])


def _lines(draw: Random, kind: str, words: list[str]) -> Case:
    path = Path("odd.jsonl")
    lines = []
    for _ in range(draw.randrange(1, 4)):
        one = odd_json(draw)
        if draw.random() < 0.7:
            one = {"prompt": draw.choice(TEXTS), draw.choice(KEYS): odd_json(draw)}
        line = json.dumps(one, ensure_ascii=draw.random() < 0.5)
        lines.append(line[: draw.randrange(len(line) + 1)] if draw.random() < 0.2 else line)
    ends = draw.choice(["\n", "\r\n", "\n\n"])
    path.write_bytes(
        ends.join(lines).encode("utf-8", "replace") + draw.choice([b"", b"\xff", b"\0"])
    )
    return Case(kind, [*words[:2], *words[3:], "--prompts", str(path)])


def _flags(draw: Random, kind: str, words: list[str]) -> Case:
    for _ in range(draw.choice([1, 2])):
        words += [draw.choice(OPTIONS), draw.choice(VALUES)]
    return Case(kind, words)


def _documents(draw: Random, kind: str, words: list[str]) -> Case:
    path = Path(draw.choice(["odd.txt", "odd.jsonl"]))
    text = "\n".join(draw.choice(TEXTS) for _ in range(draw.randrange(4)))
    if path.suffix == ".jsonl" and draw.random() < 0.8:
        text = "\n".join(json.dumps(odd_json(draw)) for _ in range(3))
    path.write_bytes(text.encode("utf-8", "replace") + draw.choice([b"", b"", b"\xfe\xff"]))
    words[1] = draw.choice([words[1], "blend_eagle"])
    return Case(kind, [*words, "--document", str(path)])


def _outlines(draw: Random, kind: str, words: list[str]) -> Case:
    fields = [[1, 2, 3, 0, -1, 9, "x"], [60, 0, -5, "y", 10**9], ["-", "Search", "none", "?"]]
    fields += [["-", 1, 2, "1,2", 7], TEXTS]
    points = ["|".join(str(draw.choice(one)) for one in fields) for _ in range(draw.randrange(5))]
    text = "\n".join(
        [draw.choice(["PLAN", "DIRECT", "", "plan"]), *points, draw.choice(["END", ""])]
    )
    if draw.random() < 0.4:
        text = json.dumps([odd_json(draw) for _ in range(3)])
    path = Path(draw.choice(["odd.txt", "odd.json", "odd.yaml"]))
    path.write_bytes(text.encode("utf-8", "replace"))
    words[1] = draw.choice(["bim_plain", "bim_plain", "autoregressive"])
    return Case(kind, [*words, "--outline", str(path)])


def _variables(draw: Random, kind: str, words: list[str]) -> Case:
    names = [f"SPECSOT_{option[2:].replace('-', '_').upper()}" for option in OPTIONS]
    names += ["SPECSOT_GRAPH", "SPECSOT_PROMPT", "SPECSOT_QUIET", "SPECSOT_JSON"]
    names += ["NO_COLOR", "COLUMNS"]
    values = [value for value in VALUES if "\0" not in value and value.isprintable()]
    return Case(kind, words[:1] + words[3:], environ={draw.choice(names): draw.choice(values)})


def _settings(draw: Random, kind: str, words: list[str]) -> Case:
    keys = ["graph", "prompt", "model", "drafter_model", "device", "dtype", "seed", "threads",
            "max_new_tokens", "stop_ids", "profiles", "nothing"]  # fmt: skip
    text = "\n".join(
        f"{draw.choice(keys)}: {draw.choice(ODD)}" for _ in range(draw.choice([1, 1, 2]))
    )
    Path("specsot.yaml").write_bytes(text.encode() + draw.choice([b"", b"\n", b"\xff"]))
    return Case(kind, words[:1] + words[3:])


MAKERS: dict[str, Callable[[Random, str, list[str]], Case]] = {
    "prompt": _prompt,
    "lines": _lines,
    "flags": _flags,
    "documents": _documents,
    "outlines": _outlines,
    "variables": _variables,
    "settings": _settings,
}


# -- the loops ------------------------------------------------------------------------------------


def try_graph(draw: Random, number: int) -> tuple[Ended, list[str]]:
    """An odd graph through `check` and `run`, in the working directory. What `check` accepts runs,
    unless only the model can tell; what it refuses is refused alike."""
    Path("g.yaml").write_text(odd_graph(draw), encoding="utf-8", errors="replace")
    checked = command(["check", "g.yaml"])
    ran = command(["run", "g.yaml", "Why?", "--max-new-tokens", "3", "--no-tui"])
    wrong = checked.faults()
    if checked.code == Code.GRAPH and (ran.code, ran.out) != (Code.GRAPH, ""):
        wrong.append(f"refused by check, yet it ran: {ran.err[-300:]}")
    later = re.search(r"\[G[78]\d\d\]", ran.err)
    if checked.code == Code.OK and ran.code == Code.GRAPH and not later:
        wrong.append(f"accepted by check, refused by run: {ran.err[-300:]}")
    return ran, wrong


def try_input(draw: Random, number: int) -> tuple[Ended, list[str]]:
    Path("specsot.yaml").unlink(missing_ok=True)
    case = odd_input(draw, number)
    with patch.dict(os.environ, case.environ):
        ran = command(case.words, case.stdin)
    return ran, []


def try_all(
    one: Callable[[Random, int], tuple[Ended, list[str]]], numbers: range, seed: int
) -> Tally:
    """Each number in turn, with models that are loaded once for all of them."""
    tally = Tally()
    load, extend = cache(session.load_models), cache(session.with_drafter)
    with patch.multiple(session, load_models=load, with_drafter=extend):
        for number in numbers:
            ran, faults = one(Random(f"{seed}/{number}"), number)
            tally.ended[ran.code] += 1
            faults += [*ran.faults(), *_lost(ran)]
            tally.faults += [f"{one.__name__} {seed}/{number}: {fault}" for fault in faults]
    return tally


def _lost(ran: Ended) -> list[str]:
    if ran.code == Code.OK and "run folder" in ran.err and not ran.out.strip():
        folder = re.search(r"^run folder (\S+)", ran.err, re.M)
        kept = Path(folder[1], "outputs.jsonl").read_text(encoding="utf-8") if folder else ""
        texts = [json.loads(line)["text"] for line in kept.splitlines()]
        return [f"lost: {ran.words}"] if any(text.strip() for text in texts) else []
    return []
