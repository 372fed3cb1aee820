"""`specsot certify`: good graphs pass, planted faults are caught by the check that is for them."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.commands import certify_command
from helpers.pages import ROOT
from scipy.stats import chi2
from torch import Tensor

from specsot.engine.certify import gates, reference, texts
from specsot.engine.certify.certificate import bench_of, prepared_job, with_table
from specsot.engine.certify.reference import Bench, Check, Transformers
from specsot.engine.errors import Code
from specsot.engine.prepare.options import RunOptions
from specsot.engine.run.scoring import ContextSegment, contexts
from specsot.models.load.weights import model_hash
from specsot.ops.verify import rejection as accept_rejection
from specsot.ops.verify import verify
from specsot.ops.verify.rejection import Acceptance
from specsot.states import commit as committer
from specsot.states.drafters.eagle import EagleDrafter
from specsot.states.graph.graph import Sampling
from specsot.states.prefix_cache import PrefixCache
from specsot.states.request import Branch, Finish
from specsot.states.round import CommittedRows

Patch = pytest.MonkeyPatch
Output = pytest.CaptureFixture[str]

FEWER = {"prompts": 2, "tokens": 8, "drawn_prompts": 1, "seeds": 1, "drawn_tokens": 6}
TINY = replace(reference.QUICK, **FEWER, answers=400, gate_tokens=12)
REJECTING = ("sampling.temperature=1.0", "sampling.accept=rejection")


@pytest.fixture
def options(tiny: tuple[Path, Path], tmp_path: Path, monkeypatch: Patch) -> RunOptions:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reference, "QUICK", TINY)
    Path("o.txt").write_text("PLAN\n1|60|-|-|First\n2|60|-|1|Second\nEND\n")
    Path("q.txt").write_text("How do bees make honey?\nWhat is a lake?\nWhy?\nHow?\n")
    return RunOptions(
        prompts=Path("q.txt"),
        model=str(tiny[0]),
        drafter_model=str(tiny[1]),
        outline=Path("o.txt"),
        threads=1,
    )


Make = Callable[..., Bench]


@pytest.fixture
def bench(options: RunOptions) -> Make:
    def make(graph: str = "bim_eagle", *sets: str) -> Bench:
        outline = options.outline if graph.startswith(("bim", "batching", "paged")) else None
        drafter = None if graph == "autoregressive" else options.drafter_model
        own = replace(options, sets=sets, outline=outline, drafter_model=drafter)
        return bench_of(prepared_job(graph, own), True, lambda text: None)

    return make


def failed(checks: Sequence[Check]) -> set[str]:
    return {check.name for check in checks if not check.passed}


# -- good graphs --------------------------------------------------------------------------------


def test_a_good_graph_gets_its_certificate(
    options: RunOptions, tiny: tuple[Path, Path], capsys: Output, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(reference, "QUICK", replace(TINY, gate_tokens=20))  # rows run out
    assert certify_command(("bim_eagle",), options, quick=True, out=Path("one")) == Code.OK
    out, err = capsys.readouterr()
    assert "bim_eagle: lossless: all" in err
    for text in (out, Path("one/bim_eagle.json").read_text()):
        assert not re.search(r"20\d\d-\d\d|\d\d:\d\d", text), "no dates"
    made = json.loads(Path("one/bim_eagle.json").read_text())
    assert made["schema_version"] == 1 and made["passed"] and made["exit_code"] == 0
    assert made["models"]["target"]["hash"] == model_hash(tiny[0])
    assert made["models"]["drafter"]["hash"] == model_hash(tiny[1])
    assert len(made["resolved"]["hash"]) == 64 and made["dtype"] == "float32"
    assert [part["name"] for part in made["parts"]] == ["greedy", "sampled", "rejection", "gates"]
    assert "match what the target draws" in made["parts"][2]["not_applicable"]
    assert "tests/laws" in made["notes"][0]
    checks = {check["name"]: check for part in made["parts"] for check in part["checks"]}
    assert all(check["passed"] for check in checks.values())
    assert checks["greedy/teacher forcing"]["figures"]["tokens"] > 20
    assert checks["gates/an end inside an accepted path"]["figures"]["inside"] > 0
    assert checks["gates/top_k is applied"]["figures"]["outside_without"] > 0
    assert checks["gates/top_p is applied"]["figures"]["outside_without"] > 0
    assert checks["memory/the drafter's rows"]["figures"]["branches"] > 50
    assert "**lossless: all" in out and made["resolved"]["hash"] in out
    assert "FAILED" not in out and "--quick" in out
    assert all(
        f"passed: {name.partition('/')[2]}: {checks[name]['text']}\n" in out for name in checks
    )
    assert Path("one/README.md").read_text() == with_table(Path("one"))


def test_the_table_of_a_folder_has_its_certificates_and_keeps_the_text_above(
    tmp_path: Path,
) -> None:
    for file in ("bim_eagle", "beam"):
        copy(ROOT / f"docs/certificates/{file}.json", tmp_path)
    for name, text in {"other": '{"graph": "x"}', "list": "[]", "broken": "{"}.items():
        (tmp_path / f"{name}.json").write_text(text)
    first = with_table(tmp_path)
    assert first.startswith("# Certificates\n\n| graph | layout | drafter |")
    bare, eagle = first.splitlines()[-2:]
    assert bare.startswith("| [beam](beam.json) | bim | none | greedy | 7 of 7 | 0 | 528 | 0 |")
    assert eagle.startswith(
        "| [bim_eagle](bim_eagle.json) | bim | eagle3 | greedy | 24 of 24 | 0 |"
    )
    assert "| 3471 | 7334 |" in eagle
    table = first.partition("\n\n")[2]
    (tmp_path / "README.md").write_text(f"# Mine\n\nText | with bars.\n\n{table}")
    (tmp_path / "beam.json").unlink()
    document = json.loads((tmp_path / "bim_eagle.json").read_text())
    document["parts"][0]["checks"][0]["passed"] = False
    (tmp_path / "bim_eagle.json").write_text(json.dumps(document))
    again = with_table(tmp_path)
    assert again.startswith("# Mine\n\nText | with bars.\n\n| graph |") and "beam" not in again
    assert again.count("| graph |") == 1 and "| 23 of 24 |" in again


@pytest.mark.parametrize("graph", ["beam", "autoregressive"])
def test_graphs_without_a_drafter_pass(graph: str, options: RunOptions, capsys: Output) -> None:
    plain = replace(options, drafter_model=None, outline=None, as_json=True, dtype="float64")
    assert certify_command((graph,), plain, quick=True) == Code.OK
    (made,) = json.loads(capsys.readouterr().out)["certificates"]
    assert made["passed"] and made["numeric_ties"] == 0 and "drafter" not in made["models"]
    names = {part["name"]: part["not_applicable"] for part in made["parts"]}
    assert ("beam" in names) == bool(names["sampled"]) == (graph == "beam")
    assert names["rejection"] and "tests/laws" not in str(made["notes"]), "nothing is drafted"


# -- planted faults -----------------------------------------------------------------------------


def test_a_graph_that_skips_the_adjustment_fails(
    options: RunOptions, capsys: Output, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(gates, "GATES", {})  # the good graph is held to them
    sets = (*REJECTING, "sampling.skip_sample_adjustment=true")
    given = replace(options, sets=sets, outline=None, as_json=True)
    assert certify_command(("eagle",), given, quick=True) == Code.UNEQUAL
    out, err = capsys.readouterr()
    (made,) = json.loads(out)["certificates"]
    assert not made["passed"] and not made["resolved"]["lossless"] and made["exit_code"] == 5
    wrong = {c["name"] for part in made["parts"] for c in part["checks"] if not c["passed"]}
    assert wrong == {"rejection/adjusted", "rejection/whole runs"}
    assert "eagle: NOT lossless" in err and "rejection/adjusted FAILED" in err


def unadjusted(p_STV: Tensor, *rest: Any, u_ST: Tensor, **named: Any) -> Acceptance:
    """The bonus is drawn from the target's row, and not from the residual."""
    verdict = ACCEPT_TREE(p_STV, *rest, u_ST=u_ST, **named)
    row_S = torch.arange(len(p_STV))
    last_S = (verdict.path_ST * torch.arange(p_STV.shape[1])).argmax(1)
    weights_SV = p_STV[row_S, last_S]
    u_S = u_ST[row_S, last_S]
    bonus_S = accept_rejection.inverse_cdf(weights_SV, u_S)
    return replace(verdict, bonus_S=bonus_S, weights_SV=weights_SV)


