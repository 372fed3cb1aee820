"""Commands whose streams, disk or life are taken away, each in a forked child of one process."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random

from .fuzz import CODES, NEVER

SECONDS = 60.0  # in which every process has to come to its end
RUNNER = """
import glob, importlib, json, os, resource, signal, sys, time
from specsot.engine.cli.main import COMMANDS
from specsot.engine.cli.start import main
from specsot.engine.signals import end_at_once
for name in [f"cli.{one.module}" for one in COMMANDS] + [
    *("cli.live_run", "run.api", "run.writer", "bench.comparison", "bench.render")
]:
    importlib.import_module(f"specsot.engine.{name}")
SECONDS = float(sys.argv[1])

def stream(kind, number, folder):
    if kind == "closed":
        os.close(number)
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if kind == "gone":
        reader, file = os.pipe()
        os.close(reader)
    elif kind == "full":
        file = os.open("/dev/full", os.O_WRONLY)
    elif kind == "reading":
        file = os.open(os.devnull, os.O_RDONLY)
    else:
        file = os.open(os.path.join(folder, f"stream{number}"), flags, 0o600)
    if file != number:  # it may be that of a stream which was closed
        os.dup2(file, number)
        os.close(file)

def child(case, pipe):
    os.chdir(case["folder"])
    if not case["stdin"]:
        os.close(0)
    stream(case["stderr"], 2, case["folder"])
    if case["stdout"] == "pipe":
        os.dup2(pipe, 1)
    else:
        stream(case["stdout"], 1, case["folder"])
    if case["disk"] >= 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (case["disk"], case["disk"]))
    for number, name in ((1, "stdout"), (2, "stderr")):
        closed = case[name] == "closed"
        file = None if closed else os.fdopen(number, "w", encoding="utf-8", closefd=False)
        setattr(sys, name, file)
    sys.argv = ["specsot", *case["words"]]
    main()

for number in (signal.SIGINT, signal.SIGTERM):  # as a terminal's jobs are born, whatever this is
    signal.signal(number, signal.SIG_DFL)
end_at_once()  # a child may be hit before it gets to do so itself
for case in json.load(sys.stdin):
    reader, pipe = os.pipe()
    os.set_blocking(reader, False)
    pid = os.fork()
    if pid == 0:
        child(case, pipe)
        sys.exit(0)
    began, signals, code = time.monotonic(), list(case["signals"]), None
    moment = None if case["within"] else began
    while code is None:
        passed = time.monotonic() - began
        if moment is None and glob.glob(os.path.join(case["folder"], case["within"])):
            moment = time.monotonic()
        while moment and signals and time.monotonic() - moment >= signals[0][1]:
            os.kill(pid, signal.Signals[signals.pop(0)[0]])
        if passed > SECONDS:
            os.kill(pid, signal.SIGKILL)
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.005)
    os.close(pipe)
    if case["stdout"] == "pipe":
        with open(os.path.join(case["folder"], "stream1"), "wb") as file:
            file.write(os.read(reader, 1 << 16))
    os.close(reader)
    end = {"code": code, "seconds": time.monotonic() - began, "sent": not signals}
    print("ended", json.dumps(end), flush=True)
