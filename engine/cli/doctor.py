"""`specsot doctor`: what is installed, whether it decodes as it must, how long things take."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from time import perf_counter
from typing import Annotated, Any

from typer import Exit

from ..errors import Code, code_of, is_told, message_of
from ..limits import cpu_share, disturbance
from ..prepare.environment import embedded_folder, machine, versions
from ..shell import complain, print_json
from .options import option

EMBEDDED_MODELS = ("target", "eagle3", "eagle2", "dflash", "vanilla")
START_UPS = {
    "specsot --help": "from specsot.engine.cli.main import main; main(['--help'])",
    "specsot check": "from specsot.engine.cli.main import main; main(['check'])",
}


def doctor(
    as_json: Annotated[bool, option("One JSON document on stdout.", "--json")] = False,
    threads: Annotated[
        int | None, option("CPU threads [1: the models are small].", envvar="SPECSOT_THREADS")
    ] = None,
    rounds: Annotated[int, option("Rounds over which the overhead is measured.")] = 100,
) -> None:
    """Report the environment, test the installation on the embedded model, measure start-ups."""
    say: Callable[[str], None] = (lambda line: None) if as_json else print
    for name, value in (environment := describe_environment()).items():
        say(f"{name}: {_words(value)}")
    for name, seconds in (times := start_ups()).items():
        say(f"start-up {name}: {seconds:.2f} s")
    report = {"problems": [], "environment": environment, "start_up_seconds": times}
    code = _self_test(report, say, threads, rounds)
    if as_json:
        print_json(**report)
    for problem in report["problems"]:
        complain(problem)
    say("all good" if code == Code.OK else "not good")
    raise Exit(code)


def describe_environment() -> dict[str, Any]:
    """Versions, machine, accelerators, embedded models."""
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
    from ...models.load.checkpoint import model_hash

    folder = embedded_folder(name)
    if not (folder / "config.json").is_file():
        return "missing"
    try:
        size = sum(f.stat().st_size for f in folder.iterdir() if f.is_file()) / 1e6
        return f"{size:.1f} MB, sha256 {model_hash(folder)[:16]}"
    except ModelError as error:
        return f"broken: {error}"


def start_ups() -> dict[str, float]:
    """Seconds that a fresh process takes for each of them."""
    seconds = {}
    for name, code in START_UPS.items():
        start_time = perf_counter()
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        seconds[name] = perf_counter() - start_time
    return seconds


def _self_test(
    report: dict[str, Any], say: Callable[[str], None], threads: int | None, rounds: int
) -> int:
    """Fills the report; returns the exit code."""
    from ..certify.self_test import measure_overhead, try_graphs, unequal

    runs = []
    try:
        for run in try_graphs(threads):
            runs.append(run)
            pace = f"{run.tokens} tokens in {run.seconds:.2f} s, tau_step {run.tau_step:.2f}"
            say(f"{run.graph}: {pace}, digest {run.digest[:16]}")
        report["self_test"] = list(map(asdict, runs))
        report["problems"] += unequal(runs)
        meter = measure_overhead(threads, rounds)
    except Exception as error:
        report["problems"].append(message_of(error))
        return code_of(error) if is_told(error) else Code.FAILED
    report["cpu_share"] = busy = min(cpu_share(0.1) for _ in range(3))
    if (reason := disturbance(busy)) is not None:
        say(f"warning: {reason}")
    names = ("rounds", "seconds", "tokens_per_second")
    share = meter.overhead_share
    figures = {name: getattr(meter, name) for name in names}
    report["overhead"] = {"share": share, **figures}
    outside = f"{100 * share:.1f} % of {meter.rounds} rounds outside ops"
    say(f"overhead: {outside}, {meter.tokens_per_second:.0f} tokens/s")
    return Code.UNEQUAL if report["problems"] else Code.OK


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