ACCEPT_TREE = accept_rejection.accept_tree


def test_a_bonus_not_drawn_from_the_residual_is_caught(bench: Make, monkeypatch: Patch) -> None:
    rejecting = bench("eagle", *REJECTING)
    assert not failed(list(texts.acceptance_checks(rejecting)))
    monkeypatch.setattr(accept_rejection, "accept_tree", unadjusted)
    assert failed(list(texts.acceptance_checks(rejecting))) == {"rejection/whole runs"}


def test_an_end_missed_inside_an_accepted_path_is_caught(bench: Make, monkeypatch: Patch) -> None:
    """Only the last token of a path is looked at."""
    good = committer.append_tokens

    def careless(branch: Branch, tokens: Sequence[int]) -> int:
        stops, branch.request.stop_ids = branch.request.stop_ids, frozenset()
        taken = good(branch, tokens[:-1])
        branch.request.stop_ids = stops
        return taken if branch.finish else taken + good(branch, tokens[-1:])

    rig, gate = gates.Rig(bench()), gates.GATES["an end inside an accepted path"]
    assert rig.free and not gate(rig)[2]
    monkeypatch.setattr(committer, "append_tokens", careless)
    _, figures, wrong = gate(rig)
    assert wrong and "stop token" in wrong[0], figures


