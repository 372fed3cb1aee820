"""The command line before any model is loaded: help, usage, codes, what is imported."""

import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers.commands import CommandLine

from specsot.engine.cli.main import COMMANDS
from specsot.engine.errors import Code
from specsot.engine.prepare.options import OPTIONS, SESSION, flag_of
from specsot.engine.shell import DEBUG


def test_it_is_a_module_too() -> None:
    words = [sys.executable, "-m", "specsot", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("specsot 0.")


def test_help_lists_every_command_and_every_exit_code(cli: CommandLine) -> None:
    assert cli("--help") == 0
    text = cli.out
    assert "130 interrupted" in text
    for name in (command.name for command in COMMANDS):
        assert f"\n  {name} " in text
        assert cli(name, "--help") == 0 and cli.out.startswith(f"Usage: specsot {name}")


@pytest.mark.parametrize(
    "words, says",
    [
        (["rnu"], "No such command 'rnu'. Did you mean 'run'?"),
        (["run", "--sed", "1"], "No such option: --sed"),
        (["run", "--seed", "x"], "Invalid value for '--seed'"),
        (["run", "a", "b", "c"], "unexpected extra argument"),
        (["show"], "Missing argument"),
        (["show", "eagle", "--full", "--mermaid"], "are three ways to print a graph"),
        (["show", "eagle", "--set", "drafter.kind=none"], "--set changes no file"),
        (["check", "--nonsense"], "No such option: --nonsense"),
    ],
)
def test_wrong_usage_is_2(words: list[str], says: str, cli: CommandLine) -> None:
    assert cli(*words) == Code.USAGE
    assert says in cli.err and "Traceback" not in cli.err
    assert cli("show", "egle") == Code.GRAPH and "did you mean 'eagle'?" in cli.err


def help_of(command: str, cli: CommandLine) -> str:
    assert cli(command, "--help") == 0
    return " ".join(cli.out.split())


def test_run_offers_every_option_with_its_help_and_its_variable(cli: CommandLine) -> None:
    page = help_of("run", cli)
    for name, text in OPTIONS.items():
        assert text.help in page
        assert text.argument or f" {flag_of(name)} " in page
    mirrors = {"SPECSOT_GRAPH", "SPECSOT_MAX_NEW_TOKENS", "SPECSOT_JSON", "SPECSOT_DOCUMENT"}
    assert all(f"[env var: {name}]" in page for name in mirrors) and "SPECSOT_SET" not in page


@pytest.mark.parametrize(
    ("command", "more"), [("compare", set()), ("certify", {"workers", "cluster"})]
)
def test_commands_with_sessions_offer_their_options_alone(
    command: str, more: set[str], cli: CommandLine
) -> None:
    page = help_of(command, cli)
    offered = {*SESSION, "prompts", "as_json", *more}
    assert {name for name in OPTIONS if f" {flag_of(name)} " in page} == offered
    assert OPTIONS["prompts"].help not in page and "[ten packaged ones]" in page


def test_options_mirror_the_environment(
    here: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setenv("SPECSOT_GRAPH", "eagel")
    assert cli("run", "-q") == Code.GRAPH
    assert "did you mean 'eagle'?" in cli.err
    monkeypatch.setenv("SPECSOT_GRAPH", "eagle")
    monkeypatch.setenv("SPECSOT_EXPECT_DIGEST", "?")
    assert cli("run", "-q") == Code.USAGE
    assert "--expect-digest" in cli.err


def test_old_names_of_options_are_read_with_a_warning(cli: CommandLine) -> None:
    assert cli("run", "bim_eagle", "x", "--slow=-1") == Code.USAGE
    renamed = "specsot: --slow is now called --step-delay\n"
    assert cli.err == f"{renamed}specsot: --step-delay takes seconds, 0 to 3600\n"
    assert cli("run", "bim_eagle", "x", "--step-delay", "-1", "--", "--slow") == Code.USAGE
    assert "is now called" not in cli.err


def test_a_fault_is_one_line(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    monkeypatch.setattr("specsot.engine.cli.graphs.op_table", partial({}.__getitem__, "oh"))
    assert cli("list") == Code.FAILED
    assert cli.err == (
        f"specsot: KeyError: 'oh'\nspecsot: this is a fault of specsot; {DEBUG}=1 shows where\n"
    )


CALL = """
import sys
from specsot.engine.cli.main import main
heavy = sys.argv[1].split()
for words in sys.argv[2:]:
    try:
        main(words.split())
    except SystemExit:
        pass
    print("loaded:", [name for name in heavy if name in sys.modules])
"""


def loaded(heavy: str, *commands: str) -> list[str]:
    """After each command, which of these modules are loaded."""
    words = [sys.executable, "-c", CALL, heavy, *commands]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("loaded: ")]


def test_models_are_loaded_without_torchs_compiler(here: Path) -> None:
    """Each of the useless modules costs a second of CPU time or more."""
    useless = "torch._dynamo torch._inductor sympy torch.distributed.fsdp gguf"
    graphs = ("autoregressive", "eagle", "eagle2", "dflash", "speculative", "bim_eagle")
    runs = [f"run {graph} Why? --max-new-tokens 1 --no-tui --quiet" for graph in graphs]
    assert loaded(useless, *runs) == ["loaded: []"] * len(runs)
    assert len(list((here / "runs").glob("*/summary.md"))) >= len(runs), "they end well"


HEAVY = "torch transformers pydantic rich numpy transitions"


@pytest.mark.parametrize(
    "heavy, commands",
    [
        (HEAVY, ["--help", "--version"]),
        ("torch transformers rich numpy transitions", ["check"]),
        ("torch transformers rich", ["run bim_eagl", "run bim_eagle --prompts none.txt"]),
        ("torch transformers numpy transitions", ["list", "schema", "show eagle --full"]),
        ("torch transformers matplotlib", ["bench --list"]),
    ],
)
def test_light_commands_import_little(heavy: str, commands: list[str]) -> None:
    assert loaded(heavy, *commands) == ["loaded: []"] * len(commands)


def test_help_is_quick() -> None:
    """Processor time, so that a busy machine does not matter; the best of three."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        loaded("", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.4
