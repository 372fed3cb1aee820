"""`specsot doctor`: what is installed, whether it decodes as it must, how long things take."""

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import yaml

from ..bench.experiment import experiment_of_sides, prepare_experiment
from ..errors import Code, code_of, is_told, message_of
from ..prepare.job import EMBEDDED, embedded_folder, machine, versions
from ..prepare.options import RunOptions
from ..shell import complain, print_json
from .options import flag, option

EMBEDDED_MODELS = ("target", "eagle3", "eagle2", "dflash", "vanilla", "medusa")
GRAPHS = ("autoregressive", "eagle", "bim_plain", "bim_eagle")
FIGURES = ("speedup_per_token", "ms_per_token", "tau_step", "overhead_share")


def doctor(
    as_json: bool = flag("One JSON document on stdout.", "--json"),
    threads: int | None = option(
        "CPU threads [1: the models are small].", envvar="SPECSOT_THREADS"
    ),
    repeats: int = option("Answers of every graph.", default=5, min=1, max=1000),
) -> int:
    """Report the environment, test the installation on the embedded model, measure start-ups."""
    import torch

    say: Callable[[str], None] = (lambda line: None) if as_json else print
    devices = range(torch.cuda.device_count())
    environment = {
        "versions": versions(),
        "machine": machine(),
        "torch threads": torch.get_num_threads(),
        "cuda devices": [torch.cuda.get_device_name(device) for device in devices],
        "grammar engine": find_spec("llguidance") is not None,
        "embedded models": {name: _model(name) for name in EMBEDDED_MODELS},
    }
    found = {"environment": environment, "start_up_seconds": start_ups()}
    say(yaml.safe_dump(found, sort_keys=False, width=100).rstrip())
    report: dict[str, Any] = {"problems": [], **found}
    try:
        from ..bench import render
        from ..bench.comparison import measure

        # Graphs on one question, as in `specsot bench`: equal tokens, speed, overhead.
        experiment = experiment_of_sides(
            "doctor", GRAPHS, count=1, repeats=repeats, figures=FIGURES
        )
        models: Any = {"model": EMBEDDED, "drafter_model": EMBEDDED}
        options = RunOptions(**models, threads=threads, max_new_tokens=32)
        report["self_test"] = result = measure(prepare_experiment(experiment, options))
        report["problems"] += result["problems"]
        if result["rows"]:
            notes = [*render.equality_lines(result), *render.measured_words(result)]
            say(render.console(experiment, result, notes))
        if failures := result["differences"]:
            branches = "1 branch differs" if failures == 1 else f"{failures} branches differ"
            report["problems"].append(f"{branches} where equality is promised")
        code = Code(result["exit_code"])
    except Exception as error:
        report["problems"].append(message_of(error))
        code = code_of(error) if is_told(error) else Code.FAILED
    if as_json:
        print_json(**report)
    for problem in report["problems"]:
        complain(problem)
    say("all good" if code == Code.OK else "not good")
    return code


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
    for word in ("--help", "check"):
        start_time = perf_counter()
        subprocess.run([sys.executable, "-m", "specsot", word], capture_output=True, check=False)
        seconds[f"specsot {word}"] = round(perf_counter() - start_time, 2)
    return seconds
