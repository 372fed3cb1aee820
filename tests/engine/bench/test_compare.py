"""`specsot compare` and `sweep`: equal tokens are proven equal, planted differences are found and
placed, and grids become rows with gains within prompts."""

import errno
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.commands import compare_command, sweep_command

from specsot.engine.bench import sides as bench_sides
from specsot.engine.bench.command import grid_of
from specsot.engine.bench.comparison import Comparison, compare_jobs, document_of
from specsot.engine.bench.experiment import (
    COMPARED,
    Experiment,
    Prepared,
    entries_of,
    experiment_of_sides,
    prepare_experiment,
    read_side,
)
from specsot.engine.bench.render import console, equality_lines
from specsot.engine.bench.sides import (
    TIE,
    BranchAnswer,
    Side,
    SideRun,
    answer_all,
    compare_branches,
    letters,
    pairs_of,
)
from specsot.engine.errors import Code, UsageError
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.prepare.job import prepare
from specsot.engine.prepare.options import RunOptions
from specsot.engine.record import run_folder
from specsot.engine.record.metrics import Meter, counted_figures
from specsot.engine.run.api import tie
from specsot.engine.run.core import StopSignal
from specsot.engine.run.scoring import contexts, next_scores
from specsot.states.machine import Run
from specsot.states.request import Finish

Patch = pytest.MonkeyPatch
Output = pytest.CaptureFixture[str]

GRAPHS = ("bim_plain", "bim_eagle", "autoregressive", "eagle")
PROMPTS = (
    '{"id": "plan [1]", "prompt": "Make a plan for a weekend camping trip."}\n'
    '{"id": "bees", "prompt": "How do honey bees make honey?"}\n'
)
PAIR = ("graphs/bim_plain.yaml", "bim_eagle")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    file = tmp_path_factory.mktemp("compared") / "q.jsonl"
    file.write_text(PROMPTS)
    experiment = experiment_of_sides("compare", GRAPHS, repeats=1, figures=COMPARED)
    return prepare_experiment(experiment, RunOptions(prompts=file, threads=1, max_new_tokens=6))


@pytest.fixture(scope="module")
def found(prepared: Prepared) -> Comparison:
    return compare_jobs(prepared)


Judge = Callable[[], dict[str, Any]]


@pytest.fixture
def judge(found: Comparison, prepared: Prepared) -> Judge:
    """The comparison judged again, after a change of its answers."""

    def judged() -> dict[str, Any]:
        for one in found.rounds:
            pairs = (pair for pair in found.pairs if not pair.why_not)
            one.results.update({pair.other.letter: compare_branches(pair, one) for pair in pairs})
        return document_of(found, prepared)

    return judged


def shown(document: dict[str, Any]) -> str:
    experiment = Experiment.model_validate(document["experiment"])
    return console(experiment, document, equality_lines(document))


# -- equal --------------------------------------------------------------------------------------


def test_graphs_that_promise_the_same_tokens_give_them(found: Comparison, judge: Judge) -> None:
    made = json.loads(json.dumps(judge()))
    assert made["exit_code"] == 0 and made["status"] == "ok" and not made["problems"]
    compared = {(p["graph"], p["reference"]): p for p in made["equality"] if p["compared"]}
    assert list(compared) == [("B", "A"), ("D", "C")]
    for pair in compared.values():
        assert pair["equal"] == pair["branches"] > 0 and pair["equal_tokens"] > 0
        assert pair["promised"] and not pair["differences"] and pair["tie"] == 0
    assert {b.branch for b in found.rounds[0].results["B"]} >= {"outline", "1", "2", "3"}
    (apart,) = (pair for pair in made["equality"] if not pair["compared"])
    assert apart["reason"].startswith("C has no skeleton") and apart["reference"] == "A"
    for graph in made["setup"]["graphs"].values():
        assert {"file", "sets", "layout", "drafter", "model_hash", "graph_hash"} < graph.keys()
    text = shown(made)
    assert max(map(len, text.split("\n"))) <= 120 and "\x1b" not in text
    assert text.replace("\N{EN DASH}", "").isascii()
    assert "B and A: " in text and "branches equal" in text and "C has no skeleton" in text


