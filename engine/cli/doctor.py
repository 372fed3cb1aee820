"""`specsot doctor`: what is installed, whether it decodes as it must, how long things take."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..errors import Code, code_of, is_told, message_of
from ..limits import cpu_share, disturbance
from ..prepare.inputs import Prompt
from ..prepare.job import EMBEDDED, embedded_folder, machine, versions
from ..shell import complain, print_json
from ..signals import ending_with
from .options import flag, option

if TYPE_CHECKING:
    from ..record.metrics import Meter
    from ..run.session import Session

EMBEDDED_MODELS = ("target", "eagle3", "eagle2", "dflash", "vanilla")
PROMPTS = [Prompt("1", "Explain how volcanoes work.")]
GRAPHS = ("autoregressive", "eagle", "bim_plain", "bim_eagle")
EQUAL = (("autoregressive", "eagle"), ("bim_plain", "bim_eagle"))
TOKENS = 32
START_UPS = ("--help", "check")
Say = Callable[[str], None]


def doctor(
    as_json: bool = flag("One JSON document on stdout.", "--json"),
    threads: int | None = option(
        "CPU threads [1: the models are small].", envvar="SPECSOT_THREADS"
    ),
    rounds: int = option("Rounds over which the overhead is measured.", default=100),
) -> int:
    """Report the environment, test the installation on the embedded model, measure start-ups."""
    say: Say = (lambda line: None) if as_json else print
    report: dict[str, Any] = {"problems": [], "environment": describe_environment()}
    for name, value in report["environment"].items():
        say(f"{name}: {_words(value)}")
    report["start_up_seconds"] = start_ups()
    for name, seconds in report["start_up_seconds"].items():
        say(f"start-up {name}: {seconds:.2f} s")
    try:
        code = _self_test(report, say, threads, rounds)
    except Exception as error:
        report["problems"].append(message_of(error))
        code = code_of(error) if is_told(error) else Code.FAILED
    if as_json:
        print_json(**report)
    for problem in report["problems"]:
        complain(problem)
    say("all good" if code == Code.OK else "not good")
    return code


def describe_environment() -> dict[str, Any]:
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "versions": versions(),
        "machine": machine(),
        "torch threads": torch.get_num_threads(),
        "cuda devices": devices,
        "grammar engine": find_spec("llguidance") is not None,
        "embedded models": {name: _model(name) for name in EMBEDDED_MODELS},
    }


def _model(name: str) -> str:
    from ...models.files import ModelError
    from ...models.load.weights import model_hash

    folder = embedded_folder(name)
    if not (folder / "config.json").is_file():
        return "missing"
    try:
        size = sum(f.stat().st_size for f in folder.iterdir() if f.is_file()) / 1e6
        return f"{size:.1f} MB, sha256 {model_hash(folder)[:16]}"
    except ModelError as error:
        return f"broken: {error}"


def start_ups() -> dict[str, float]:
    seconds = {}
    for word in START_UPS:
        start_time = perf_counter()
        subprocess.run([sys.executable, "-m", "specsot", word], capture_output=True, check=False)
        seconds[f"specsot {word}"] = perf_counter() - start_time
    return seconds


def _self_test(report: dict[str, Any], say: Say, threads: int | None, rounds: int) -> Code:
    runs: list[dict[str, Any]] = []
    for run in try_graphs(threads):
        runs.append(run)
        pace = f"{run['tokens']} tokens in {run['seconds']:.2f} s, tau_step {run['tau_step']:.2f}"
        say(f"{run['graph']}: {pace}, digest {run['digest'][:16]}")
    report["self_test"] = runs
    report["problems"] += unequal(runs)
    meter = measure_overhead(threads, rounds)
    report["cpu_share"] = busy = min(cpu_share(0.1) for _ in range(3))
    if (reason := disturbance(busy)) is not None:
        say(f"warning: {reason}")
    share = meter.overhead_share
    names = ("rounds", "seconds", "tokens_per_second")
    report["overhead"] = {"share": share, **{name: getattr(meter, name) for name in names}}
    outside = f"{100 * share:.1f} % of {meter.rounds} rounds outside ops"
    say(f"overhead: {outside}, {meter.tokens_per_second:.0f} tokens/s")
    return Code.UNEQUAL if report["problems"] else Code.OK


def try_graphs(threads: int | None, max_new_tokens: int = TOKENS) -> Iterator[dict[str, Any]]:
    """Answer one question with every graph on the embedded models."""
    from ..run.session import perform
    from ..run.writer import answers_of, output_digest

    for graph in GRAPHS:
        start_time = perf_counter()
        session = _session(graph, threads, max_new_tokens)
        load_seconds = perf_counter() - start_time
        run, recorder, _ = perform(session, PROMPTS)
        meter = recorder.meter
        digest = output_digest(answers_of(run.requests, session.prompts))
        figures = {name: getattr(meter, name) for name in ("tokens", "seconds", "tau_step")}
        yield {"graph": graph, "digest": digest, **figures, "load_seconds": load_seconds}
        run.close()


def unequal(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Pairs of graphs whose answers differ though they must not."""
    digests = {run["graph"]: run["digest"] for run in runs}
    pairs = [(a, b) for a, b in EQUAL if a in digests and b in digests]
    return [f"{a} and {b} give different tokens" for a, b in pairs if digests[a] != digests[b]]


def measure_overhead(threads: int | None, rounds: int) -> "Meter":
    """The sums of at least `rounds` rounds, with the trace written as in `specsot run`."""
    from ..record.metrics import Meter
    from ..record.run_folder import RunFolder
    from ..run.session import perform

    session = _session("bim_eagle", threads, None)
    total = Meter()
    temporary = TemporaryDirectory()
    clean = ending_with(temporary.cleanup)
    with clean, temporary as folder, closing(RunFolder(Path(folder))) as files:
        while total.rounds < rounds:
            run, recorder, _ = perform(session, PROMPTS, write=files.trace)
            run.close()
            total.add(recorder.meter)
    return total


def _session(graph: str, threads: int | None, budget: int | None) -> "Session":
    from ..run.session import open_session

    models: Any = {"model": EMBEDDED, "drafter_model": EMBEDDED}
    return open_session(graph, **models, threads=threads, max_new_tokens=budget)


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
