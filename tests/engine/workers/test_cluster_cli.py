"""`specsot run --workers` and `specsot cluster`: what they refuse, and the commands of the page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import CommandLine, certify_command, ended
from helpers.pages import blocks_of
from helpers.servers import pids_of

from specsot.engine.cli.run_command import run_command
from specsot.engine.errors import Code
from specsot.engine.prepare.options import RunOptions
from specsot.engine.workers import ray_workers

Patch = pytest.MonkeyPatch
Output = pytest.CaptureFixture[str]
BEES = "Tell me about honey bees."
AUTO = ("drafter.num_draft_tokens=auto",)


def refused(capsys: Output, **options: Any) -> str:
    asked = {"graph": "bim_plain", "workers": 2, **options}
    assert run_command(RunOptions(**asked)) == Code.USAGE
    return capsys.readouterr().err


def test_a_certificate_says_at_once_what_workers_do_not_do(capsys: Output) -> None:
    assert certify_command(("bim_blend_eagle",), RunOptions(workers=2)) == Code.USAGE
    assert "has blend, which one engine does" in capsys.readouterr().err


def test_without_ray_a_line_tells_of_it(capsys: Output, here: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(ray_workers, "find_spec", lambda name: None)
    line = "specsot: workers are Ray actors: pip install 'specsot[ray]'\n"
    assert refused(capsys) == line


@pytest.mark.parametrize(
    ("options", "sizes", "why"),
    [
        ({"step": True}, (1, 1), "--step looks into one engine"),
        ({"graph": "beam"}, (1, 1), "graph 'beam' has beam, which one engine does"),
        ({"graph": "bim_attend_merge"}, (1, 1), "has skeleton.merge, which one engine does"),
        ({"graph": "blend_eagle"}, (1, 1), "has blend, which one engine does"),
        ({"graph": "blend_eagle"}, (2, 1), "has blend, which one engine does"),
        ({"workers": 0}, (1, 1), "--workers 0: "),
        ({"cluster": "nowhere"}, (1, 1), "--cluster nowhere: must be `local`, or HOST:PORT"),
        ({"cluster": "127.0.0.1:65536"}, (1, 1), "127.0.0.1:65536: must be `local`, or HOST:PORT"),
        ({}, (3, 1), "cluster.skeleton.tp 3: there are 2 workers"),
        ({}, (1, 4), "cluster.branches.tp 4: there are 2 workers"),
        ({"workers": 3}, (3, 2), "3 and branches.tp 2: one of them must be a multiple"),
        ({"graph": "bim_eagle", "sets": AUTO}, (2, 1), "give drafter.costs"),
    ],
)
def test_what_workers_do_not_do_is_refused(
    options: dict[str, Any], sizes: tuple[int, int], why: str, capsys: Output, here: Path
) -> None:
    block = f"cluster: {{skeleton: {{tp: {sizes[0]}}}, branches: {{tp: {sizes[1]}}}}}\n"
    Path("specsot.yaml").write_text(block)
    told = refused(capsys, **options)
    assert why in told and told.count("\n") == 1


def test_a_block_with_mistakes_is_told_with_its_places(capsys: Output, here: Path) -> None:
    text = "cluster:\n  wrokers: 2\n  interface: lo\n  skeleton: {tp: 0}\n"
    Path("specsot.yaml").write_text(text)
    assert run_command(RunOptions("bim_plain", workers=2)) == Code.GRAPH
    told = capsys.readouterr().err
    for place in (":2:3: cluster.wrokers: unknown key", ":3:14: cluster.interface: must be an IP"):
        assert place in told
    assert ":4:18: cluster.skeleton.tp: must be at least 1, not 0" in told


def test_the_commands_of_the_page(here: Path, cli: CommandLine, monkeypatch: Patch) -> None:
    """Those that connect to Ray in processes of their own, as its token is read once in each."""
    pytest.importorskip("ray")
    file = here / "cluster.json"
    more = {"SPECSOT_CLUSTER_FILE": str(file), "SPECSOT_THREADS": "1"}
    more["SPECSOT_MAX_NEW_TOKENS"] = "8"
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    (_, staying) = [one for one in blocks_of("docs/cluster.md") if one.skipped == "other test"]
    commands = [line.split() for line in staying.commands.splitlines()]
    assert [words[2] for words in commands if words[1] == "cluster"] == ["up", "status", "down"]
    for words in (("status",), ("scale", "2")):
        assert cli("cluster", *words) == 1 and "no cluster is up" in cli.err
    assert cli("run", "bim_dflash", BEES) == 0
    digest = _digest(cli.err)
    address = ended(("cluster", "up", "bim_dflash", "--workers", "2"), here, more).stdout.strip()
    told = json.loads(file.read_text())
    try:
        assert told["address"] == address and file.stat().st_mode & 0o777 == 0o600
        assert cli("cluster", "up", "bim_dflash") == 1 and "is up at" in cli.err
        words = ("run", "bim_dflash", "--workers", "2", "--cluster", address, BEES)
        assert _digest(ended(words, here, more).stderr) == digest
        assert ended(("cluster", "status"), here, more).stdout.count(": free") == 2
        assert cli("cluster", "scale", "2") == 1
        assert "no server with --workers runs" in cli.err
    finally:
        assert cli("cluster", "down") == 0
    assert not pids_of(told["folder"])
    assert not Path(told["folder"]).exists() and not file.exists()


def _digest(told: str) -> str:
    (found,) = re.findall(r"^digest (\w+)$", told, re.M)
    return str(found)
