"""`specsot compare`: equal tokens are proven equal, planted differences are found and placed."""

import json
import signal
from dataclasses import replace
from functools import partial
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import pytest
from helpers.support import contexts as contexts_by_hand

from specsot.engine.bench import sides as compare_equal
from specsot.engine.bench import sides as compare_sides
from specsot.engine.bench.command import compare_command, prepare_all
from specsot.engine.bench.comparison import Comparison, compare_jobs
from specsot.engine.bench.experiment import read_side
from specsot.engine.bench.render import WIDTH, comparison_parts, rendered
from specsot.engine.bench.sides import (
    CUT,
    END,
    BranchAnswer,
    BranchComparison,
    Side,
    compare_branches,
    counts,
    pairs_of,
)
from specsot.engine.errors import Code
from specsot.engine.prepare.inputs import Prompt, Prompts
from specsot.engine.prepare.job import prepare
from specsot.engine.prepare.options import RunOptions
from specsot.engine.prepare.repeat import graph_yaml
from specsot.engine.run.api import tie
from specsot.engine.run.core import Status
from specsot.engine.run.scoring import contexts, next_scores
from specsot.states.machine import Run
from specsot.states.request import Branch, Finish

Patch = pytest.MonkeyPatch
Output = pytest.CaptureFixture[str]

GRAPHS = ("bim_plain", "bim_eagle", "autoregressive", "eagle")
PROMPTS = Prompts(
    (
        Prompt("plan [1]", "Make a plan for a weekend camping trip."),
        Prompt("bees", "How do honey bees make honey?"),
    )
)


@pytest.fixture(scope="module")
def found() -> Comparison:
    jobs = prepare_all(GRAPHS, RunOptions(threads=1, max_new_tokens=6), PROMPTS)
    return compare_jobs(jobs)


def shown(found: Comparison, stream: TextIO) -> str:
    return rendered(partial(comparison_parts, found), stream)


def settings_column(out: str) -> str:
    table = out[: out.index("(equal: branches")].splitlines()
    (header,) = (line for line in table if "settings" in line)
    column = slice(header.index("settings"), header.index("file"))
    return "".join(line[column].strip() for line in table)


def again(found: Comparison) -> Comparison:
    pairs = pairs_of(found.sides)
    branches = ([b for pair in pairs for b in compare_branches(pair, one)] for one in found.prompts)
    prompts = [replace(one, results=b) for one, b in zip(found.prompts, branches, strict=True)]
    return Comparison(Status.OK, found.sides, pairs, prompts)


def branch_of(found: Comparison, prompt: int, side: int, index: int) -> Branch:
    request = found.prompts[prompt].runs["ABCD"[side]].request
    branch = request.root if index < 0 else request.branches[index]
    assert branch is not None
    return branch


def planted(found: Comparison, patch: Patch, branch: Branch, **values: Any) -> Comparison:
    """The comparison judged again, with other values of a branch."""
    for name, value in values.items():
        patch.setattr(branch, name, value)
    return again(found)


def verdict_of(
    found: Comparison, prompt: int, pair: tuple[str, str], branch: str
) -> BranchComparison:
    """What became of one branch on two sides, given by their letters."""
    of_prompt = found.of(found.prompts[prompt]).results
    letters = [(one.pair.reference.letter, one.pair.other.letter) for one in of_prompt]
    (result,) = [
        one
        for one, sides in zip(of_prompt, letters, strict=True)
        if sides == pair and one.branch == branch
    ]
    return result


# -- equal --------------------------------------------------------------------------------------


def test_graphs_that_promise_the_same_tokens_give_them(found: Comparison) -> None:
    assert found.code == Code.OK and not found.differences and not found.problems
    compared = [(p.reference.name, p.other.name) for p in found.pairs if not p.why_not]
    assert compared == [("bim_plain", "bim_eagle"), ("autoregressive", "eagle")]
    for pair in found.pairs:
        if not pair.why_not:
            number = counts(found.branches(pair))
            assert number["equal"] == number["branches"] > 0 and number["equal_tokens"] > 0
    assert {v.branch for v in found.branches(found.pairs[0])} >= {"outline", "1", "2", "3"}
    (left,) = [pair for pair in found.pairs if pair.why_not]
    assert (left.reference.name, left.other.name) == ("bim_plain", "autoregressive")
    assert left.why_not.startswith("C has no skeleton")