"""

ANSWER = ["run", "autoregressive", "Why is the sky blue?", "--max-new-tokens", "6", "--no-tui"]
LONG = ["run", "bim_eagle", "Make a plan for a picnic.", "--max-new-tokens", "150", "--no-tui"]
PAIR = ["autoregressive", "autoregressive@layout.max_num_branches=2", "--prompts", "two.txt"]
COMPARE = ["compare", *PAIR, "--max-new-tokens", "4"]
SWEEP = ["sweep", "autoregressive", "--vary", "layout.max_num_branches=1,2", *COMPARE[3:]]
OTHERS = [["list"], ["show", "eagle", "--full"], ["schema"], ["explain"], ["check", "bim_eagel"],
          ["runs", "list"], ["--help"], ["list", "--json"]]  # fmt: skip
STREAMS = ("file", "closed", "full", "gone", "reading")
DISKS = (0, 100, 2000, 20_000)  # bytes that a file may have
RUNNING = "runs/2*/trace.jsonl"
HALTED = {130: "interrupted", 143: "terminated"}
NOWHERE = ("--runs-dir", "/proc/nowhere")


@dataclass(frozen=True)
class StreamCase:
    """One process. disk: bytes that any file may have, -1 for no limit.

    signals: with seconds, counted from the start, or from when there is a file `within` its folder.
    Streams: a `file`; `closed`; on a `full` disk; a pipe whose reader is `gone`; open for `reading`
    only; a `pipe` with a reader, which no disk limits."""

    words: list[str]
    stdout: str = "file"
    stderr: str = "file"
    stdin: bool = True
    disk: int = -1
    signals: tuple[tuple[str, float], ...] = ()
    within: str = ""
    folder: str = ""


def stream_cases(draw: Random) -> list[StreamCase]:
    """Every kind of stream for every kind of command, every disk, signals at drawn moments."""
    ways = [pair for pair in product(STREAMS, STREAMS) if pair != ("file", "file")]
    cases = [StreamCase(ANSWER, *pair) for pair in ways]
    cases += [StreamCase([*ANSWER, *NOWHERE], *pair) for pair in draw.sample(ways, 8)]
    cases += [StreamCase([*ANSWER, "--json"], one, stdin=False) for one in STREAMS]
    cases += [StreamCase([*draw.choice([COMPARE, SWEEP]), *out], one)
              for one in STREAMS[1:] for out in ([], ["--out", "kept"])]  # fmt: skip
    cases += [StreamCase(words, one, draw.choice(STREAMS)) for words in OTHERS
              for one in draw.sample(STREAMS[1:], 2)]  # fmt: skip
    cases += [StreamCase(ANSWER, "pipe", disk=size) for size in DISKS]
    cases += [StreamCase([*SWEEP, "--out", "kept"], "pipe", disk=size) for size in DISKS]
    for name in ("SIGINT", "SIGTERM", "SIGPIPE"):
        for words in (LONG, LONG, [*SWEEP, "--out", "kept"], ANSWER, ["check"]):
            cases.append(StreamCase(words, signals=((name, round(draw.uniform(0.0, 2.5), 3)),)))
        for most in (0.0, 0.3, 0.8):
            moment = round(draw.uniform(0.0, most), 3)
            cases.append(StreamCase(LONG, signals=((name, moment),), within=RUNNING))
    cases.append(StreamCase(LONG, signals=(("SIGINT", 0.2), ("SIGINT", 0.25)), within=RUNNING))
    cases.append(StreamCase(LONG, signals=(("SIGTERM", 0.2), ("SIGINT", 0.22)), within=RUNNING))
    return cases


def run_cases(cases: list[StreamCase], folder: Path) -> tuple[list[int], list[str]]:
    """The exit code of each, and everything that was wrong."""
    placed = [StreamCase(**asdict(one) | {"folder": str(folder / str(number))})
              for number, one in enumerate([StreamCase(ANSWER), *cases])]  # fmt: skip
    for one in placed:
        Path(one.folder).mkdir()
        Path(one.folder, "two.txt").write_text("Why is the sky blue?\nWhat is a lake?\n")
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(SECONDS)],
        input=json.dumps([asdict(one) for one in placed]),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line[6:] for line in done.stdout.splitlines() if line.startswith("ended ")]
    ended = [json.loads(line) for line in lines]
    assert len(ended) == len(placed), done.stderr
    answer = Path(placed[0].folder, "stream1").read_text(encoding="utf-8")
    assert ended[0]["code"] == 0 and answer.strip()
    codes, faults = [], []
    for one, end in list(zip(placed, ended, strict=True))[1:]:
        codes.append(end["code"])
        faults += [f"{one}: {fault}" for fault in _faults(one, end, answer.strip())]
    return codes, faults


def _faults(one: StreamCase, end: dict[str, float], answer: str) -> list[str]:
    said = {name: _read(Path(one.folder, name)) for name in ("stream1", "stream2")}
    code, told = int(end["code"]), said["stream1"] + said["stream2"]
    faults = [f"{word}: {told[-900:]}" for word in NEVER if word in told]
    if code not in CODES or (code in HALTED and not (one.signals and HALTED[code] in told)):
        faults.append(f"ended with {code}: {told[-900:]}")
    once = len(one.signals) == 1 and one.signals[0][0] != "SIGPIPE"  # a second one stops at once
    if one.within and end["sent"] and once and not _kept(one, code):
        faults.append(f"ended with {code}, and the run folder does not say so: {told[-900:]}")
    if end["seconds"] > SECONDS:
        faults.append("a hang")
    if one.words[:6] == ANSWER and not one.signals and not _found(one, answer, told):
        faults.append(f"lost: ended with {code}: {told[-900:]}")
    if one.stdout in ("full", "closed", "reading") and code == 0:
        faults.append("nothing was written, and the code is 0")
    if one.words[0] == "sweep" and "--out" in one.words and one.disk < 0 and code == 0:
        faults += [] if Path(one.folder, "kept", "table.md").is_file() else ["no table was kept"]
    return faults


def _kept(one: StreamCase, code: int) -> bool:
    status = HALTED.get(code, "ok")
    texts = [_read(path) for path in Path(one.folder).glob("runs/2*/metrics.json")]
    return [json.loads(text)["status"] for text in texts] == [status]


def _found(one: StreamCase, answer: str, told: str) -> bool:
    """Whether the answer is anywhere that could take it."""
    kept = [_read(path) for path in Path(one.folder).glob("runs/2*/outputs.jsonl")]
    short = [json.loads(line)["text"] for text in kept for line in text.splitlines()]
    nowhere = one.stderr != "file" and (NOWHERE[1] in one.words or one.disk >= 0)
    return any(answer in text for text in (told, *short)) or (one.stdout != "file" and nowhere)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