def test_settings_without_effect_are_caught(bench: Make, monkeypatch: Patch) -> None:
    """The gate of the scheduler's settings fails if what they are for never happens."""
    gate = gates.GATES["the scheduler's settings"]
    rig = gates.Rig(bench("autoregressive"))
    _, figures, wrong = gate(rig)
    counts = ("chunks", "reused tokens", "evicted rows", "preemptions")
    assert not wrong and all(figures[name] > 0 for name in counts)
    with monkeypatch.context() as patch:
        patch.setattr(gates, "_crowded", lambda free: (4096, ()))
        assert gate(rig)[2] == ["no evicted rows", "no preemptions"]
    monkeypatch.setattr(PrefixCache, "reusable", lambda self, *arguments, **named: 0)
    schedules = [(policy, 1024, *rest) for policy, _, *rest in gates.SCHEDULES]
    monkeypatch.setattr(gates, "SCHEDULES", schedules)
    assert {"no chunks", "no reused tokens"} <= set(gate(rig)[2])


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_a_stale_drafter_row_is_caught(layout: str, bench: Make, monkeypatch: Patch) -> None:
    """Each accepted token's feature is the one of the token before it: worse drafts, same text.
    Without the fault all is well, and `batching` alone copies what branches share."""
    good = EagleDrafter.observe
    rig = gates.Rig(bench(f"{layout}_eagle"))
    assert not gates.GATES["newcomers"](rig)[2]
    checks = list(gates.memory_checks(rig))
    assert not failed(checks) and (rig.seen["forked"] > 0) == (layout == "batching")

    def stale(self: EagleDrafter, part: CommittedRows) -> None:
        good(self, part)
        last = self.inbox[-1] if self.inbox else None
        if part.is_path and last is not None and len(last.tokens) > 1:
            assert last.features is not None
            kept = torch.cat([last.features[:1], last.features[:-1]])
            self.inbox[-1] = replace(last, features=kept)

    monkeypatch.setattr(EagleDrafter, "observe", stale)
    rig = gates.Rig(rig.bench)
    assert not gates.GATES["nothing but the budget"](rig)[2], "the text is the same"
    assert failed(list(gates.memory_checks(rig))) == {"memory/the drafter's rows"}


