"""Files of experiments: places in errors, rows, what the command line changes, what ships."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.commands import bench_command, tune_command

from specsot.engine.bench.experiment import (
    Experiment,
    Prepared,
    entries_of,
    experiment_names,
    experiment_of,
    find_experiment,
    prepare_experiment,
    read_experiment,
    references_of,
)
from specsot.engine.cli.main import main
from specsot.engine.errors import Code, UsageError
from specsot.engine.prepare.files import graph_names
from specsot.engine.prepare.options import BenchOptions, RunOptions

Output = pytest.CaptureFixture[str]
HEAD = "version: 1\nname: mine\ndoc: Mine.\n"
WRONG = {
    "sides: [bim_egle]\n": "4:9: sides.0: no graph 'bim_egle', nor a peer; did you mean",
    "sides: [eagle]\nagainst: [hf, hff]\n": "5:15: against.1: no graph 'hff'",
    "sides: [eagle]\nfigures: [tau_stop]\n": "5:11: figures.0: no figure 'tau_stop'; did you",
    "sides: [eagle]\nplots: [{y: tau_step, x: nodes}]\n": "5:26: plots.0.x: 'nodes' does not vary",
    "sides: [eagle]\nrepeats: 0\n": "5:10: repeats:",
    "sides: [eagle]\nrepeat: 2\n": "5:1: repeat:",
    "sides: []\n": "4:8: sides:",
    "sides: [bim_eagle]\nvary: {parts: [2, two]}\n": "5:19: vary.parts.1: a number of parts",
    # of the graphs that it makes
    "sides: [eagle]\nvary: {drafter.num_draft_tokens: [2, 0]}\n": (
        "5:38: vary.drafter.num_draft_tokens.1: eagle: dr"
    ),
    "sides: [eagle]\nset: {drafter.nods: 2}\n": "5:21: set.drafter.nods: eagle: drafter.nods:",
    "sides:\n  - eagle\n  - eagle@drafter.nods=3\n": "6:5: sides.1: eagle@drafter.nods=3",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_shown_at_its_place(text: str, quick: RunOptions, capsys: Output) -> None:
    Path("mine.yaml").write_text(HEAD + text)
    assert bench_command(BenchOptions(("mine.yaml",)), quick) == Code.GRAPH
    err = capsys.readouterr().err
    assert f"mine.yaml:{WRONG[text]}" in err and err.rstrip().endswith("]"), err


@pytest.mark.parametrize(
    "command, asked, says",
    [
        (bench_command, BenchOptions(()), "bench takes an experiment, or graphs"),
        (bench_command, BenchOptions(("driftes",)), "did you mean 'drafters'"),
        (bench_command, BenchOptions(("eagle",), "hff"), "--against hff: no experiment, graph or"),
        (bench_command, BenchOptions(("eagle",), vary=("a.b",)), "write path=value,value"),
        (
            bench_command,
            BenchOptions(("bim_plain",), vary=("parts=99",)),
            "an integer from 1 to 64",
        ),
        (tune_command, BenchOptions(("autoregressive",)), "nothing to tune of a drafter of kind"),
        (tune_command, BenchOptions(("eagle", "dflash")), "takes one graph"),
        (tune_command, BenchOptions(("eagle",), vary=("a.b=2,4",)), "none of --vary, --against"),
        (tune_command, BenchOptions(("eagle",), set_of="gsm8k"), "none of --vary, --against"),
    ],
)
def test_what_the_command_line_cannot_mean(
    command: Callable[..., int], asked: BenchOptions, says: str, quick: RunOptions, capsys: Output
) -> None:
    assert command(asked, quick) == Code.USAGE
    assert says in capsys.readouterr().err


def made_of(asked: BenchOptions, options: RunOptions) -> Prepared:
    experiment, source = experiment_of(asked)
    return prepare_experiment(experiment, options, source)


def experiment(**changes: object) -> Experiment:
    given = {"name": "x", "doc": "X.", "sides": ["eagle", "hf-lookup", "dflash"], **changes}
    return Experiment.model_validate(given)


def test_rows_are_every_side_at_every_point_and_those_that_do_not_vary() -> None:
    one = experiment(against=["hf"], vary={"a.b": [1, 2], "c": ["x"]})
    rows = entries_of(one)
    assert [(row.side, *row.varied.values()) for row in rows] == [
        ("hf",),
        ("eagle", "1", "x"),
        ("eagle", "2", "x"),
        ("hf-lookup",),
        ("dflash", "1", "x"),
        ("dflash", "2", "x"),
    ]
    assert rows[1].sets == ("a.b=1", "c=x") and rows[2].at["a.b"] == ("vary", "a.b", 1)
    assert references_of(one, rows) == [0] * 6
    paired = one.model_copy(update={"pairing": "point"})
    assert references_of(paired, rows) == [0, 1, 2, 0, 1, 2]


def test_the_command_line_changes_an_experiment(quick: RunOptions) -> None:
    Path("mine.yaml").write_text(
        f"{HEAD}sides: [eagle]\nvary: {{drafter.num_draft_tokens: [2, 4]}}\nagainst: [hf]\n"
        "options: {max_new_tokens: 99, seed: 7}\nset: {sampling.temperature: 0.5}\ncount: 1\n"
    )
    asked = BenchOptions(
        ("mine.yaml",), "autoregressive", ("drafter.num_draft_tokens=3",), repeats=5
    )
    made = made_of(asked, quick)
    assert [one.side for one in made.entries] == ["autoregressive", "eagle"]
    assert made.experiment.repeats == 5 and len(made.prompts.items) == 1
    job = made.jobs[1]
    graph = job.program.graph
    assert graph.drafter.num_draft_tokens == 3 and graph.sampling.temperature == 0.5
    assert job.options.seed == 7 and job.options.max_new_tokens == 8  # the command line's


def test_a_side_without_a_drafter_is_left_out_of_a_file_and_told(quick: RunOptions) -> None:
    Path("mine.yaml").write_text(f"{HEAD}sides: [ngram, eagle]\n")
    bare = replace(quick, drafter_model=None)
    made = made_of(BenchOptions(("mine.yaml",)), bare)
    assert [one.side for one in made.entries] == ["ngram"] and "eagle is left out" in made.notes[0]
    with pytest.raises(UsageError, match="drafts with eagle3"):
        made_of(BenchOptions(("ngram", "eagle")), bare)


def test_parts_are_an_outline_of_so_many(quick: RunOptions) -> None:
    asked = BenchOptions(("bim_plain", "batching_plain"), vary=("parts=1,12",))
    jobs = made_of(asked, quick).jobs
    assert [len(job.outline.points) for job in jobs if job.outline] == [1, 12, 1, 12]
    assert [job.program.graph.layout.max_num_branches for job in jobs] == [1, 12, 1, 12]


@pytest.mark.parametrize("name", experiment_names())
def test_what_ships_can_be_measured_and_says_what_it_reproduces(name: str) -> None:
    file = find_experiment(name)
    same = find_experiment(f"graphs/experiments/{name}.yaml")
    assert file is not None and same is not None
    assert file.read_text(encoding="utf-8") == same.read_text(encoding="utf-8")
    one, _ = read_experiment(file)
    assert one.name == name and one.reproduces and one.reported and name not in graph_names()
    made = made_of(BenchOptions((name,)), RunOptions())
    assert len(made.jobs) >= 2 and not made.notes


def test_the_list_tells_what_was_reported(capsys: Output) -> None:
    for words in (["bench", "--list"], ["bench", "--list", "--json"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code
        out = capsys.readouterr().out
        assert all(name in out for name in experiment_names()) and "2602.06036" in out
