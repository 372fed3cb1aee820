"""`python -m tools.oracle record|check [--only PART]`: today's behaviour, frozen and compared.

`record` writes what the program does into `tests/golden/oracle/PART.json`; `check` performs the
same cases again and says for every part how many entries are equal, how many have changed for a
reason that `changes.yaml` names, and how many differ. The exit code is 0, or 5 if some differ."""

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import cases
from .compare import PARTS, judge
from .run import GOLDEN, ROOT, Case, Outcome, pack, perform, warm

TIMES = re.compile(r"seconds|tokens_per_second|overhead_share|^ops$")
BYTES = ("slot_bytes", "peak_bytes")  # they follow from the numbers of slots
MEMORY = ("host_reads", "kv", "prefix_cache")
HASHED = ("--full", "--mermaid", "schema", "/csv", "/perfetto")  # texts kept as their hash alone
TWINS = ("batching_", "paged_", "bim_blend_eagle", "blend_", "ddtree", "dflash", "eagle2")  # too
DERIVED = ("schema_version", "status", "padding_waste", "tokens_per_target_forward", "tau_request")
FIRST = 240  # characters of a line that is kept


def main() -> None:
    """Record or check the parts that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m tools.oracle", description=__doc__)
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("--only", metavar="PART", choices=PARTS, action="append")
    parser.add_argument("--force", action="store_true", help="let record overwrite")
    options = parser.parse_args()
    parts = tuple(options.only or PARTS)
    recorded = [part for part in parts if (GOLDEN / f"{part}.json").exists()]
    if options.action == "record" and recorded and not options.force:
        sys.exit(f"oracle: {', '.join(recorded)}: recorded already; --force overwrites")
    began = time.monotonic()
    warm()
    if options.action == "record" and "replay" in parts:
        perform(list(cases.kept_runs()), _keep)
    found = _found(parts)
    print(f"oracle: {time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.action == "check":
        sys.exit(judge(found))
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for part, entries in found.items():
        (GOLDEN / f"{part}.json").write_text(_one_a_line(entries), encoding="utf-8")
        print(f"{part}: {len(entries)} entries recorded")


def _found(parts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The entries of these parts as the program makes them now."""
    found: dict[str, dict[str, Any]] = {part: {} for part in parts}
    if "golden" in parts:
        found["golden"] = _hashes()

    def take(outcome: Outcome) -> list[Case]:
        part = outcome.case.part
        if part == "names":
            names = sorted(json.loads(outcome.out)["graphs"])
            return [*_wanted([*cases.runs(names), *cases.graphs(names)], parts)]
        found[part] |= TAKERS[part](outcome)
        return _deeper(outcome) if part == "cli" else []

    every = [*cases.served(), *cases.replays(), *cases.traces(), *cases.errors()]
    first = _wanted([*every, cases.pages_of_help()], parts)
    names = Case(part="names", key="list", words=["list", "--json"])
    perform([*first[:1], names, *first[1:]], take)
    return found