def test_models_are_loaded_once(found: Comparison) -> None:
    one, two, three, four = [side.session.models for side in found.sides]
    assert one is three and two is four
    assert one.target is two.target and one.drafter is None and two.drafter is not None


def test_contexts_are_those_that_the_lossless_tests_put_together(found: Comparison) -> None:
    for prompt in found.prompts:
        for side in found.sides:
            request, book = prompt.runs[side.letter].request, side.session.prompts
            plain = side.job.program.graph.skeleton is None
            assert list(contexts(request, book)) == contexts_by_hand(request, book, plain)


def test_the_target_by_itself_says_the_next_token(found: Comparison) -> None:
    side, request = found.sides[1], found.prompts[0].runs["B"].request
    for branch, context in contexts(request, side.session.prompts):
        if branch.matcher is None:
            scores_V = next_scores(side.session.models, branch, context, 4)
            assert int(scores_V.argmax()) == branch.tokens[4]


# -- figures ------------------------------------------------------------------------------------


def test_totals_are_sums_and_peaks_the_largest(found: Comparison) -> None:
    costs = [prompt.runs["B"] for prompt in found.prompts]
    whole, meters = found.total(found.sides[1]), [cost.meter for cost in costs]
    assert whole.meter.tokens == sum(m.tokens for m in meters) > 0
    assert whole.meter.tau_step == pytest.approx(
        sum(n * count for m in meters for n, count in m.lengths.items())
        / sum(m.branch_rounds for m in meters)
    )
    peaks = [cost.pools["target"].peak_bytes for cost in costs]
    assert whole.pools["target"].peak_bytes == max(peaks)
    assert whole.meter.nanos["verify"] == sum(m.nanos["verify"] for m in meters) > 0
    assert whole.meter.visits["verify"] == sum(m.visits["verify"] for m in meters)
    assert "drafter" in whole.pools and "drafter" not in found.total(found.sides[0]).pools


def test_figures_of_a_prompt_are_those_of_a_run_of_its_own(found: Comparison) -> None:
    run = found.prompts[1].runs["D"]
    meter = run.meter
    assert meter.tokens == sum(len(branch.tokens) for branch in run.request.all_branches())
    assert meter.visits["prefill"] == 1 and meter.forwards == meter.visits["verify"] + 1
    assert meter.tau_step > 1 and meter.padding_waste == meter.padding / meter.rows


def test_the_document_has_every_figure_per_prompt_and_in_total(found: Comparison) -> None:
    made = json.loads(json.dumps(found.document()))
    assert made["schema_version"] == 1 and made["status"] == "ok" and made["exit_code"] == 0
    assert made["graphs"]["B"]["drafter"] == "eagle3" and made["graphs"]["B"]["layout"] == "bim"
    assert [p["id"] for p in made["prompts"]] == ["plan [1]", "bees"]
    assert list(made["total"]) == list("ABCD") == list(made["prompts"][0]["graphs"])
    for figures in (made["total"]["B"], made["prompts"][0]["graphs"]["B"]):
        assert {"tau_step", "target_forwards", "tokens", "seconds", "padding_waste"} <= set(figures)
        assert figures["kv"]["target"]["peak_bytes"] > 0
        assert isinstance(figures["kv"]["drafter"]["moved_bytes"], dict)
        assert figures["states"]["verify"]["milliseconds_per_visit"] > 0
    first = made["equality"][0]
    assert first["reference"] == "A" and first["graph"] == "B" and first["promised"]
    assert first["different"] == first["tie"] == 0
    assert {"compared": False, "reference": "A", "graph": "C"}.items() <= made["equality"][
        1
    ].items()


def test_the_table_fits_into_100_columns(found: Comparison) -> None:
    lines = shown(found, StringIO()).split("\n")
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    assert "B and A: " in text and "branches equal" in text and "C has no skeleton" in text
    assert "plan [1]. Make a ..." in text and "continuous" in text
    assert "\x1b" not in text


def test_the_table_is_plain_where_the_encoding_is(found: Comparison) -> None:
    assert shown(found, TextIOWrapper(BytesIO(), "ascii")).isascii()


# -- planted differences ------------------------------------------------------------------------