def test_models_are_loaded_once_and_the_target_says_the_next_token(found: Comparison) -> None:
    one, two, three, four = [side.session.models for side in found.sides]
    assert one is three and two is four
    assert one.target is two.target and one.drafter is None and two.drafter is not None
    side, request = found.sides[1], found.rounds[0].runs["B"].requests[0]
    for branch, context in contexts(request, side.session.prompts):
        if branch.matcher is None:
            scores_V = next_scores(side.session.models, branch, context, 4)
            assert int(scores_V.argmax()) == branch.tokens[4]


def test_figures_of_a_prompt_are_those_of_a_run_of_its_own(found: Comparison, judge: Judge) -> None:
    run = found.rounds[1].runs["D"]
    meter = run.meter
    assert meter.tokens == sum(len(branch.tokens) for branch in run.requests[0].all_branches())
    assert meter.visits["prefill"] == 1 and meter.forwards == meter.visits["verify"] + 1
    assert meter.tau_step > 1
    assert counted_figures(meter)["padding_waste"] == meter.padding / meter.rows
    plain, drafted, *_ = judge()["rows"].values()
    assert plain["figures"]["speedup_by_prompt"] == [1, 1, 1] and drafted["equal"][-2:] == "=A"
    assert drafted["figures"]["kv_held_mb"][0] > plain["figures"]["kv_held_mb"][0] > 0
    assert {"verify", "grow_tree"} < drafted["ms_per_visit"].keys()


# -- planted differences ------------------------------------------------------------------------


def another_token(own: list[int]) -> list[int]:
    return [*own[:3], own[3] + 1, *own[4:]]


@pytest.mark.parametrize(
    "side, branch, tokens, finish, position, says",
    [
        ("B", "2", another_token, None, 3, "prompt plan [1], branch 2: DIFFERENT at token 4"),
        ("B", "outline", another_token, None, 3, "branch outline: DIFFERENT at token 4"),
        ("D", "1", lambda own: own[:4], Finish.STOP, 4, "nothing: it stopped"),
        ("D", "1", lambda own: own[:4], Finish.LENGTH, 4, "budget was used up"),
        ("B", "2", lambda own: own[:2], Finish.CANCELLED, None, "1 not finished"),
    ],
    ids=["a token", "the outline", "an early end", "a small budget", "no end"],
)
def test_a_planted_difference_is_found_at_its_place(
    side: str,
    branch: str,
    tokens: Callable[[list[int]], list[int]],
    finish: Finish | None,
    position: int | None,
    says: str,
    found: Comparison,
    judge: Judge,
    monkeypatch: Patch,
) -> None:
    request = found.rounds[0].runs[side].requests[0]
    changed = request.root if branch == "outline" else request.branches[int(branch) - 1]
    own = [*changed.tokens]
    monkeypatch.setattr(changed, "tokens", tokens(own))
    monkeypatch.setattr(changed, "finish", finish or changed.finish)
    made = judge()
    (pair,) = (p for p in made["equality"] if p["compared"] and p["graph"] == side)
    (verdict,) = (b for b in found.rounds[0].results[side] if b.branch == branch)
    assert says in shown(made)
    if position is None:
        assert verdict.result is BranchAnswer.UNFINISHED and made["exit_code"] == Code.OK
        return
    assert verdict.result is BranchAnswer.DIFFERENT and made["exit_code"] == Code.UNEQUAL
    assert made["differences"] == pair["different"] == 1 and "1 DIFFERENT" in shown(made)
    assert [row["equal"][0] for row in made["rows"].values()].count("!") == 1
    follows = [b.branch for b in found.rounds[0].results[side] if b.result is BranchAnswer.FOLLOWS]
    assert ("1" in follows and len(follows) >= 3) == (branch == "outline")
    (difference,) = pair["differences"]
    assert difference["position"] == position
    assert difference["before"].endswith(found.sides[0].session.prompts.decode(own[:position]))
    end = {None: None, Finish.STOP: "stop", Finish.LENGTH: "length"}[finish]
    token = own[position] + 1 if end is None else None
    assert difference["graph"]["id"] == token and difference["graph"]["end"] == end
    assert difference["reference"]["id"] == own[position]
    assert difference["margin"] is None if end == "length" else difference["margin"] > TIE


