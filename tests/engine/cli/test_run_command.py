"""`specsot run` on tiny models: what it prints, keeps, repeats, and how it fails."""

import json
import re
import resource
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from specsot.engine.errors import Code
from specsot.engine.prepare.job import redact
from specsot.engine.run.core import STATUS_CODES, Status
from specsot.states.machine import Run

Patch = pytest.MonkeyPatch
FILES = {"manifest.json", "run.yaml", "trace.jsonl", "outputs.jsonl", "metrics.json", "summary.md"}
FILES |= {"prompts.jsonl"}


def test_the_answer_is_all_of_stdout(shell: Any) -> None:
    assert shell.run() == Code.OK
    assert shell.out.startswith("1. First [bold]thing\n\n")
    assert "2. Second" in shell.out and "3. Third" in shell.out
    assert "<|" not in shell.out and "tokens" not in shell.out
    assert f"digest {shell.digest}" in shell.err
    assert "tau_step" in shell.err and "outline: 3 parts" in shell.err
    assert " tokens/s, 1 thread\n" in shell.err
    assert shell.run(quiet=True) == Code.OK
    assert shell.out and not shell.err


def test_the_run_folder_tells_all_of_the_run(shell: Any) -> None:
    assert shell.run() == Code.OK
    assert {p.name for p in shell.latest.iterdir()} == FILES
    assert "-bim_eagle-" in shell.latest.resolve().name
    manifest = shell.read("manifest.json")
    assert manifest["status"] == "ok" and manifest["threads"] == 1 and manifest["seed"] == 0
    assert manifest["dtype"] == "float32" and manifest["argv"] == ["specsot", "run"]
    assert len(manifest["graph"]["hash"]) == 64 and len(manifest["models"]["target"]["hash"]) == 64
    assert {"python", "torch", "specsot"} <= set(manifest["versions"])
    for name in FILES:
        assert str(Path.home()) + "/" not in (shell.latest / name).read_text()
    records = shell.lines("trace.jsonl")
    assert {r["kind"] for r in records} == {"move", "op", "step", "round", "texts"}
    assert records[-1]["kind"] == "texts"
    moves = [r for r in records if r["kind"] == "move"]
    assert [m["step"] for m in moves] == list(range(1, len(moves) + 1))
    assert moves[0]["to"] == "schedule" and moves[-1]["to"] == "done"
    steps = [r for r in records if r["kind"] == "step"]
    assert [r["step"] for r in steps] == [*range(1, len(steps) + 1)]
    assert len(steps) == sum(move["to"] == "schedule" for move in moves)
    assert steps[0]["does"] == "open" and steps[0]["starts"] == ["1"] and steps[0]["why"]
    forwards = [r for r in records if r["kind"] == "op" and r["op"] == "target.forward_"]
    rounds = [r for r in records if r["kind"] == "round"]
    assert len(rounds) == len(forwards)
    assert all(len(r["branches"]) == len(r["committed"]) == len(r["accepted"]) for r in rounds)
    assert "float" in forwards[0]["shapes"]["logits"]
    found = shell.read("metrics.json")
    made = sum(len(p["token_ids"]) for line in shell.lines("outputs.jsonl") for p in line["parts"])
    assert found["tokens"] == made == sum(sum(r["committed"]) for r in rounds)
    assert found["target_forwards"] == len(rounds)
    assert found["host_reads"]["per_round"] == 1.0
    assert found["branch_rounds"] == sum(found["accepted_lengths"].values())
    assert 0 < found["overhead_share"] < 1
    assert found["kv"]["target"]["peak_slots"] <= 4096
    assert found["seconds"]["to_last_token"] <= found["seconds"]["total"]
    assert found["states"]["verify"]["visits"] > 0


def test_json_is_one_document(shell: Any) -> None:
    assert shell.run(as_json=True) == Code.OK
    found = json.loads(shell.out)
    assert found["schema_version"] == 1 and found["status"] == "ok"
    assert found["digest"] == shell.digest
    (answer,) = found["answers"]
    points = answer["outline"]["points"]
    assert [point["title"] for point in points] == ["First [bold]thing", "Second", "Third"]
    assert points[1]["depends_on"] == [1]
    assert [p["finish_reason"] for p in answer["parts"]] == ["length", "length", "stop"]
    assert found["metrics"]["tau_step"] > 1.0
    assert "PLAN" not in answer["text"] and "<|" not in shell.out


# -- repeating ------------------------------------------------------------------------------------


def edit(shell: Any, *changes: tuple[str, str]) -> None:
    file = shell.latest / "run.yaml"
    text = file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    file.write_text(text)


def test_a_run_repeats_itself(shell: Any) -> None:
    text = '1e-3 "x": on | 0o14\n  é 👨‍👩‍👧'
    assert shell.run(sets=("drafter.num_draft_tokens=5",), prompt=text) == Code.OK
    first, before = shell.digest, shell.latest.resolve()
    assert shell.repeat() == Code.OK and shell.latest.resolve() != before
    warnings = [line for line in shell.err.splitlines() if "warning: " in line]
    assert shell.digest == first and not [line for line in warnings if "drafting costs" not in line]
    manifest = json.loads((before / "manifest.json").read_text())
    assert shell.read("manifest.json")["graph"] == manifest["graph"]
    assert shell.repeat() == Code.OK and shell.digest == first