def test_a_planted_difference_is_found_at_its_place(found: Comparison, monkeypatch: Patch) -> None:
    branch = branch_of(found, 0, 1, 1)
    own = list(branch.tokens)
    judged = planted(found, monkeypatch, branch, tokens=[*own[:3], own[3] + 1, *own[4:]])
    assert judged.code == Code.UNEQUAL and judged.failures == 1
    verdict = verdict_of(judged, 0, ("A", "B"), "2")
    assert verdict.result is BranchAnswer.DIFFERENT and verdict.difference is not None
    there = verdict.difference
    assert (there.position, there.reference, there.other) == (3, own[3], own[3] + 1)
    assert there.margin is not None and there.margin > compare_equal.TIE
    assert there.before.endswith(found.sides[0].session.prompts.decode(own[:3]))
    text = shown(judged, StringIO())
    assert "B and A, prompt plan [1], branch 2: DIFFERENT at token 4" in text
    assert "!" in text and "1 DIFFERENT" in text and "margin" in text
    made = judged.document()["prompts"][0]["equality"][0]["branches"][2]["difference"]
    assert made["position"] == 3 and made["graph"]["id"] == own[3] + 1


def test_branches_behind_another_outline_follow(found: Comparison, monkeypatch: Patch) -> None:
    root = branch_of(found, 0, 1, -1)
    judged = planted(found, monkeypatch, root, tokens=[*root.tokens[:5], 17, *root.tokens[6:]])
    assert judged.failures == 1 and judged.code == Code.UNEQUAL
    number = counts(judged.branches(judged.pairs[0]))
    assert number["different"] == 1 and number["follows"] >= 3
    assert verdict_of(judged, 0, ("A", "B"), "1").result is BranchAnswer.FOLLOWS


def test_a_near_tie_is_counted_and_no_failure(found: Comparison, monkeypatch: Patch) -> None:
    branch = branch_of(found, 0, 3, 0)
    monkeypatch.setattr(compare_equal, "TIE", 1e9)
    tokens = [branch.tokens[0] + 1, *branch.tokens[1:]]
    judged = planted(found, monkeypatch, branch, tokens=tokens)
    assert judged.code == Code.OK and len(judged.differences) == 1
    assert counts(judged.branches(judged.pairs[2]))["tie"] == 1
    assert "1 by a numeric tie" in shown(judged, StringIO())


def test_an_answer_that_stops_early_differs(found: Comparison, monkeypatch: Patch) -> None:
    branch = branch_of(found, 0, 3, 0)
    short = {"tokens": branch.tokens[:4]}
    judged = planted(found, monkeypatch, branch, **short, finish=Finish.STOP)
    stopped = verdict_of(judged, 0, ("C", "D"), "1").difference
    assert stopped is not None and (stopped.position, stopped.other) == (4, END)
    assert stopped.margin is not None
    judged = planted(found, monkeypatch, branch, **short, finish=Finish.LENGTH)
    cut = verdict_of(judged, 0, ("C", "D"), "1").difference
    assert cut is not None and cut.other == CUT and cut.margin is None
    assert "budget was used up" in shown(judged, StringIO())


def test_other_prompts_behind_equal_outlines_differ(found: Comparison, monkeypatch: Patch) -> None:
    request = found.prompts[0].runs["D"].request
    monkeypatch.setattr(request, "prefix", [5, *request.prefix])
    judged = again(found)
    assert judged.code == Code.UNEQUAL and "another prompt" in shown(judged, StringIO())


def test_an_unfinished_branch_is_not_compared(found: Comparison, monkeypatch: Patch) -> None:
    branch = branch_of(found, 0, 1, 1)
    values = {"tokens": branch.tokens[:2], "finish": Finish.CANCELLED}
    judged = planted(found, monkeypatch, branch, **values)
    assert verdict_of(judged, 0, ("A", "B"), "2").result is BranchAnswer.UNFINISHED
    assert judged.code == Code.OK


# -- what is promised ---------------------------------------------------------------------------