def _one_a_line(entries: Mapping[str, Any]) -> str:
    """A JSON object with one entry in every line."""
    kept = {"sort_keys": True, "ensure_ascii": False, "separators": (",", ":")}
    lines = [f"{json.dumps(key)}: {json.dumps(entries[key], **kept)}" for key in sorted(entries)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _wanted(every: Sequence[Case], parts: Sequence[str]) -> list[Case]:
    return [case for case in every if case.part in parts]


def _hash(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _hashes() -> dict[str, str]:
    """The hash of every golden file that is not the oracle's own."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "tests" / "golden").rglob("*")):
        if path.is_file() and GOLDEN not in path.parents:
            name = path.relative_to(ROOT).as_posix()
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


# -- what is kept of an outcome -------------------------------------------------------------------


def _keep(outcome: Outcome) -> list[Case]:
    if outcome.code:
        sys.exit(f"oracle: {outcome.case.key}: {outcome.err}")
    pack(folder=outcome.run, name=outcome.case.key)
    return []


def _run(outcome: Outcome) -> dict[str, Any]:
    """Tokens, words, work and memory of a run apart: one may change while another must not."""
    key = outcome.case.key
    said = [line for line in outcome.err.splitlines() if _steady(line)]
    if not (outcome.run / "metrics.json").exists():
        said = outcome.err.splitlines()[-3:] if outcome.code and not said else said
        text = {"code": outcome.code, "out": outcome.out.splitlines(), "said": said}
        return {f"{key}/said": text}
    digest = json.loads((outcome.run / "manifest.json").read_text())["digest"]
    metrics = _timeless(json.loads((outcome.run / "metrics.json").read_text()))
    lines = (outcome.run / "outputs.jsonl").read_text().splitlines()
    metrics = {name: value for name, value in metrics.items() if name not in DERIVED}
    moves = [row for row in _trace(outcome) if row["kind"] == "move"]
    tokens = {
        "code": outcome.code,
        "digest": digest,
        "answers": [_answer(json.loads(line)) for line in lines],
    }
    whole = [_hash(_timeless(json.loads(line))) for line in lines]
    words = {"out": _hash(outcome.out), "said": said, "whole": whole}
    memory = {name: metrics.pop(name) for name in MEMORY if name in metrics}
    metrics["states"] = {name: one["visits"] for name, one in metrics["states"].items()}
    metrics["way"] = _hash([_move(row) for row in moves])
    found = {"tokens": tokens, "said": words, "work": metrics, "memory": memory}
    return {f"{key}/{name}": entry for name, entry in found.items()}


def _answer(output: Mapping[str, Any]) -> dict[str, Any]:
    """The hash of the token ids of every part of an answer, and how each ended."""
    parts = [
        f"{_hash([part.get('context_ids'), part.get('token_ids')])}"
        f" {len(part.get('token_ids') or [])} {part.get('finish_reason')}"
        for part in output.get("parts") or []
    ]
    return {"id": output["id"], "finish": output.get("finish_reason"), "parts": parts}


def _timeless(value: Any) -> Any:
    """A document without its times."""
    if isinstance(value, list):
        return [_timeless(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = [name for name in value if not TIMES.search(name) and name not in BYTES]
    return {name: _timeless(value[name]) for name in kept}


def _steady(line: str) -> bool:
    """Whether a line of stderr is the same on every machine; a doubt about costs is not."""
    return line.startswith(("specsot: ", "warning: ")) and "drafting costs more" not in line


def _trace(outcome: Outcome) -> list[dict[str, Any]]:
    lines = (outcome.run / "trace.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _move(row: Mapping[str, Any]) -> str:
    guard = f" [{row['guard']}]" if row["guard"] else ""
    return f"{row['from']} -> {row['to']}{guard} +{row['committed']}"


def _way(outcome: Outcome) -> dict[str, Any]:
    """The states that a run passed, with the scheduler's reasons."""
    way: list[str] = []
    for row in _trace(outcome) if outcome.code == 0 else []:
        if row["kind"] == "move":
            way.append(_move(row))
        elif row["kind"] == "step":
            preempted = f" preempted {row['preempted']}" if row["preempted"] else ""
            chunks = f" chunks {row['chunks']}" if row["chunks"] else ""
            way.append(f"  {row['does']}: {row['why']} {row['starts']}{chunks}{preempted}")
    return {outcome.case.key: "\n".join(way or [f"code {outcome.code}", outcome.err])}


def _page(outcome: Outcome) -> dict[str, Any]:
    """What a command prints; of long texts their hash."""
    key, out = outcome.case.key, outcome.out
    part = outcome.case.part
    if part != "cli" and (key.endswith(HASHED) or (part == "graphs" and key.startswith(TWINS))):
        out = f"{len(out.splitlines())} lines, {_hash(out)}\n"
    elif key.endswith("/repeat"):
        said = [line for line in outcome.err.splitlines() if line.startswith(("digest", "specsot"))]
        out = "\n".join([_hash(out), *said, ""])
    if outcome.code:
        out = f"{out}{outcome.err[:FIRST]}"
    return {key: f"code {outcome.code}\n{out}"}


def _error(outcome: Outcome) -> dict[str, Any]:
    lines = outcome.err.splitlines()
    words = [line for line in lines if not line.startswith(("Usage:", "Try "))]
    first = next((line for line in words if line.strip()), "")
    return {outcome.case.key: f"{outcome.code}: {first[:FIRST]}"}


def _served(outcome: Outcome) -> dict[str, Any]:
    if outcome.code:
        return {"served": f"code {outcome.code}\n{outcome.err}"}
    told: dict[str, Any] = json.loads(outcome.out)
    return told


def _deeper(outcome: Outcome) -> list[Case]:
    """Cases for the commands that a page of help lists."""
    listed = re.search(r"^Commands:\n((?:  .*\n?)+)", outcome.out, re.M)
    names = re.findall(r"^  ([a-z-]+)", listed[1], re.M) if listed else []
    return [cases.pages_of_help((*outcome.case.words[:-1], name)) for name in names]


TAKERS = {
    "runs": _run,
    "trace": _way,
    "replay": _page,
    "errors": _error,
    "cli": _page,
    "openapi": _served,
    "graphs": _page,
}

if __name__ == "__main__":
    main()