def test_a_near_tie_is_no_failure_and_another_prompt_is_one(
    found: Comparison, judge: Judge, monkeypatch: Patch
) -> None:
    request = found.rounds[0].runs["D"].requests[0]
    branch = request.branches[0]
    with monkeypatch.context() as patch:
        patch.setattr(bench_sides, "TIE", 1e9)
        patch.setattr(branch, "tokens", another_token(branch.tokens))
        made = judge()
        assert made["exit_code"] == Code.OK and made["equality"][2]["tie"] == 1
        assert "1 by a numeric tie" in shown(made) and "branch 1: numeric tie at" in shown(made)
    monkeypatch.setattr(request, "prefix", [5, *request.prefix])
    made = judge()
    assert made["exit_code"] == Code.UNEQUAL and "another prompt" in shown(made)


# -- what is promised ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, says",
    [
        ({"sets": ("skeleton.share=prompt",)}, "skeleton.share: outline and prompt"),
        ({"sets": ("skeleton.max_tokens=90",)}, "skeleton.max_tokens: 200 and 90"),
        ({"max_new_tokens": 7}, "budget: 6 and 7"),
        ({"dtype": "bfloat16"}, "dtype: float32 and bfloat16"),
    ],
)
def test_other_settings_no_promise(
    found: Comparison, prepared: Prepared, values: Any, says: str
) -> None:
    side = found.sides[0]
    job = prepare(RunOptions(graph="bim_plain", **values), prompts=prepared.prompts)
    other = Side("Z", job, tie(job, side.session.models), side.target)
    (pair,) = pairs_of([side, other])
    assert says in pair.why_not and not pair.promised
    options = replace(side.job.options, dtype="bfloat16")
    (pair,) = pairs_of([replace(o, job=replace(o.job, options=options)) for o in found.sides[:2]])
    assert not pair.why_not and not pair.promised, "half precision is compared, and no promise"


# -- grids --------------------------------------------------------------------------------------


def test_a_grid_has_every_combination_and_the_last_path_changes_fastest() -> None:
    vary = grid_of(["a.b=1,2", "c={x: [3,4]},5"])
    assert [one.name for one in entries_of(experiment_of_sides("sweep", ["eagle"], vary=vary))] == [
        "eagle@a.b=1,c={x: [3,4]}",
        "eagle@a.b=1,c=5",
        "eagle@a.b=2,c={x: [3,4]}",
        "eagle@a.b=2,c=5",
    ]
    own = experiment_of_sides("sweep", ["eagle@z=1"], vary=grid_of(["a=2,3,2"]))
    assert [one.name for one in entries_of(own)] == ["eagle@z=1,a=2", "eagle@z=1,a=3"]
    shown = [letter for letter, _ in zip(letters(), range(28), strict=False)]
    assert shown[:3] == ["A", "B", "C"] and shown[25:] == ["Z", "AA", "AB"]


