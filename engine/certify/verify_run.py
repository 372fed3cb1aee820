"""`specsot verify-run`: a finished run's tokens held to plain transformers.

Nothing of specsot's decoding takes part: token ids come from the run's files, logits from one
forward of transformers over context and answer. If the likeliest token behind every beginning of an
answer is the answer's next one, then decoding token by token writes this answer.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...states.graph.blocks import Sampling
from ..bench.equal import TIE
from ..errors import Code, UsageError
from ..prepare.environment import model_folder, set_up_torch
from ..prepare.inputs import json_value, lines_of, read_text
from ..shell import exit_code, json_text, put
from ..terminal import working

SCHEMA = 1
EXACT = ("float32", "float64")  # in others tokens agree mostly, and nothing is promised


@dataclass(frozen=True, slots=True)
class DecodedText:
    """What was decoded behind one context.

    ended: the token behind it was a stop token. constrained: under the grammar of outlines.
    """

    name: str
    context: Sequence[int]
    tokens: Sequence[int]
    ended: bool
    constrained: bool = False


@dataclass(slots=True)
class Finding:
    """One branch's tokens: the target's own, numeric ties, the grammar's choice, or wrong.

    first: where the first wrong one stands and what the target says there.
    """

    name: str
    tokens: int = 0
    own: int = 0
    ties: int = 0
    grammar: int = 0
    wrong: int = 0
    first: str = ""

    @property
    def words(self) -> str:
        notes = [f"{self.own} of {self.tokens} tokens are the target's own"]
        notes += [f"{self.ties} ties"] if self.ties else []
        notes += [f"{self.grammar} chosen by the grammar"] if self.grammar else []
        notes += [f"{self.wrong} are not: {self.first}"] if self.wrong else []
        return f"{self.name}: {', '.join(notes)}"


@exit_code
def verify_command(folder: Path, as_json: bool, threads: int | None) -> int:
    """Hold every answer of a run folder to transformers; returns the exit code."""
    manifest = _object(folder / "manifest.json")
    lines = [
        json_value(line, str(folder)) for _, line in lines_of(read_text(folder / "outputs.jsonl"))
    ]
    try:
        written = [one for line in lines for one in written_by(line)]
        stops, dtype = set(manifest["models"]["target"]["stop_ids"]), manifest["dtype"]
        graph, target = manifest["graph"]["resolved"], manifest["models"]["target"]
        rules = Sampling.model_validate(graph["sampling"]).rules()
    except (KeyError, TypeError, ValidationError) as error:
        raise UsageError(f"{folder}: no run folder that can be verified: {error}") from None
    reasons = {
        "draws its tokens": not rules.greedy,
        "changes the target's scores": rules.greedy and not rules.plain,
        "searches beams": graph.get("beam") is not None,
        "may reuse rows that were not computed here": graph.get("blend") is not None,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise UsageError(f"{folder}: its graph {' and '.join(found)}: see `specsot certify`")
    with working(f"loading {target['name']} in transformers ...") as show:
        findings = list(
            _findings(target, dtype, threads or manifest["threads"], stops, written, show)
        )
    wrong = sum(one.wrong for one in findings)
    code = Code.UNEQUAL if wrong and dtype in EXACT else Code.OK if findings else Code.FAILED
    if as_json:
        rows = [asdict(one) for one in findings]
        put(
            json_text(
                {"schema_version": SCHEMA, "exit_code": code, "dtype": dtype, "branches": rows}
            )
        )
    else:
        put("".join(f"{line}\n" for line in _page(findings, dtype)))
    return code


def written_by(line: Mapping[str, Any]) -> Iterator[DecodedText]:
    """What one line of outputs.jsonl says was decoded; raises KeyError."""
    name = f"request {line['id']}"
    if line["outline_token_ids"]:
        ended = line["outline_finish_reason"] == "stop"
        outline = (line["outline_context_ids"], line["outline_token_ids"])
        yield DecodedText(f"{name}, outline", *outline, ended, constrained=True)
    combined = [] if line["combined"] is None else [line["combined"]]
    for part in (*line["parts"], *combined):
        if part["token_ids"] or part["finish_reason"] == "stop":
            title = f", part {part['index'] + 1}" if line["outline"] is not None else ""
            ended = part["finish_reason"] == "stop"
            yield DecodedText(f"{name}{title}", part["context_ids"], part["token_ids"], ended)


def _findings(
    target: Mapping[str, Any],
    dtype: str,
    threads: int,
    stops: set[int],
    written: Sequence[DecodedText],
    show: Any,
) -> Iterator[Finding]:
    from ...models.files import ModelError
    from ...models.load.checkpoint import model_hash
    from .workbench import Transformers

    folder = model_folder(target["name"], "target", dtype)
    if model_hash(folder) != target["hash"]:
        raise ModelError(folder, "is not the model of this run: its weights are others")
    set_up_torch(threads, "cpu")
    model = Transformers(folder, "cpu")
    for number, one in enumerate(written, 1):
        show(f"{one.name}, {number} of {len(written)} ...")
        yield _held(model, dtype, stops, one)


def _held(model: Any, dtype: str, stops: set[int], one: DecodedText) -> Finding:
    """One answer against the likeliest tokens behind its context and each of its own."""
    logits_QV = model.logits([*one.context, *one.tokens], dtype)[len(one.context) - 1 :].double()
    finding = Finding(one.name)
    end = [-1] if one.ended else []
    for place, (token, logits_V) in enumerate(zip((*one.tokens, *end), logits_QV, strict=False)):
        best = int(logits_V.argmax())
        chosen = max(stops, key=lambda stop: float(logits_V[stop])) if token < 0 else token
        margin = float(logits_V[best] - logits_V[chosen])
        finding.tokens += 1
        if best == chosen:
            finding.own += 1
        elif one.constrained:
            finding.grammar += 1
        elif margin < TIE:
            finding.ties += 1
        else:
            finding.first = finding.first or f"token {place + 1} is {chosen}, it says {best}"
            finding.wrong += 1
    return finding


def _page(findings: Sequence[Finding], dtype: str) -> Iterator[str]:
    total = Finding("all")
    for one in findings:
        yield one.words
        for name in ("tokens", "own", "ties", "grammar", "wrong"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
        total.first = total.first or f"{one.name}: {one.first}" if one.first else total.first
    yield total.words
    if dtype not in EXACT:
        yield f"in {dtype} nothing is promised; the share tells how far forwards agree"


def _object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise UsageError(f"{file}:{error.lineno}:{error.colno}: {error.msg}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{file}: no manifest")
    return value
