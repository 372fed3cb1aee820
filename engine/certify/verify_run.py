"""`specsot verify-run`: compare the token ids in the files of a run with plain transformers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.codes import FULL, is_exact
from ...models.files import ModelError
from ...models.load.weights import model_hash
from ...states.graph.graph import Sampling
from ...states.yaml.source import number_of
from ..bench.sides import TIE
from ..errors import Code, UsageError, first_line
from ..prepare.job import model_folder, set_up_torch
from ..record.run_folder import find_run
from ..run.scoring import Segments, segments_from
from ..shell import print_json, put, working

if TYPE_CHECKING:
    from .reference import Transformers


@dataclass(frozen=True, slots=True)
class DecodedText:
    """The decoded answer of one context. ended: with a stop token; constrained: by a grammar."""

    name: str
    context: Sequence[int]
    tokens: Sequence[int]
    ended: bool
    constrained: bool = False
    segments: Segments = ()


@dataclass(slots=True)
class Finding:
    """A branch's tokens: the target's, ties, the grammar's, wrong; first: the first wrong one."""

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
        notes += [number_of(self.ties, "tie")] if self.ties else []
        notes += [f"{self.grammar} chosen by the grammar"] if self.grammar else []
        notes += [f"{self.wrong} are not: {self.first}"] if self.wrong else []
        return f"{self.name}: {', '.join(notes)}"


def verify_command(ref: str, runs: Path, as_json: bool, threads: int | None) -> int:
    """Compare every answer of a saved run (`find_run`) with transformers; returns the exit code."""
    run = find_run(ref, runs)
    manifest = run.manifest
    try:
        target = manifest["models"]["target"]
        dtype = manifest["dtype"]
        weights = manifest.get("weights") or FULL
        texts = [*chain.from_iterable(map(decoded_texts, run.outputs.values()))]
        stops = set(target["stop_ids"])
        graph = manifest["graph"]["resolved"]
        rules = Sampling.model_validate(graph["sampling"]).rules()
        threads = threads or int(manifest["threads"])
    except (KeyError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else first_line(error)
        raise UsageError(f"{run.path}: cannot be verified: {reason}") from None
    reasons = {
        "draws its tokens": not rules.greedy,
        "changes the target's scores": rules.greedy and not rules.plain,
        "searches beams": graph.get("beam") is not None,
        "may reuse rows that were not computed here": graph.get("blend") is not None,
    }
    if refusals := [reason for reason, holds in reasons.items() if holds]:
        raise UsageError(f"{run.path}: its graph {' and '.join(refusals)}: see `specsot certify`")
    with working(f"loading {target['name']} in transformers ...") as show:
        from .reference import Transformers

        folder = model_folder(target["name"], "target", dtype)
        if model_hash(folder) != target["hash"]:
            raise ModelError(folder, "is not the model of this run: its weights are others")
        set_up_torch(threads, "cpu")
        model = Transformers(folder, "cpu", weights)
        findings = []
        for number, text in enumerate(texts, 1):
            show(f"{text.name}, {number} of {len(texts)} ...")
            findings.append(_compared(model, dtype, stops, text))
    exact = is_exact(dtype, weights)
    counts = ("tokens", "own", "ties", "grammar", "wrong")
    total = Finding("all", **{name: sum(getattr(f, name) for f in findings) for name in counts})
    code = Code.UNEQUAL if total.wrong and exact else Code.OK if findings else Code.FAILED
    if as_json:
        print_json(exit_code=code, dtype=dtype, branches=list(map(asdict, findings)))
        return code
    total.first = next((f"{one.name}: {one.first}" for one in findings if one.wrong), "")
    lines = [finding.words for finding in (*findings, total)]
    if not exact:
        lines += [f"in {dtype} nothing is promised; the share tells how far forwards agree"]
    put("".join(f"{line}\n" for line in lines))
    return code


def decoded_texts(line: Mapping[str, Any]) -> Iterator[DecodedText]:
    """What one line of outputs.jsonl says was decoded; raises KeyError, TypeError, ValueError."""
    name = f"request {line['id']}"
    if ids := line["outline_token_ids"]:
        ended = line["outline_finish_reason"] == "stop"
        context = line["outline_context_ids"]
        yield DecodedText(f"{name}, outline", context, ids, ended, constrained=True)
    word = "part" if line["outline"] is not None else "sample"
    several = word == "part" or len(line["parts"]) > 1
    combined = [] if line["combined"] is None else [line["combined"]]
    for part in (*line["parts"], *combined):
        ids = part["token_ids"]
        ended = part["finish_reason"] == "stop"
        if ids or ended:
            title = f"{name}, {word} {part['index'] + 1}" if several else name
            segments = segments_from(part.get("context_segments") or ())
            yield DecodedText(title, part["context_ids"] or (), ids, ended, segments=segments)


def _compared(model: "Transformers", dtype: str, stops: set[int], text: DecodedText) -> Finding:
    ids = (*text.context, *text.tokens)
    size = model.model(dtype).config.vocab_size
    if not text.context or not all(type(token) is int and 0 <= token < size for token in ids):
        raise UsageError(f"{text.name}: not token ids of this model after a context")
    if text.segments and sum(part.tokens for part in text.segments) != len(text.context):
        raise UsageError(f"{text.name}: its context is not that of its segments")
    logits_QV = model.logits(ids, dtype, text.segments)[len(text.context) - 1 :].double()
    finding = Finding(text.name)
    tokens = (*text.tokens, *([-1] if text.ended else []))
    for place, (token, logits_V) in enumerate(zip(tokens, logits_QV, strict=False), 1):
        best = int(logits_V.argmax())
        chosen = max(stops, key=lambda stop: float(logits_V[stop])) if token < 0 else token
        finding.tokens += 1
        if best == chosen:
            finding.own += 1
        elif text.constrained:
            finding.grammar += 1
        elif float(logits_V[best] - logits_V[chosen]) < TIE:
            finding.ties += 1
        else:
            finding.first = finding.first or f"token {place} is {chosen}, it says {best}"
            finding.wrong += 1
    return finding
