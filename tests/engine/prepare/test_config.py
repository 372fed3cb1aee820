"""specsot.yaml: packaged defaults, the working directory's own, profiles, options; which file a
name means, and what is said about files that are none."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_graph import told

from specsot.engine.errors import UsageError
from specsot.engine.prepare import job as module
from specsot.engine.prepare.files import graph_names, open_graph, open_source
from specsot.engine.prepare.job import Job, prepare
from specsot.engine.prepare.options import SETTINGS, RunOptions
from specsot.engine.prepare.repeat import run_document, to_yaml
from specsot.states.yaml.source import GraphError


def config_of(folder: Path, **given: Any) -> RunOptions:
    return module.read_config(folder, RunOptions(**given))[0]


def wrong(
    folder: Path, text: str, error: type[ValueError] = GraphError, **options: Any
) -> list[str]:
    (folder / "specsot.yaml").write_text(text)
    with pytest.raises(error) as caught:
        config_of(folder, **options)
    return [line.removeprefix(f"{folder}/") for line in str(caught.value).split("\n")]


def test_packaged_defaults_under_the_folders_own_under_options(tmp_path: Path) -> None:
    before = config_of(tmp_path)
    assert before.graph in graph_names() and before.prompt
    assert (before.model, before.drafter_model) == ("embedded", "embedded")
    assert (before.device, before.dtype, before.seed) == ("cpu", "float32", 0)
    assert before.threads is None and before.max_new_tokens is None
    assert module.read_config(tmp_path, RunOptions())[1] is None
    for text, changes in (
        ("seed: 7\nthreads: 2\n", {"seed": 7, "threads": 2}),
        ("# nothing\n", {}),
        ("threads: null\nmax_new_tokens: ~\n", {}),
    ):
        (tmp_path / "specsot.yaml").write_text(text)
        assert config_of(tmp_path) == replace(before, **changes)
    (tmp_path / "specsot.yaml").write_text("seed: 7\ngraph: eagle\n")
    config = config_of(tmp_path, seed=9, graph=None, max_new_tokens=5, prompt="mine")
    assert (config.seed, config.graph, config.max_new_tokens) == (9, "eagle", 5)
    assert config.prompt == "mine" and config_of(tmp_path).prompt != "mine"


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


def test_a_wrong_option_is_named(tmp_path: Path) -> None:
    message = wrong(tmp_path, "", UsageError, dtype="float33", max_new_tokens=0)
    assert message == [
        "--dtype float33: must be 'float32', 'float64', 'bfloat16' or 'float16', not 'float33'",
        "--max-new-tokens 0: must be at least 1, not 0",
    ]
    assert len(wrong(tmp_path, "seed: -1", dtype="float33")) == 2, "the file is wrong as well"
    assert len(wrong(tmp_path, "seed: -1\ndtype: x\nfoo: 1\n")) == 3
    (tmp_path / "specsot.yaml").unlink()
    (tmp_path / "specsot.yaml").mkdir()
    with pytest.raises(GraphError, match="this is a directory, not a file"):
        config_of(tmp_path)


def test_a_job_leaves_no_setting_open(tmp_path: Path) -> None:
    job = prepare(RunOptions(graph="bim_plain", seed=3), tmp_path)
    left = [name for name in SETTINGS if getattr(job.options, name) is None]
    assert left == ["threads", "max_new_tokens", "stop_ids"] == module.OPEN
    assert (job.options.graph, job.options.seed) == ("graphs/bim_plain.yaml", 3)


def test_every_key_is_an_option_and_nothing_else_is_a_key(tmp_path: Path) -> None:
    assert all(getattr(RunOptions(), name) is None for name in SETTINGS)
    for name in ("outline", "sets", "quiet", "argv"):
        assert f"unknown key '{name}'" in wrong(tmp_path, f"{name}: x")[0]


MINE = """
profiles:
  mine:
    model: path/to/target
    drafters:
      eagle3: {model: path/to/head, num_draft_tokens: 7, top_k: 3}
      vanilla: path/to/small
      ngram: {num_draft_tokens: 3, draft_depth: 3}
    dtype: bfloat16
    stop_ids: [5, 6]
    set: {skeleton.share: prompt, limits.max_new_tokens: 99, sampling.temperature: 0.5}
  smollm2: {dtype: bfloat16}
