"""specsot.yaml: packaged defaults, the working directory's own, options."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specsot.engine.errors import UsageError
from specsot.engine.prepare import job as module
from specsot.engine.prepare.files import graph_names
from specsot.engine.prepare.job import prepare
from specsot.engine.prepare.options import SETTINGS, RunOptions
from specsot.states.yaml.source import GraphError


def read_config(folder: Path, **given: Any) -> RunOptions:
    return module.read_config(folder, RunOptions(**given))[0]


def wrong(
    folder: Path, text: str, error: type[ValueError] = GraphError, **options: Any
) -> list[str]:
    (folder / "specsot.yaml").write_text(text)
    with pytest.raises(error) as caught:
        read_config(folder, **options)
    return [line.removeprefix(f"{folder}/") for line in str(caught.value).split("\n")]


def test_the_packaged_defaults(tmp_path: Path) -> None:
    config = read_config(tmp_path)
    assert config.graph in graph_names()
    assert (config.model, config.drafter_model) == ("embedded", "embedded")
    assert (config.device, config.dtype, config.seed) == ("cpu", "float32", 0)
    assert config.threads is None and config.max_new_tokens is None
    assert config.prompt


def test_the_working_directory_wins_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "specsot.yaml").write_text("seed: 7\nthreads: 2\n")
    config = read_config(tmp_path)
    assert (config.seed, config.threads) == (7, 2)
    assert config == replace(read_config(Path("/")), seed=7, threads=2)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    before = read_config(tmp_path)
    (tmp_path / "specsot.yaml").write_text("# nothing\n")
    assert read_config(tmp_path) == before


def test_options_win_over_both_unless_not_given(tmp_path: Path) -> None:
    (tmp_path / "specsot.yaml").write_text("seed: 7\ngraph: eagle\n")
    config = read_config(tmp_path, seed=9, graph=None, max_new_tokens=5, prompt="mine")
    assert (config.seed, config.graph, config.max_new_tokens) == (9, "eagle", 5)
    assert config.prompt == "mine" and read_config(tmp_path).prompt != "mine"


def test_null_means_that_somebody_else_decides(tmp_path: Path) -> None:
    (tmp_path / "specsot.yaml").write_text("threads: null\nmax_new_tokens: ~\n")
    assert read_config(tmp_path).threads is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed: 1\n", "specsot.yaml:1:1: sed: unknown key 'sed'; did you mean 'seed'?"),
        ("seed: 1\nseed: 2\n", "specsot.yaml:2:1: yaml: seed: this key is given twice, first in"),
        ("seed: true\n", "specsot.yaml:1:7: seed: must be an integer, not true"),
        ("seed: -1\n", "specsot.yaml:1:7: seed: must be at least 0, not -1"),
        ("seed: 1e3\n", "specsot.yaml:1:7: seed: must be an integer, not the number 1000.0"),
        ("seed: 99999999999999999999\n", "specsot.yaml:1:7: seed: must be "),
        ("threads: 0\n", "specsot.yaml:1:10: threads: must be at least 1, not 0"),
        ("dtype: float33\n", "specsot.yaml:1:8: dtype: must be 'float32', 'float64', 'bfloat16'"),
        ("device: gpu\n", "specsot.yaml:1:9: device: 'gpu' must match"),
        ("graph: null\n", "specsot.yaml:1:8: graph: must be a string, not null"),
        ("graph: ''\n", "specsot.yaml:1:8: graph: must not be empty"),
        ("prompt: 5\n", "specsot.yaml:1:9: prompt: must be a string, not the number 5"),
        ("- a\n", "specsot.yaml:1:1: graph: a list at the top; a configuration is a mapping"),
        ("a: [\n", "specsot.yaml:2:1: yaml: expected the node content"),
        ("1: 2\n", "specsot.yaml:1:1: 1: unknown key 1"),
    ],
)
def test_a_mistake_says_where(text: str, message: str, tmp_path: Path) -> None:
    assert wrong(tmp_path, text)[0].startswith(message), wrong(tmp_path, text)


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    assert len(wrong(tmp_path, "seed: -1\ndtype: x\nfoo: 1\n")) == 3


def test_a_wrong_option_is_named(tmp_path: Path) -> None:
    message = wrong(tmp_path, "", UsageError, dtype="float33", max_new_tokens=0)
    assert message == [
        "--dtype float33: must be 'float32', 'float64', 'bfloat16' or 'float16', not 'float33'",
        "--max-new-tokens 0: must be at least 1, not 0",
    ]
    assert len(wrong(tmp_path, "seed: -1", dtype="float33")) == 2, "the file is wrong as well"


def test_a_folder_of_that_name_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "specsot.yaml").mkdir()
    with pytest.raises(GraphError, match="this is a directory, not a file"):
        read_config(tmp_path)


def test_a_job_leaves_no_setting_open(tmp_path: Path) -> None:
    job = prepare(RunOptions(graph="bim_plain", seed=3), tmp_path)
    left = [name for name in SETTINGS if getattr(job.options, name) is None]
    assert left == ["threads", "max_new_tokens", "stop_ids"] == module.OPEN
    assert (job.options.graph, job.options.seed) == ("graphs/bim_plain.yaml", 3)


def test_every_key_is_an_option_and_nothing_else_is_a_key(tmp_path: Path) -> None:
    assert all(getattr(RunOptions(), name) is None for name in SETTINGS)
    for name in ("outline", "sets", "quiet", "argv"):
        assert f"unknown key '{name}'" in wrong(tmp_path, f"{name}: x")[0]