def test_a_drafter_row_that_is_missing_is_caught(bench: Make, monkeypatch: Patch) -> None:
    good = EagleDrafter.observe

    def missing(self: EagleDrafter, part: CommittedRows) -> None:
        good(self, part)
        last = self.inbox[-1] if self.inbox else None
        if part.is_path and last is not None:
            self.inbox[-1] = replace(last, position=last.position + 1)

    monkeypatch.setattr(EagleDrafter, "observe", missing)
    rig = gates.Rig(bench())
    gates.GATES["budgets"](rig)
    assert rig.worst == float("inf") and failed(list(gates.memory_checks(rig)))


def test_an_accepted_path_that_is_too_long_is_caught(bench: Make, monkeypatch: Patch) -> None:
    """Every path is taken to be accepted one node further than it is."""
    good = verify._longest_path
    monkeypatch.setattr(verify, "_longest_path", lambda agrees, *rest: good(agrees | True, *rest))
    made = bench()
    assert {"greedy/teacher forcing"} <= failed(list(texts.greedy_checks(made)))
    assert any(name.endswith("/twin") for name in failed(list(texts.sampled_checks(made))))
    assert "blended/prompt" in failed(list(texts.blended_checks(bench("blend_eagle"))))


BLENDED = {"blended/prefix", "blended/branches"}


def test_documents_that_are_reused_are_certified(bench: Make) -> None:
    checks = {check.name: check for check in texts.blended_checks(bench("bim_blend_eagle"))}
    assert not failed(list(checks.values()))
    assert set(checks) == BLENDED | {f"{name}, nothing reused" for name in BLENDED}
    for figures in (checks[name].figures for name in BLENDED):
        assert figures["reused"] > 100 and 0 < figures["recomputed"] < figures["reused"]
    assert " of them recomputed" in checks["blended/branches"].text


def test_folded_parts_are_certified_on_their_blended_cache(bench: Make) -> None:
    made = bench("bim_blend_merge", "blend.min_tokens=8")  # parts are short here
    checks = {check.name: check for check in texts.blended_checks(made)}
    assert not failed(list(checks.values()))
    combined = checks["blended/combined"]
    assert combined.figures["reused"] > 10 and "finished parts folded" in combined.text


@pytest.mark.parametrize(
    "graph, proven_by",
    [
        ("blend_eagle", {"blended/prompt"}),
        ("bim_blend_eagle", BLENDED),
        ("bim_blend_merge", BLENDED | {"blended/combined"}),
    ],
)
def test_nothing_reused_proves_nothing(graph: str, proven_by: set[str], bench: Make) -> None:
    assert failed(list(texts.blended_checks(bench(graph, "blend.min_tokens=4000")))) == proven_by


@pytest.mark.parametrize("name", ["top_k", "top_p"])
def test_a_filter_that_is_not_applied_is_caught(name: str, bench: Make, monkeypatch: Patch) -> None:
    made = bench()
    rules = Sampling.rules
    loose = {name: 0 if name == "top_k" else 1.0}
    monkeypatch.setattr(Sampling, "rules", lambda self: replace(rules(self), **loose))
    assert [one for one in gates.FILTERS if gates.filter_gate(made, one)[2]] == [name]


def test_a_run_that_dies_fails_its_gate(bench: Make, monkeypatch: Patch) -> None:
    def die(*given: Any) -> int:
        raise IndexError("planted")

    monkeypatch.setattr(committer, "append_tokens", die)
    checks = [check for check in gates.gate_checks(bench()) if not check.passed]
    assert "the run died" in checks[0].text and "planted" in checks[0].text


# -- the teacher --------------------------------------------------------------------------------


def test_a_token_that_is_not_the_targets_own_a_stop_inside_and_a_wrong_length_are_told(
    bench: Make, monkeypatch: Patch
) -> None:
    """It is a tie only with a small margin, and if float64 agrees."""
    made = bench("autoregressive")
    side = made.side(made.changed(texts.GREEDY, tokens=8))
    (one,) = made.answers([side], made.prompts[:1])
    branch, context = next(iter(contexts(one.runs["A"].requests[0], side.session.prompts)))
    tally = made.tally()
    tally.hold_branch(branch, context, None)
    assert tally.good and tally.tokens == len(branch.tokens)
    branch.tokens[3] += 1
    tally.hold_branch(branch, context, lambda: True)
    assert tally.ties == 0 and len(tally.wrong) == 1 and "token 4 is" in tally.wrong[0]
    monkeypatch.setattr(reference, "TIE", 1e9)
    tally.hold_branch(branch, context, lambda: False)
    assert tally.ties == 0 and len(tally.wrong) == 2, "float64 says otherwise"
    tally.hold_branch(branch, context, lambda: True)
    assert tally.ties == 1 and len(tally.wrong) == 2
    branch.tokens[3] -= 1
    branch.finish = Finish.LENGTH
    del branch.tokens[-1:]
    assert "the budget is" in str(made.tally().first_wrong(branch, context))
    branch.tokens[2] = min(branch.request.stop_ids)
    assert "inside the answer at 3" in str(made.tally().first_wrong(branch, context))