"""
PACKAGED = {"smollm2": 6, "vicuna-7b-v1.3": 3, "qwen3-4b": 6, "qwen3-8b": 6, "llama-3.1-8b": 6}


def job(folder: Path, graph: str = "bim_eagle", profile: str | None = "mine", **more: Any) -> Job:
    return prepare(RunOptions(graph=graph, profile=profile, **more), folder)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "specsot.yaml").write_text(MINE)
    return tmp_path


def test_a_profile_changes_settings_and_the_graph(mine: Path) -> None:
    done = job(mine)
    options, graph = done.options, done.program.graph
    assert (options.model, options.drafter_model) == ("path/to/target", "path/to/head")
    assert (options.dtype, options.stop_ids) == ("bfloat16", (5, 6))
    assert graph.drafter.model_dump() | {"num_draft_tokens": 7, "top_k": 3, "draft_depth": 3} == (
        graph.drafter.model_dump()
    )
    assert graph.skeleton is not None and graph.skeleton.share == "prompt"
    assert (graph.limits.max_new_tokens, graph.sampling.temperature) == (99, 0.5)
    packaged = job(mine, "bim_plain", "smollm2")  # is changed key by key
    assert (packaged.options.model, packaged.options.dtype) == ("smollm2", "bfloat16")
    skeleton: Any = packaged.program.graph.skeleton
    assert (skeleton.share, skeleton.template) == ("prompt", "auto")


def test_the_command_line_wins(mine: Path) -> None:
    sets = ["skeleton.share=outline", "drafter.num_draft_tokens=5", "drafter.model=elsewhere"]
    done = job(mine, dtype="float32", sets=sets, stop_ids=[])
    assert (done.options.dtype, done.options.stop_ids) == ("float32", ())
    assert done.options.drafter_model == "elsewhere"
    graph: Any = done.program.graph
    assert graph.skeleton.share == "outline"
    assert (graph.drafter.num_draft_tokens, graph.drafter.top_k) == (5, 3)
    assert job(mine, drafter_model="given").options.drafter_model == "given"
    assert job(mine, model="another").options.model == "another"


def test_what_a_profile_says_goes_by_what_the_graph_has(mine: Path) -> None:
    assert job(mine, sets=["drafter.kind=vanilla"]).options.drafter_model == "path/to/small"
    graph: Any = job(mine, "bim_ngram").program.graph
    assert graph.drafter.num_draft_tokens == 3
    assert job(mine, "bim_plain").options.drafter_model == "embedded", "and is not asked for"
    graph = job(mine, "eagle").program.graph
    assert graph.skeleton is None and graph.limits.max_new_tokens == 99
    text = (mine / "specsot.yaml").read_text().replace("vanilla:", "dflash: d\n      vanilla:")
    (mine / "specsot.yaml").write_text(text)
    graph = job(mine, "bim_two_drafters").program.graph
    assert (graph.skeleton.drafter.model, graph.drafter.model) == ("path/to/small", "d")


@pytest.mark.parametrize("profile", PACKAGED)
def test_packaged_profiles_fit_graphs_that_they_have_a_drafter_for(
    profile: str, tmp_path: Path
) -> None:
    fitting = 0
    kind = ("drafter.kind=eagle2",) if profile.startswith("vicuna") else ()
    for name in ("eagle", "bim_eagle", "bim_dflash", "batching_ddtree", "bim_plain", "ngram"):
        sets = kind if name == "eagle" else ()
        try:
            fitting += job(tmp_path, name, profile, sets=sets).options.model != "embedded"
        except UsageError as error:
            assert f"profile '{profile}' has none; it has" in str(error)
    assert fitting == PACKAGED[profile]


def test_a_run_repeats_without_its_profile(mine: Path, tmp_path: Path) -> None:
    done = job(mine)
    document = run_document(done.options, done.program.graph, done.prompts, None)
    (tmp_path / "run.yaml").write_text(to_yaml(document))
    again = prepare(RunOptions(graph=str(tmp_path / "run.yaml")), Path("/"))
    assert again.program.graph == done.program.graph
    names = ("model", "drafter_model", "dtype", "stop_ids")
    assert all(getattr(again.options, n) == getattr(done.options, n) for n in names)
    (tmp_path / "specsot.yaml").write_text("profiles: {other: {model: m, drafters: {eagle3: h}}}")
    other = prepare(RunOptions(graph=str(tmp_path / "run.yaml"), profile="other"), tmp_path)
    assert (other.options.model, other.options.drafter_model) == ("m", "h")
    assert other.result is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: {}", ":1:15: profiles.a: the key 'model' is missing"),
        ("a: {model: m, modle: n}", "'modle'; did you mean 'model'?"),
        ("a: {model: m, drafters: {egle3: h}}", "drafters.egle3: no drafter 'egle3'; did you mean"),
        ("a: {model: m, drafters: {eagle3: 5}}", "must be a mapping, not the number 5"),
        ("a: {model: m, dtype: float33}", "profiles.a.dtype: must be 'float32'"),
        ("a: {model: m, stop_ids: [-1]}", "stop_ids.0: must be at least 0"),
        ("a: 5", "profiles.a: must be a mapping"),
        ("smollm2: {set: 5}", "profiles.smollm2.set: must be a mapping"),
        (
            "a: {model: m, set: {skeleton.shre: prompt}}",
            ":1:32: profiles.a: skeleton.shre: unknown key 'shre'; did you mean 'share'?",
        ),
        ("a: {model: m, set: {skeletn.share: prompt}}", "'skeletn'; did you mean 'skeleton'?"),
        (
            "a: {model: m, drafters: {eagle3: {num_draft: 3}}}",
            ":1:46: profiles.a: drafter.num_draft: unknown key 'num_draft'; did you mean "
            "'num_draft_tokens'?",
        ),
    ],
)
def test_a_mistake_of_a_profile_says_where(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "specsot.yaml").write_text(f"profiles: {{{text}}}")
    with pytest.raises(GraphError) as caught:
        job(tmp_path, profile="a")
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_what_a_profile_lacks_is_named(mine: Path) -> None:
    with pytest.raises(UsageError, match="--profile mne: no such profile; did you mean 'mine'"):
        job(mine, profile="mne")
    says = "'bim_dflash' drafts with dflash, profile 'mine' has none; it has eagle3, vanilla, ngram"
    with pytest.raises(UsageError, match=says):
        job(mine, "bim_dflash")


# -- files -----------------------------------------------------------------------------------------

pytestmark = pytest.mark.usefixtures("here")


def refused(ref: str) -> str:
    began = time.process_time()
    with pytest.raises(GraphError) as caught:
        open_graph(ref)
    assert time.process_time() - began < 1
    return told(caught.value)[0]


def own(path: Path, name: str) -> None:
    text = "version: 1\nname: x\nlayout: {kind: bim}\ndrafter: {kind: none}\ninitial: done\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}doc: {name}\nstates: {{done: {{final: true}}}}\n")


@pytest.mark.parametrize("ref", ["eagle", "eagle.yaml", "graphs/eagle.yaml", "graphs/eagle"])
def test_a_shipped_graph_has_four_names(ref: str) -> None:
    program = open_graph(ref)
    assert program.graph.name == "eagle"
    assert program.source.file == "graphs/eagle.yaml", "never a path of this machine"


@pytest.mark.parametrize("ref", ["eagle.yaml", "graphs/eagle.yaml", "eagle"])
def test_an_existing_file_wins(ref: str) -> None:
    own(Path(ref), "mine")
    program = open_graph(ref)
    assert program.graph.doc == "mine" and program.source.file == ref
    assert open_graph(str(Path(ref).absolute())).graph.doc == "mine"


def test_a_missing_file_names_what_there_is() -> None:
    message = refused("graphs/bim_eagel.yaml")
    assert message.startswith("graphs/bim_eagel.yaml: file: no such file or shipped graph")
    assert "; did you mean 'bim_eagle'?; shipped are: " + ", ".join(graph_names()) in message
    assert "did you mean" not in refused("nothing/like/that")


def test_a_folder_or_a_pipe_is_no_graph_and_does_not_block() -> None:
    Path("eagle").mkdir()
    assert open_graph("eagle").graph.name == "eagle"
    Path("mine.yaml").mkdir()
    assert refused("mine.yaml") == "mine.yaml: file: this is a directory, not a file"
    assert refused(".") == ".: file: this is a directory, not a file"
    os.mkfifo("pipe.yaml")
    assert refused("pipe.yaml") == "pipe.yaml: file: this is a pipe, not a file"
    assert refused("/dev/zero") == "/dev/zero: file: this is a device or socket, not a file"


def test_a_link_that_leads_nowhere_or_back() -> None:
    Path("a.yaml").symlink_to("b.yaml")
    assert refused("a.yaml").startswith("a.yaml: file: no such file")
    Path("b.yaml").symlink_to("a.yaml")
    assert refused("a.yaml") == "a.yaml: file: the symbolic link leads back to itself"
    Path("eagle").symlink_to("nowhere")
    assert refused("eagle").startswith("eagle: file: no such file"), "not the shipped one"
    own(Path("real.yaml"), "real")
    Path("link.yaml").symlink_to("real.yaml")
    assert open_graph("link.yaml").graph.doc == "real"


def test_a_file_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    own(Path("secret.yaml"), "secret")

    def forbidden(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    assert refused("secret.yaml") == "secret.yaml: file: permission denied"


def test_odd_names() -> None:
    assert "a path cannot hold a NUL character" in refused("a\0b")
    assert "file name too long" in refused("x" * 5000)
    assert refused("").startswith("'': file: no such file") or "directory" in refused("")
    assert refused("eagle/x").startswith("eagle/x: file: no such file")


def test_bytes_that_are_no_graph_and_some_that_are() -> None:
    Path("empty.yaml").write_bytes(b"")
    Path("huge.yaml").write_bytes(b"#" * 10_000_000)
    Path("utf16.yaml").write_bytes("a: 1".encode("utf-16"))
    assert refused("empty.yaml").startswith("empty.yaml:1:1: graph: the file is empty")
    assert "at most 262144 are read" in refused("huge.yaml")
    assert refused("utf16.yaml").startswith("utf16.yaml:1:1: yaml: UTF-16")
    own(Path("w.yaml"), "windows")
    data = Path("w.yaml").read_bytes().replace(b"\n", b"\r\n")
    Path("w.yaml").write_bytes(b"\xef\xbb\xbf" + data)
    assert open_graph("w.yaml").graph.doc == "windows"


def test_only_graphs_are_listed() -> None:
    assert {"autoregressive", "batching_eagle", "bim_eagle", "bim_plain"} <= set(graph_names())
    assert all(open_source(name).data["name"] == name for name in graph_names())
