"""Performance of cases: each is one command line, or one program, in a process and a folder alone.

The parent process imports the package once and forks a child per case, so that a case costs its own
work and no start. Children use the public surface alone: `python -m specsot`, and `import specsot`.
"""

import contextlib
import gc
import os
import re
import runpy
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..plug_ins import install

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "oracle"
PROCESSES = 2
PATIENCE = 240.0  # seconds of a case
QUIET = {"COLUMNS": "100", "LINES": "40", "TERM": "dumb", "NO_COLOR": "1", "LC_ALL": "C.UTF-8"}
SINGLE = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One command line, or one program, with the files that it finds in its folder.

    archive: name of a kept run folder, which is unpacked under `runs`."""

    part: str
    key: str
    words: Sequence[str] = ()
    code: str = ""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    archive: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a case left: its exit code, its streams with machine paths removed, its folder."""

    case: Case
    code: int
    out: str
    err: str
    folder: Path

    @property
    def run(self) -> Path:
        """The folder of the run that the case kept."""
        return (self.folder / "runs" / "latest").resolve()


def perform(cases: Sequence[Case], take: Callable[[Outcome], Sequence[Case]]) -> None:
    """Perform cases, two at a time; `take` reads each outcome and may return further cases."""
    waiting = list(cases)
    running: dict[int, tuple[Case, Path, float]] = {}
    done = 0
    while waiting or running:
        while waiting and len(running) < PROCESSES:
            case = waiting.pop(0)
            folder = Path(tempfile.mkdtemp(prefix="oracle-"))
            running[_fork(case=case, folder=folder)] = (case, folder, time.monotonic())
        ended = _ended(running)
        if ended is None:
            time.sleep(0.005)
            continue
        pid, code = ended
        case, folder, began = running.pop(pid)
        took = time.monotonic() - began
        done += 1
        texts = [_text(folder / name, folder=folder) for name in ("stdout", "stderr")]
        outcome = Outcome(case=case, code=code, out=texts[0], err=texts[1], folder=folder / "cwd")
        waiting += take(outcome)
        shutil.rmtree(folder, ignore_errors=True)
        left = len(waiting) + len(running)
        print(f"{done}/{done + left} {case.part} {case.key}: {took:.1f} s", file=sys.stderr)


def warm() -> None:
    """Import in this process what most cases need, by one small run."""
    os.environ.update(QUIET | SINGLE)
    install("eagle1")
    install("draft_lengths")
    for name in [one for one in os.environ if one.startswith("SPECSOT_")]:
        del os.environ[name]
    words = ["run", "bim_eagle", "Hello", "--max-new-tokens", "1", "--threads", "1", "-q"]
    kept = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        code = _program(["specsot", *words])
    for number, handler in kept.items():
        signal.signal(number, handler)
    if code:
        sys.exit("oracle: the first run fails")
    print(f"oracle: specsot of {sys.modules['specsot'].__file__}", file=sys.stderr)
    gc.collect()
    gc.freeze()


def pack(folder: Path, name: str) -> None:
    """Keep a run folder as a small archive without times and owners."""
    target = GOLDEN / "runs" / f"{name}.tar.xz"
    target.parent.mkdir(parents=True, exist_ok=True)

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = 0
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(target, "w:xz", preset=9) as archive:
        archive.add(folder, arcname=folder.name, filter=plain)


def _fork(case: Case, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        with _streams(folder):
            cwd = folder / "cwd"
            cwd.mkdir()
            for name, text in case.files.items():
                (cwd / name).parent.mkdir(parents=True, exist_ok=True)
                (cwd / name).write_bytes(text.encode() if isinstance(text, str) else text)
            if case.archive:
                with tarfile.open(GOLDEN / "runs" / f"{case.archive}.tar.xz") as archive:
                    archive.extractall(cwd / "runs", filter="data")
                (cwd / "runs" / "latest").symlink_to(next((cwd / "runs").iterdir()).name)
            os.chdir(cwd)
            if case.code:
                exec(compile(case.code, "<case>", "exec"), {"__name__": "__main__"})
                code = 0
            else:
                code = _program(["specsot", *case.words])
    except BaseException as error:
        with contextlib.suppress(OSError):
            (folder / "stderr").write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


@contextlib.contextmanager
def _streams(folder: Path) -> Iterator[None]:
    """Point the three standard streams at files of the folder."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _program(argv: Sequence[str]) -> int:
    """Run `python -m specsot` in this process and return its exit code."""
    sys.argv = list(argv)
    sys.modules.pop("specsot.__main__", None)
    try:
        runpy.run_module("specsot", run_name="__main__", alter_sys=False)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return int(ended.code or 0)
    return 0


def _ended(running: Mapping[int, tuple[Case, Path, float]]) -> tuple[int, int] | None:
    """A child that has ended, with its exit code; one that takes too long is killed."""
    for pid, (_, _, began) in running.items():
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return pid, os.waitstatus_to_exitcode(status)
        if time.monotonic() - began > PATIENCE:
            os.killpg(pid, signal.SIGKILL)
    return None


def _text(path: Path, folder: Path) -> str:
    """A stream's text without what differs from machine to machine and from run to run."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    import specsot

    places = {str(folder / "cwd"): "<cwd>", str(folder): "<tmp>"}
    package = Path(specsot.__file__).parent
    places |= {str(package): "<specsot>", str(package.resolve()): "<specsot>"}
    places |= {str(ROOT): "<specsot>", str(Path.home()): "<home>", sys.prefix: "<python>"}
    for place, name in places.items():
        text = text.replace(place, name)
    for pattern, name in PATTERNS:
        text = pattern.sub(name, text)
    return text


PATTERNS = [
    (re.compile(pattern, re.M), name)
    for pattern, name in (
        (r"\d{8}T\d{6}Z-(\w+?)-[0-9a-f]{6}\b", r"<time>-\1-<id>"),
        (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(\+00:00|Z| UTC)?", "<time>"),
        (r"^ +\d+\.\d s\b", "<s>"),
        (r"\b\d+(\.\d+)? (s|ms)\b", "<s>"),
        (r"\b\d+(\.\d+)? tokens/s", "<speed>"),
        (r'"(\w*wall_seconds?|microseconds_per_plan)": [\d.e-]+', r'"\1": "<time>"'),
        (r"overhead \d+(\.\d+)? %", "overhead <share>"),
    )
]
