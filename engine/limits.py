"""CPUs and memory available to this process, also inside a container."""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path
from time import perf_counter, thread_time

CGROUPS = Path("/sys/fs/cgroup")
SMALL_WEIGHTS = 64_000_000  # bytes up to which a second thread gains nothing
MAX_THREADS = 4
IDLE_SHARE = 0.85  # of a CPU, for a busy loop on an idle machine


def usable_cpus() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    counts = [len(affinity(0)) if affinity else os.cpu_count() or 1]
    for folder in _own_groups():
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            counts.append(ceil(int(quota) / int(period)))
    with suppress(OSError, ValueError, ZeroDivisionError):
        first = CGROUPS / "cpu" / "cpu.cfs_quota_us"
        share = int(first.read_text(encoding="ascii"))
        if share > 0:  # -1: unlimited
            period = first.with_name("cpu.cfs_period_us").read_text(encoding="ascii")
            counts.append(ceil(share / int(period)))
    return max(1, min(counts))


def default_threads(weights: int) -> int:
    """Threads for a target with `weights` bytes: matrix products of a small model end before a
    second thread wakes up, and on a busy machine they wait for it."""
    return 1 if weights <= SMALL_WEIGHTS else min(usable_cpus(), MAX_THREADS)


def free_memory() -> int | None:
    """Bytes of free memory; None if the system does not report it."""
    files = [folder / "memory.max" for folder in _own_groups()]
    amounts = []
    for file in (*files, CGROUPS / "memory" / "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            amounts.append(int(file.read_text(encoding="ascii")))
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        table = dict(line.split(":", 1) for line in lines)
        amounts.append(int(table["MemAvailable"].split()[0]) * 1024)
    with suppress(OSError, ValueError):
        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        if most != resource.RLIM_INFINITY:
            amounts.append(max(most - pages * resource.getpagesize(), 0))
    return min(amounts, default=None)


def release_memory() -> None:
    """Release freed memory to the system; glibc would keep hundreds of MB after loading."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def cpu_share(seconds: float = 0.03) -> float:
    """The share of a CPU that a busy loop gets: 1 on an idle machine."""
    start = perf_counter()
    used = thread_time()
    while perf_counter() - start < seconds:
        pass
    return min(1.0, (thread_time() - used) / (perf_counter() - start))


def disturbance(share: float) -> str | None:
    if share >= IDLE_SHARE:
        return None
    return f"others use this machine: a busy loop got {share:.0%} of a CPU; trust no times"


def _own_groups() -> Iterator[Path]:
    """Folders of the process's control group (version 2) and of its parents."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):
                group = CGROUPS / line[3:].strip("/")
                yield group
                yield from (parent for parent in group.parents if parent.is_relative_to(CGROUPS))