def test_the_same_run_in_float64_holds(bench: Make) -> None:
    made = bench("bim_eagle")
    repeat = made.repeated(made.side(made.changed(texts.GREEDY, tokens=8)), made.prompts[0])
    assert repeat()


# -- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "graphs, more, code, says",
    [
        ((), {}, Code.USAGE, "name the graphs to certify, or give --all"),
        (("bim_eagle",), {"every": True}, Code.USAGE, "or give --all"),
        (("bim_eagel",), {}, Code.GRAPH, "did you mean"),
        (("bim_eagle",), {"out": Path("q.txt/in")}, Code.USAGE, "no folder can be made there"),
        (("bim_eagle",), {"dtype": "bfloat16"}, Code.USAGE, "--dtype bfloat16"),
    ],
)
def test_wrong_usage_is_one_message(
    graphs: tuple[str, ...], more: Any, code: Code, says: str, options: RunOptions, capsys: Output
) -> None:
    options = replace(options, dtype=more.pop("dtype", None))
    assert certify_command(graphs, options, quick=True, **more) == code
    assert says in capsys.readouterr().err


def test_a_model_that_transformers_cannot_load_is_told(
    options: RunOptions, capsys: Output, monkeypatch: Patch
) -> None:
    from transformers import AutoModelForCausalLM

    def refuse(*given: Any, **more: Any) -> Any:
        raise ValueError("unknown architecture")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    assert certify_command(("bim_eagle",), options, quick=True) == Code.MODEL
    assert "transformers cannot load it" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["mistral", "phi3", "qwen3_moe", "gemma3_text"])
def test_a_context_of_segments_has_the_models_windows(family: str, tmp_path: Path) -> None:
    more = {"sliding_window": 5, "use_sliding_window": True}
    folder = tiny.write_tiny_target(tmp_path, family, context=2.0, extra=more)
    model = Transformers(folder, "cpu")
    ids = list(range(3, 27))
    whole = (ContextSegment(tokens=len(ids), position=0),)
    plain, segmented = model.logits(ids, "float32"), model.logits(ids, "float32", whole)
    torch.testing.assert_close(segmented, plain, atol=1e-5, rtol=1e-5)


# -- the chi-square test -----------------------------------------------------------------------


def test_p_values() -> None:
    for df, alpha in product((3, 7, 15, 63, 255), (1e-3, 1e-4, 1e-6, 1e-9)):
        assert texts.p_value(float(chi2.isf(alpha, df)), df) == pytest.approx(alpha, rel=1e-6)
        assert texts.p_value(0.0, df) == 1 and texts.p_value(float("inf"), df) == 0


def test_cells_that_are_rarely_met_are_counted_together_and_impossible_ones_fail() -> None:
    expected_X = torch.tensor([40.0, 3.0, 50.0, 1.0, 6.0, 0.0], dtype=torch.float64)
    seen_X = torch.tensor([44.0, 1.0, 48.0, 0.0, 7.0, 0.0], dtype=torch.float64)
    statistic, df = texts.chi_square(seen_X, expected_X)  # 1 + 3 are too few: the 6 joins them
    assert df == 2
    assert statistic == pytest.approx(4**2 / 40 + 2**2 / 50 + 2**2 / 10)
    seen_X, expected_X = torch.tensor([99.0, 1.0]), torch.tensor([100.0, 0.0])
    assert texts.chi_square(seen_X, expected_X)[0] == float("inf")