def test_a_repetition_names_what_changed_and_another_digest_is_code_5(shell: Any) -> None:
    assert shell.run() == Code.OK
    edit(shell, ("numpy: ", "numpy: 0."))
    assert shell.repeat(dtype="float64") == Code.OK
    assert "warning: dtype changed: float32 then, float64 now" in shell.err
    assert "warning: version of numpy changed" in shell.err
    assert shell.run() == Code.OK
    digest = shell.digest
    edit(shell, (digest, "f" * 64), ("model_hash: ", "model_hash: 0"))
    assert shell.repeat() == Code.UNEQUAL
    assert "warning: model weights changed" in shell.err
    assert f"the digest is {digest}, the repeated run had {'f' * 64}" in shell.err


def test_prompts_have_a_file_of_their_own(shell: Any) -> None:
    lines = [json.dumps({"id": f"q{i}", "prompt": f"Question {i}?"}) for i in range(2)]
    Path("q.jsonl").write_text("\n".join(lines))
    assert shell.run(prompt=None, prompts=Path("q.jsonl"), max_new_tokens=2) == Code.OK
    assert [line["id"] for line in shell.lines("prompts.jsonl")] == ["q0", "q1"]
    assert [line["id"] for line in shell.lines("outputs.jsonl")] == ["q0", "q1"]
    assert "[q0] Question 0?" in shell.out
    digest = shell.digest
    assert shell.repeat() == Code.OK and shell.digest == digest


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("specsot_run: 1", "specsot_run: 2", "specsot_run: must be 1"),
        ("prompts:", "promts:", "unknown key 'promts'; did you mean 'prompts'?"),
        ("kind: eagle3", "kind: eagel3", "no drafter 'eagel3'; did you mean 'eagle3'?"),
        ("device: cpu", "device: 5", "options"),
    ],
)
def test_a_broken_run_file_is_told_with_a_place(shell: Any, old: str, new: str, says: str) -> None:
    assert shell.run(max_new_tokens=2) == Code.OK
    edit(shell, (old, new))
    assert shell.repeat() in (Code.GRAPH, Code.USAGE)
    assert says in shell.err and "run.yaml" in shell.err


# -- failing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, code, says",
    [
        ({"graph": "bim_eagl"}, Code.GRAPH, "did you mean 'bim_eagle'?"),
        ({"sets": ("drafter.top_k=x",)}, Code.GRAPH, "--set drafter.top_k=x"),
        ({"sets": ("skeleton.template=nope",)}, Code.GRAPH, "no template 'nope'"),
        ({"dtype": "int8"}, Code.USAGE, "--dtype int8: must be"),
        ({"weights": "int5"}, Code.USAGE, "--weights int5: must be 'full', 'int8' or 'int4'"),
        ({"seed": -1}, Code.USAGE, "--seed -1: must be at least 0"),
        ({"prompt": "  "}, Code.USAGE, "prompt"),
        ({"prompt": "a", "prompts": Path("b")}, Code.USAGE, "not both"),
        ({"prompt": None, "prompts": Path("none.txt")}, Code.USAGE, "none.txt: cannot be read"),
        ({"outline": Path("none.txt")}, Code.USAGE, "none.txt"),
        ({"graph": "eagle"}, Code.USAGE, "has no skeleton"),
        ({"drafter_model": None}, Code.USAGE, "give --drafter-model"),
        ({"expect_digest": "xyz"}, Code.USAGE, "--expect-digest"),
        ({"step_delay": -1.0}, Code.USAGE, "--step-delay takes seconds, 0 to 3600"),
        ({"step_delay": float("nan")}, Code.USAGE, "--step-delay takes seconds, 0 to 3600"),
        ({"step_delay": 3601.0}, Code.USAGE, "--step-delay takes seconds, 0 to 3600"),
        ({"breaks": ("verfy",)}, Code.USAGE, "--break verfy: graph 'bim_eagle' has the states sch"),
        ({"breaks": ("verify",), "prompt": "-"}, Code.USAGE, "--break reads the keyboard"),
        ({"step": True, "prompt": "-"}, Code.USAGE, "--step reads the keyboard"),
        (
            {"probe_blend": True},
            Code.USAGE,
            "--probe-blend: graph 'bim_eagle' has no block `blend`",
        ),
        (
            {"graph": "beam", "drafter_model": None, "outline": None, "explain_rounds": True},
            Code.USAGE,
            "--explain-rounds: graph 'beam' has no rounds that verify drafts",
        ),
        ({"device": "cuda:99"}, Code.USAGE, "--device cuda:99"),
        ({"model": "no/where/at/all"}, Code.MODEL, "no/where/at/all"),
        ({"model": "/nowhere", "drafter_model": None}, Code.MODEL, "/nowhere: is not a folder"),
        ({"expect_digest": "0" * 64}, Code.UNEQUAL, "expected was"),
    ],
)
def test_every_failure_is_one_message(shell: Any, options: Any, code: Code, says: str) -> None:
    assert shell.run(**{"quiet": True, "max_new_tokens": 2, **options}) == code
    (line,) = shell.err.strip().split("\n")
    assert says in line and "Traceback" not in line