def changed(side: Side, tmp_path: Path, old: str, new: str) -> Side:
    text = graph_yaml(side.job.program.graph)
    assert old in text
    (tmp_path / "own.yaml").write_text(text.replace(old, new))
    job = prepare(RunOptions(graph=str(tmp_path / "own.yaml")), prompts=PROMPTS)
    return Side("Z", job, tie(job, side.session.models), side.target)


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("share: outline", "share: prompt", "skeleton.share: outline and prompt"),
        ("max_tokens: 200", "max_tokens: 90", "skeleton.max_tokens: 200 and 90"),
        ("max_new_tokens: 256", "max_new_tokens: 7", "budget: 6 and 7"),
    ],
)
def test_other_settings_promise_nothing(
    found: Comparison, tmp_path: Path, old: str, new: str, says: str
) -> None:
    other = changed(found.sides[0], tmp_path, old, new)
    (pair,) = pairs_of([found.sides[0], other])
    assert says in pair.why_not and not pair.promised


def test_half_precision_is_compared_and_promises_nothing(found: Comparison) -> None:
    def half(side: Side) -> Side:
        options = replace(side.job.options, dtype="bfloat16")
        return replace(side, job=replace(side.job, options=options))

    one, two, three = half(found.sides[0]), half(found.sides[1]), found.sides[0]
    pairs = pairs_of([one, two, three])
    assert not pairs[0].why_not and not pairs[0].promised
    assert "dtype: bfloat16 and float32" in pairs[1].why_not


# -- the command --------------------------------------------------------------------------------


PAIR = ("graphs/bim_plain.yaml", "bim_eagle")


def test_equal_graphs_end_with_0(options: RunOptions, capsys: Output) -> None:
    assert compare_command(PAIR, options) == Code.OK
    out, err = capsys.readouterr()
    assert "B and A: 4 of 4 branches equal" in out and "What is a lake?" in out
    assert err == "" and not Path("runs").exists()


def test_broken_promises_end_with_5(
    options: RunOptions, capsys: Output, monkeypatch: Patch
) -> None:
    perform = compare_sides.perform

    def planted(session: Any, *args: Any, **more: Any) -> Any:
        run, recorder, status = perform(session, *args, **more)
        first = run.requests[0].branches[0]
        if session.program.graph.name == "bim_eagle" and len(first.tokens) > 2:
            first.tokens[2] += 1
        return run, recorder, status

    monkeypatch.setattr(compare_sides, "perform", planted)
    assert compare_command(PAIR, replace(options, as_json=True)) == Code.UNEQUAL
    out, err = capsys.readouterr()
    made = json.loads(out)
    assert made["exit_code"] == 5 and made["equality"][0]["different"] == 2
    assert made["equality"][0]["follows"] == 2, "the second part quotes the first"
    assert err == "specsot: 2 branches differ where equality is promised\n"


@pytest.mark.parametrize(
    "graphs, more, code, says",
    [
        (("bim_plain",), {}, Code.USAGE, "from 2 to 26 graphs, not 1"),
        (("bim_plian", "bim_eagel"), {}, Code.GRAPH, "did you mean 'bim_eagle'?"),
        (("bim_plian", "bim_eagel"), {}, Code.GRAPH, "did you mean 'bim_plain'?"),
        (PAIR, {"sets": ("drafter.nods=3",)}, Code.GRAPH, "drafter.nods"),
        (PAIR, {"prompts": Path("none.txt")}, Code.USAGE, "none.txt: cannot be read"),
        (PAIR, {"outline": Path("none.txt")}, Code.USAGE, "none.txt"),
        (("bim_plain", "eagle"), {}, Code.USAGE, "'eagle' has no skeleton"),
        (PAIR, {"model": "no/such/model"}, Code.MODEL, "no/such/model"),
        (PAIR, {"device": "abacus"}, Code.USAGE, "--device"),
    ],
)
def test_wrong_inputs_have_the_codes_of_run(
    options: RunOptions,
    capsys: Output,
    graphs: tuple[str, ...],
    more: dict[str, Any],
    code: Code,
    says: str,
) -> None:
    assert compare_command(graphs, replace(options, **more)) == code
    out, err = capsys.readouterr()
    assert says in err and not out


