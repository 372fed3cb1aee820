"""What this process may use of the machine: CPUs and memory, also inside a container."""

import os
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path
from time import perf_counter, thread_time

CGROUPS = Path("/sys/fs/cgroup")
SMALL = 64_000_000  # bytes of weights up to which a second thread gains nothing
MOST_THREADS = 4
UNDISTURBED = 0.85  # of a CPU, for a loop that does nothing else


def usable_cpus() -> int:
    """CPUs that the process may run on, and no more than a container's quota pays for."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([count, *map(ceil, _cpu_quotas())]))


def default_threads(weights: int) -> int:
    """Threads for a target of so many bytes.

    The products of a small one are over before a second thread has woken up; beside a neighbour
    that keeps a CPU busy they wait for it.
    """
    return 1 if weights <= SMALL else min(usable_cpus(), MOST_THREADS)


def free_memory() -> int | None:
    """Bytes that can still be taken; None where the system does not tell."""
    amounts = list(_memory_limits())
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        table = dict(line.split(":", 1) for line in lines)
        amounts.append(int(table["MemAvailable"].split()[0]) * 1024)
    return min(amounts, default=None)


def cpu_share(seconds: float = 0.03) -> float:
    """What a busy loop of so many seconds gets of a CPU: 1, and less where others want it too."""
    began = perf_counter()
    used = thread_time()
    while perf_counter() - began < seconds:
        pass
    return min(1.0, (thread_time() - used) / (perf_counter() - began))


def disturbance(share: float) -> str | None:
    """What to say of a machine on which a busy loop got this much of a CPU; None if it is idle."""
    if share >= UNDISTURBED:
        return None
    return f"others use this machine: a busy loop got {share:.0%} of a CPU; trust no times"


def _cpu_quotas() -> Iterator[float]:
    """CPUs' worth of time that control groups (version 2, version 1) allow."""
    for folder in _own_groups():
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            yield int(quota) / int(period)
    with suppress(OSError, ValueError, ZeroDivisionError):
        first = CGROUPS / "cpu" / "cpu.cfs_quota_us"
        share = int(first.read_text(encoding="ascii"))
        if share > 0:  # -1: as much as there is
            yield share / int(first.with_name("cpu.cfs_period_us").read_text(encoding="ascii"))


def _memory_limits() -> Iterator[int]:
    files = [folder / "memory.max" for folder in _own_groups()]
    for file in (*files, CGROUPS / "memory" / "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            yield int(file.read_text(encoding="ascii"))


def _own_groups() -> Iterator[Path]:
    """Folders of the process's control group of version 2 and of those above it."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):
                own = CGROUPS / line[3:].strip("/")
                yield from (own, *(one for one in own.parents if one.is_relative_to(CGROUPS)))