def test_a_refused_request_is_a_failure_that_keeps_the_others(shell: Any) -> None:
    big = '{"id": "big", "prompt": "Short?", "max_new_tokens": 5000}\n'
    Path("q.jsonl").write_text('{"id": "ok", "prompt": "Short?"}\n' + big)
    options = {"prompt": None, "prompts": Path("q.jsonl"), "quiet": True}
    assert shell.run(**options, sets=("layout.kv_slots=600",)) == Code.FAILED
    assert "request big refused: needs" in shell.err and "the pool has 600" in shell.err
    first, second = shell.lines("outputs.jsonl")
    assert first["text"] and second["finish_reason"] == "refused"


def test_one_is_singular(shell: Any) -> None:
    assert shell.run(graph="eagle", outline=None, max_new_tokens=1) == Code.OK
    assert "answer: 1 token, length\nok: 1 token, " in re.sub(r" +\d+\.\d s  ", "", shell.err)
    assert shell.run(sets=("limits.max_rounds=1",)) == Code.FAILED
    assert "stopped after 1 round (limits.max_rounds)" in shell.err


def test_the_round_limit_ends_a_run(shell: Any) -> None:
    assert shell.run(sets=("limits.max_rounds=2",)) == Code.FAILED
    assert "stopped after 2 rounds (limits.max_rounds)" in shell.err
    assert shell.read("manifest.json")["status"] == "limit"
    assert shell.read("metrics.json")["rounds"] == 2


def at_a_move(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    advance, moves = Run.advance, count(1)

    def acts(run: Run) -> None:
        if next(moves) == 12:
            action()
        advance(run)

    monkeypatch.setattr(Run, "advance", acts)


def test_a_fault_keeps_what_was_made(shell: Any, monkeypatch: Patch) -> None:
    fails = Mock(side_effect=RuntimeError("boom\nsecond line"))
    at_a_move(monkeypatch, fails)
    assert shell.run(quiet=True) == Code.FAILED
    first, second = shell.err.strip().split("\n")
    assert first == "specsot: RuntimeError: boom" and "traceback.txt" in second
    assert "boom" in (shell.latest / "traceback.txt").read_text()
    assert shell.read("manifest.json")["status"] == "failed"
    assert shell.lines("outputs.jsonl")[0]["parts"][0]["token_ids"]
    assert {p.name for p in shell.latest.iterdir()} > FILES


def test_ctrl_c_keeps_what_was_made(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at_a_move(monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    assert shell.run() == Code.INTERRUPTED
    assert shell.read("manifest.json")["status"] == Status.INTERRUPTED
    parts = shell.lines("outputs.jsonl")[0]["parts"]
    assert any(p["finish_reason"] == "cancelled" and p["token_ids"] for p in parts)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert "interrupted:" in shell.err


def test_a_folder_that_cannot_be_written(shell: Any) -> None:
    Path("file").write_text("")
    assert shell.run(runs_dir=Path("file"), quiet=True) == Code.FAILED
    assert "see --runs-dir" in shell.err and "2. Second" in shell.out, "the answer comes first"
    assert shell.run(runs_dir=Path("file"), expect_digest="0" * 12) == Code.UNEQUAL
    assert shell.err.count("see --runs-dir") == 1 and "expected was" in shell.err


def test_a_pool_that_does_not_fit_is_refused(shell: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr("specsot.engine.models.free_memory", lambda: 1_000_000)
    assert shell.run(sets=("layout.kv_slots=4000000",)) == Code.GRAPH
    assert "layout.kv_slots: keys and values of 4000000 slots take " in shell.err
    assert " GB, 0.001 are free" in shell.err and "fault of" not in shell.err
    monkeypatch.setattr("specsot.engine.models.free_memory", lambda: 13_000_000)
    assert shell.run(sets=("layout.kv_slots=6000",)) == Code.GRAPH, "each of the pools fits alone"
    assert (
        "layout.kv_slots: keys and values of all pools take 0.014 GB, 0.013 are free" in shell.err
    )


def test_a_limit_of_the_address_space_is_free_memory(shell: Any) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 900_000_000, most))
    try:
        assert shell.run(sets=("layout.kv_slots=900000",)) == Code.GRAPH
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))
    assert re.search(r"900000 slots take \d\.\d+ GB, \d\.\d+ are free", shell.err)


def test_redacting_hides_the_home_directory() -> None:
    assert redact(f"{Path.home()}/models/x") == "~/models/x"
    assert STATUS_CODES.keys() >= set(Status) - {Status.RUNNING}