@pytest.mark.parametrize(
    "text, graph, sets",
    [
        ("bim_eagle", "bim_eagle", ()),
        ("bim_eagle@drafter.num_draft_tokens=8", "bim_eagle", ("drafter.num_draft_tokens=8",)),
        ("graphs/eagle.yaml@a=1,b=2", "graphs/eagle.yaml", ("a=1", "b=2")),
        ("eagle@a=[1,2],b={c: [3,4], d: 5},e=x", "eagle", ("a=[1,2]", "b={c: [3,4], d: 5}", "e=x")),
        ("eagle@skeleton.template=me@home", "eagle", ("skeleton.template=me@home",)),
        ("my@own.yaml", "my@own.yaml", ()),
        ("my@own.yaml@a=1", "my@own.yaml", ("a=1",)),
        ("nothing@a=1", "nothing", ("a=1",)),
    ],
)
def test_a_side_is_a_graph_with_settings(
    text: str, graph: str, sets: tuple[str, ...], tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my@own.yaml").write_text("")
    assert read_side(text) == (graph, sets)


def test_sides_of_one_graph_are_told_apart(options: RunOptions, capsys: Output) -> None:
    sides = ("bim_eagle", "bim_eagle@layout.kind=batching,drafter.num_draft_tokens=4")
    more = replace(options, sets=("layout.max_num_branches=2",))
    assert compare_command(sides, replace(more, as_json=True)) == Code.OK
    graphs = json.loads(capsys.readouterr().out)["graphs"]
    assert [graphs[letter]["layout"] for letter in "AB"] == ["bim", "batching"]
    assert graphs["A"]["sets"] == ["layout.max_num_branches=2"]
    assert graphs["B"]["sets"] == [
        *graphs["A"]["sets"],
        "layout.kind=batching",
        "drafter.num_draft_tokens=4",
    ]
    few = replace(more, sets=("limits.max_rounds=3",))
    assert compare_command(sides, few) == Code.FAILED
    out, err = capsys.readouterr()
    settings = settings_column(out)
    assert "layout.kind=batching" in settings and "drafter.num_draft_tokens=4" in settings
    assert "A bim_eagle: request 1 stopped" in err
    assert "B bim_eagle@layout.kind=batching,drafter.num_draft_tokens=4: request 1 stopped" in err


@pytest.mark.parametrize(
    "side, code, says",
    [
        ("bim_eagle@drafter.nods=3", Code.GRAPH, "bim_eagle@drafter.nods=3: drafter.nods: unknown"),
        ("bim_eagle@batching", Code.GRAPH, "bim_eagle@batching: option: write path=value"),
        ("bim_eagle@", Code.GRAPH, "bim_eagle@: option: write path=value"),
        (
            "bim_eagel@drafter.num_draft_tokens=3",
            Code.GRAPH,
            "bim_eagel@drafter.num_draft_tokens=3: bim_eagel: file: no",
        ),
        ("bim_plain@drafter.kind=dflash", Code.USAGE, "bim_plain@drafter.kind=dflash: graph 'bim_"),
        ("autoregressive@seed=1", Code.GRAPH, "autoregressive@seed=1: seed: unknown key 'seed'"),
    ],
)
def test_what_is_wrong_with_a_side_names_it(
    options: RunOptions, capsys: Output, side: str, code: Code, says: str
) -> None:
    assert compare_command(("bim_plain", side), replace(options, drafter_model=None)) == code
    out, err = capsys.readouterr()
    assert err.startswith(f"specsot: {says}") and not out


def test_refused_answers_and_limits_are_failures(options: RunOptions, capsys: Output) -> None:
    Path("q.jsonl").write_text('{"id": "big", "prompt": "Short?", "max_new_tokens": 1500}\n')
    sets = ("layout.kv_slots=600",)
    more = replace(options, prompts=Path("q.jsonl"), sets=sets)
    assert compare_command(PAIR, more) == Code.FAILED
    assert "A bim_plain: request big" in (err := capsys.readouterr().err) and "refused" in err
    assert compare_command(PAIR, replace(options, sets=("limits.max_rounds=3",))) == Code.FAILED
    out, err = capsys.readouterr()
    assert "stopped after 3 rounds (limits.max_rounds)" in err and "not finished" in out


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_keeps_what_every_graph_has_answered(
    options: RunOptions, capsys: Output, monkeypatch: Patch, times: int
) -> None:
    advance = Run.advance

    def interrupted(run: Run) -> None:
        advance(run)
        asked = {request.question for request in run.requests}
        if asked == {"What is a lake?"} and run.steps == 4:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "advance", interrupted)
    assert compare_command(PAIR, options) == Code.INTERRUPTED
    out, err = capsys.readouterr()
    if times == 1:
        assert "B and A: 2 of 2 branches equal" in out and "lake" not in out
        assert "interrupted after 1 of 2 prompts" in err
    else:
        assert not out and "interrupted" in err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
