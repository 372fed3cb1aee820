"""What a process may use: affinity, control groups of both versions, memory; and signs of life."""

import os
from pathlib import Path

import pytest

from specsot.engine import limits, shell


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    monkeypatch.setattr(limits, "_own_groups", lambda: iter((tmp_path / "a" / "b", tmp_path / "a")))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "memory").mkdir()
    return tmp_path


def test_without_a_quota_affinity_counts(groups: Path) -> None:
    (groups / "a" / "cpu.max").write_text("max 100000\n")
    (groups / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert limits.usable_cpus() == 8


@pytest.mark.parametrize(
    ("file", "text", "cpus"),
    [
        ("a/cpu.max", "300000 100000", 3),
        ("a/b/cpu.max", "150000 100000", 2),
        ("cpu/cpu.cfs_quota_us", "50000", 1),
    ],
)
def test_a_quota_counts(file: str, text: str, cpus: int, groups: Path) -> None:
    (groups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (groups / file).write_text(text + "\n")
    assert limits.usable_cpus() == cpus


def test_a_small_target_gets_one_thread(groups: Path) -> None:
    (groups / "a" / "cpu.max").write_text("300000 100000\n")
    assert limits.default_threads(limits.SMALL_WEIGHTS) == 1
    assert limits.default_threads(limits.SMALL_WEIGHTS + 1) == 3
    (groups / "a" / "cpu.max").unlink()
    assert limits.default_threads(1 << 40) == limits.MAX_THREADS


def test_memory_is_what_the_group_allows(groups: Path) -> None:
    before = limits.free_memory()
    assert before is not None and before > 1 << 20
    (groups / "memory" / "memory.limit_in_bytes").write_text("4096\n")
    assert limits.free_memory() == 4096
    (groups / "a" / "memory.max").write_text("2048\n")
    assert limits.free_memory() == 2048


def test_a_machine_that_others_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.0 < limits.cpu_share(0.01) <= 1.0
    used = iter((5.0, 5.004))
    monkeypatch.setattr(limits, "thread_time", lambda: next(used))
    share = limits.cpu_share(0.01)
    assert 0.1 < share <= 0.4
    assert limits.disturbance(1.0) is None
    assert "others use this machine: a busy loop got 40% of a CPU" in str(limits.disturbance(0.4))


def test_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 3.0, 11.0, 11.0, 12.0, 30.0, 30.0])
    monkeypatch.setattr(shell, "monotonic", lambda: next(clock))
    with shell.working("working ...") as tell:
        for number in range(4):
            tell(f"{number} of 4")
    assert capsys.readouterr().err == "1 of 4\n3 of 4\n"