@pytest.mark.parametrize(
    "vary, says",
    [
        (["drafter.num_draft_tokens"], "write path=value,value"),
        (["=1,2"], "write path=value,value"),
        (["a="], "write path=value,value"),
        (["a=1"], "from 2 to 256 points, not 1"),
        (["a=1,2", "a=3"], "a varies already"),
        (["a=" + ",".join(map(str, range(300)))], "not 300"),
    ],
)
def test_what_is_no_grid_is_refused(vary: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        grid_of(vary)


def test_the_order_of_sides_is_drawn_for_each_round(monkeypatch: Patch) -> None:
    asked: list[str] = []
    run = SideRun(Meter())
    monkeypatch.setattr(bench_sides, "_answer", lambda side, *_: run)
    sides: list[Any] = [SimpleNamespace(letter=letter, name="x") for letter in "ABC"]
    prompts = {number: Prompt(str(number), "?") for number in range(12)}

    def orders(prompts: dict[int, Prompt]) -> list[str]:
        asked.clear()
        rounds = answer_all(
            sides, prompts, StopSignal(), lambda text, _: asked.append(text.split()[-3])
        )
        assert all(list(one.runs) == ["A", "B", "C"] for one in rounds)
        return ["".join(asked[at : at + 3]) for at in range(0, len(asked), 3)]

    every = orders(prompts)
    assert {order[0] for order in every} == {*"ABC"} and all(set(o) == {*"ABC"} for o in every)
    assert orders({number: prompts[number] for number in (3, 7)}) == [every[3], every[7]]


# -- the commands -------------------------------------------------------------------------------


def test_equal_graphs_end_with_0(options: RunOptions, capsys: Output) -> None:
    assert compare_command(PAIR, options) == Code.OK
    out, err = capsys.readouterr()
    assert "B and A: 4 of 4 branches equal" in out and "compare: 2 sides" in out
    assert err == "" and not Path("runs").exists()
    assert compare_command(("bim_eagle",) * 2, replace(options, as_json=True)) == Code.OK
    assert list(json.loads(capsys.readouterr().out)["rows"]) == ["bim_eagle", "bim_eagle (B)"]


def test_a_sweep_shows_each_cost(options: RunOptions, capsys: Output) -> None:
    grid = ("drafter.num_draft_tokens=4,6", "layout.kind=bim,batching")
    assert sweep_command("bim_eagle@drafter.draft_depth=3", grid, options) == Code.OK
    out, _ = capsys.readouterr()
    assert "D and A: 4 of 4 branches equal" in out and "batching" in out


def test_a_broken_promise_ends_with_5(
    options: RunOptions, capsys: Output, monkeypatch: Patch
) -> None:
    perform = bench_sides.perform

    def planted(session: Any, *args: Any, **more: Any) -> Any:
        run, recorder, status = perform(session, *args, **more)
        first = run.requests[0].branches[0]
        if session.program.graph.name == "bim_eagle" and len(first.tokens) > 2:
            first.tokens[2] += 1
        return run, recorder, status

    monkeypatch.setattr(bench_sides, "perform", planted)
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
        (("", "bim_eagle"), {}, Code.USAGE, "must not be empty"),
        (PAIR, {"sets": ("drafter.nods=3",)}, Code.GRAPH, "drafter.nods"),
        (PAIR, {"prompts": Path("none.txt")}, Code.USAGE, "none.txt: cannot be read"),
        (PAIR, {"outline": Path("none.txt")}, Code.USAGE, "none.txt"),
        (("bim_plain", "eagle"), {}, Code.USAGE, "'eagle' has no skeleton"),
        (PAIR, {"model": "no/such/model"}, Code.MODEL, "no/such/model"),
        (PAIR, {"device": "abacus"}, Code.USAGE, "--device"),
        # what is wrong with a side names it
        ("bim_eagle@drafter.nods=3", {}, Code.GRAPH, "{}: drafter.nods: unknown"),
        ("bim_eagle@batching", {}, Code.GRAPH, "{}: option: write path=value"),
        ("bim_eagle@", {}, Code.GRAPH, "{}: option: write path=value"),
        ("bim_eagel@drafter.draft_depth=3", {}, Code.GRAPH, "{}: bim_eagel: file: no"),
        ("bim_plain@drafter.kind=dflash", {"drafter_model": None}, Code.USAGE, "{}: graph 'bim_"),
        ("autoregressive@seed=1", {}, Code.GRAPH, "{}: seed: unknown key 'seed'"),
    ],
)
def test_wrong_inputs_have_the_codes_of_run(
    options: RunOptions,
    capsys: Output,
    graphs: tuple[str, ...] | str,
    more: dict[str, Any],
    code: Code,
    says: str,
) -> None:
    sides = ("bim_plain", graphs) if isinstance(graphs, str) else graphs
    assert compare_command(sides, replace(options, **more)) == code
    out, err = capsys.readouterr()
    assert not out
    assert says in err if sides is graphs else err.startswith(f"specsot: {says.format(graphs)}")


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
    more = replace(options, sets=("layout.max_num_branches=2",), as_json=True)
    assert compare_command(sides, more) == Code.OK
    graphs = json.loads(capsys.readouterr().out)["setup"]["graphs"]
    assert [graphs[letter]["layout"] for letter in "AB"] == ["bim", "batching"]
    assert graphs["A"]["sets"] == ["layout.max_num_branches=2"]
    own = ["layout.kind=batching", "drafter.num_draft_tokens=4"]
    assert graphs["B"]["sets"] == [*graphs["A"]["sets"], *own]
    few = replace(more, sets=("limits.max_rounds=3",), as_json=False)
    assert compare_command(sides, few) == Code.FAILED
    out, err = capsys.readouterr()
    assert "A bim_eagle: request 1 stopped after 3 rounds (limits.max_rounds)" in err
    assert "not finished" in out
    assert "B bim_eagle@layout.kind=batching,drafter.num_draft_tokens=4: request 1 stopped" in err


