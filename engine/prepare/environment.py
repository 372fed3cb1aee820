"""Where a run happens: model folders, versions, threads, device."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.resources import files
from pathlib import Path

from ...models.files import ModelError
from ...states.graph.plugins import DRAFTERS_GROUP, OPS_GROUP
from ..errors import UsageError
from ..limits import default_threads, usable_cpus
from .files import PACKAGE
from .job import EMBEDDED, Job

PACKAGES = ["specsot", "torch", "transformers", "tokenizers", "safetensors", "llguidance"]
PACKAGES += ["gguf", "bm25s", "transitions", "numpy", "pydantic", "rich", "typer"]


def embedded_folder(name: str) -> Path:
    """The folder of a packaged model: the target, or a drafter's kind."""
    return Path(str(files(PACKAGE) / "models" / "embedded" / name))


def model_folder(ref: str, kind: str, dtype: str = "float32") -> Path:
    """The folder of a model named by the user; kind: `target` or a drafter's kind. Raises
    ModelError, UsageError: the model is missing."""
    if ref != EMBEDDED:
        from ..hub import find_model

        return find_model(ref, dtype)
    folder = embedded_folder(kind)
    if not (folder / "config.json").is_file():
        instead = "--model" if kind == "target" else "--drafter-model"
        reason = f"this installation has no embedded {kind} model: name one with {instead}"
        raise ModelError(EMBEDDED, reason)
    return folder


def model_folders(job: Job) -> tuple[Path, Path | None]:
    """Target and drafter folders; no drafter for graphs that draft without a model."""
    drafter = job.program.graph.drafter
    dtype = job.options.dtype
    target = model_folder(job.options.model, "target", dtype)
    named = job.options.drafter_model
    kind = drafter.checkpoint or drafter.kind
    return target, model_folder(named, kind, dtype) if drafter.has_model else None


def threads_of(job: Job) -> int:
    """The CPU threads of a job: its option, else a default for the size of the target."""
    if job.options.threads is not None:
        return job.options.threads
    folder = model_folder(job.options.model, "target", job.options.dtype)
    return default_threads(sum(file.stat().st_size for file in folder.glob("*.safetensors")))


def versions() -> dict[str, str]:
    """Of Python and of every package that can change a result."""
    numbers = {"python": platform.python_version(), **dict.fromkeys(PACKAGES, "not installed")}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            numbers[package] = version(package)
    for plugin in (*entry_points(group=OPS_GROUP), *entry_points(group=DRAFTERS_GROUP)):
        if plugin.dist is not None:
            numbers[plugin.dist.name] = plugin.dist.version
    return numbers


def set_up_torch(threads: int, device: str) -> None:
    """Raises UsageError for a device that is not there."""
    import torch

    torch.set_num_threads(threads)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise UsageError(f"--device {device}: {reason}") from None


def machine() -> dict[str, str | int]:
    """The machine in words, without names that identify it."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.processor() or platform.machine(),
        "cpus": usable_cpus(),
    }


def redact(text: str) -> str:
    """Home directories do not belong into files that people pass on."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text