def test_refused_and_interrupted_answers_are_failures(
    options: RunOptions, capsys: Output, monkeypatch: Patch
) -> None:
    """A second Ctrl-C ends it at once."""
    Path("q.jsonl").write_text('{"id": "big", "prompt": "Short?", "max_new_tokens": 1500}\n')
    sets = ("layout.kv_slots=600",)
    more = replace(options, prompts=Path("q.jsonl"), sets=sets)
    assert compare_command(PAIR, more) == Code.FAILED
    assert "A bim_plain: request big" in (err := capsys.readouterr().err) and "refused" in err
    advance = Run.advance

    def interrupted(run: Run) -> None:
        advance(run)
        asked = {request.question for request in run.requests}
        if asked == {"What is a lake?"} and run.steps == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "advance", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    assert compare_command(PAIR, options) == Code.INTERRUPTED
    out, err = capsys.readouterr()
    assert not out and "interrupted" in err
    assert signal.getsignal(signal.SIGINT) is handler


# -- folders ------------------------------------------------------------------------------------


def test_a_folder_of_another_comparison_is_refused_and_a_damaged_round_made_again(
    options: RunOptions, capsys: Output
) -> None:
    assert compare_command(PAIR, options, Path("kept")) == Code.OK
    first, second = (Path(f"kept/round-000{number}.json") for number in (1, 2))
    times = first.read_bytes()
    second.write_text('{"runs": {')
    assert compare_command(PAIR, options, Path("kept")) == Code.OK
    made_again = json.loads(second.read_text())["runs"]
    assert first.read_bytes() == times and made_again.keys() == {"A", "B"}
    result = json.loads(Path("kept/result.json").read_text())
    assert compare_command(PAIR, options, Path("kept")) == Code.OK
    assert json.loads(Path("kept/result.json").read_text()) == result
    capsys.readouterr()
    assert compare_command(PAIR, replace(options, seed=3), Path("kept")) == Code.USAGE
    assert "kept: holds a comparison with other graphs: name another" in capsys.readouterr().err
    Path("file").write_text("")
    assert compare_command(PAIR, options, Path("file")) == Code.USAGE
    assert "file: no folder can be made there" in capsys.readouterr().err


class Full(StringIO):
    """A stream whose disk is full."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disks_lose_no_table(options: RunOptions, capsys: Output, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Full())
        assert compare_command(PAIR, options, Path("kept")) == Code.FAILED
        err = capsys.readouterr().err
        assert "No space left on device; the result is in kept" in err and "branches" not in err
        assert compare_command(PAIR, options) == Code.FAILED
        err = capsys.readouterr().err
        assert "the result follows here" in err and "B and A: 4 of 4 branches equal" in err

    def full(file: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "write_whole", full)
    assert compare_command(PAIR, options, Path("other")) == Code.FAILED
    out, err = capsys.readouterr()
    assert "B and A: 4 of 4 branches equal" in out
    assert "other/table.csv: No space left on device" in err
