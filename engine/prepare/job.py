"""From options to everything a run needs but its models: checked, and without torch. specsot.yaml
has what a run uses when the command line does not say otherwise."""

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import ValidationError, create_model

from ...models.files import ModelError
from ...states.graph.graph import Program
from ...states.graph.load import load_program, op_table, parse_change
from ...states.graph.plugins import DRAFTERS, DRAFTERS_GROUP, OPS_GROUP, installed_names
from ...states.text.outline import Outline, load_outline, parse_outline
from ...states.text.tokens import OutlineError
from ...states.yaml.source import GraphError, Mark, ProblemCode, Source, decode, hint
from ...states.yaml.spec import Spec, check_mapping, validated
from ..errors import LacksDrafterError, UsageError, first_line
from ..limits import default_threads, usable_cpus
from .files import PACKAGE, is_run_file, open_source, read_source
from .inputs import Prompt, Prompts, read_documents, read_prompts
from .options import KEY, SETTINGS, ChosenProfile, ClusterBlock, Profile, RunOptions, flag_of
from .repeat import Provenance, RunFile, RunResult, graph_source, prompts_of

EMBEDDED = "embedded"
CONFIG = "specsot.yaml"
CLUSTER = "cluster"
SLOWEST = 3600  # seconds between two transitions
OPEN = [name for name, kind in SETTINGS.items() if NoneType in get_args(kind)]  # may be null
KEYS: Any = {name: (kind, None if name in OPEN else ...) for name, kind in SETTINGS.items()}
KEYS[KEY] = (dict[str, Profile], ...)
KEYS[CLUSTER] = (ClusterBlock, ...)
Settings: type[Spec] = create_model("Settings", __base__=Spec, **KEYS)
PACKAGES = ["specsot", "torch", "transformers", "tokenizers", "safetensors", "llguidance"]
PACKAGES += ["gguf", "bm25s", "transitions", "numpy", "pydantic", "rich", "typer"]
Origins = dict[tuple[str | int, ...], str]  # of settings by their key, for messages


@dataclass(frozen=True, slots=True)
class Job:
    """A checked graph with its prompts and settings: the whole input of the engine. options: with
    no setting left open. made_with, result: of the run that is repeated."""

    program: Program
    options: RunOptions
    prompts: tuple[Prompt, ...]
    outline: Outline | None = None
    made_with: Provenance | None = None
    result: RunResult | None = None
    notes: tuple[str, ...] = ()


def read_cluster(options: RunOptions) -> ClusterBlock:
    """The block `cluster` of specsot.yaml under the options; raises GraphError, UsageError."""
    block: ClusterBlock = read_settings(Path())[0].cluster
    overrides = {"address": options.cluster, "workers": options.workers}
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return ClusterBlock.model_validate(block.model_dump() | given)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = str(wrong["loc"][0])
        flag = "--workers" if name == "workers" else "--cluster"
        raise UsageError(f"{flag} {overrides[name]}: {wrong['msg']}") from None


def read_config(
    folder: Path, options: RunOptions, saved: Mapping[str, Any] | None = None, file: str = ""
) -> tuple[RunOptions, ChosenProfile | None]:
    """Options with no setting left open, and the profile that they name: the packaged defaults,
    under `folder`'s own specsot.yaml, under the settings that a repeated run saved in its `file`,
    under the profile's, under those of the options. Raises GraphError: every problem, in file
    order. UsageError: only options have problems."""
    changes = {name: value for name in SETTINGS if (value := getattr(options, name)) is not None}
    before = {} if saved is None else {**dict.fromkeys(OPEN), **saved}
    origins: Origins = {(key,): f"{file}: options.{key}" for key in before}
    origins |= {(key,): f"{flag_of(key)} {value}" for key, value in changes.items()}
    settings, sources = read_settings(folder, {**before, **changes}, origins)
    values = settings.model_dump(exclude={KEY, CLUSTER})
    name = options.profile
    if name is None:
        return replace(options, **values), None
    if name not in settings.profiles:
        close = hint(name, settings.profiles)
        there = f"there are: {', '.join(settings.profiles)}"
        raise UsageError(f"--profile {name}: no such profile{close}; {there}")
    profile = ChosenProfile(name, settings.profiles[name], sources)
    chosen = profile.profile.model_dump(include=set(SETTINGS), exclude_none=True)
    values |= {k: v for k, v in chosen.items() if k not in changes}
    return replace(options, **values), profile


def read_settings(
    folder: Path, changes: Mapping[str, Any] | None = None, origins: Origins | None = None
) -> tuple[Any, tuple[Source, Source]]:
    """All settings under `changes`, whose names in messages are `origins`, and the files that they
    come from: the folder's own, and the packaged one."""
    packaged = Source(decode((files(PACKAGE) / CONFIG).read_bytes(), CONFIG), CONFIG)
    user_file = folder / CONFIG
    there = user_file.exists() or user_file.is_symlink()
    source = read_source(str(user_file)) if there else packaged
    if source.data is None:
        source.data = {}
    check_mapping(source, "configuration")
    source.marks |= {path: Mark(option) for path, option in (origins or {}).items()}
    profiles = {KEY: _merged(packaged.data[KEY], source.data.get(KEY))}
    source.data = {**packaged.data, **source.data, **profiles, **(changes or {})}
    kinds = [kind for kind, drafter in DRAFTERS.items() if drafter.drafts]
    kinds += installed_names(DRAFTERS_GROUP)
    problems = []
    try:
        settings: Any = validated(Settings, source)
        for name, profile in settings.profiles.items():
            for kind in profile.drafters.keys() - set(kinds):
                message = f"no drafter {kind!r}{hint(kind, kinds)}; there are: {', '.join(kinds)}"
                place = (KEY, name, "drafters", kind)
                problems.append(source.problem(place, message, ProblemCode.UNKNOWN_KIND, key=True))
        if problems:
            raise GraphError(problems)
    except GraphError as error:
        if any(problem.line for problem in error.problems):
            raise
        lines = [f"{problem.file}: {problem.message}" for problem in error.problems]
        raise UsageError("\n".join(lines)) from None
    return settings, (source, packaged)


def _merged(packaged: Any, overrides: Any) -> Any:
    """The packaged profiles with the user's overrides, merged key by key."""
    if not isinstance(packaged, Mapping) or not isinstance(overrides, Mapping):
        return packaged if overrides is None else overrides
    changed = {name: _merged(packaged.get(name), value) for name, value in overrides.items()}
    return {**packaged, **changed}


def prepare(options: RunOptions, folder: Path = Path(), prompts: Prompts | None = None) -> Job:
    """Read and check all inputs of a run. The command line overrides a run.yaml's settings, prompts
    and outline; these override defaults. prompts: read already; None reads those that the options
    name. Raises UsageError, PromptError, OutlineError, GraphError: each message says where."""
    digest = options.expect_digest
    if digest is not None and (len(digest) < 12 or set(digest.lower()) - set("0123456789abcdef")):
        raise UsageError("--expect-digest takes 12 to 64 hexadecimal digits")
    if (options.step or options.breaks) and options.prompt == "-":
        name = "--step" if options.step else "--break"
        raise UsageError(f"{name} reads the keyboard, so the prompt cannot come from there")
    if options.step_delay is not None and not 0 <= options.step_delay <= SLOWEST:
        raise UsageError(f"--step-delay takes seconds, 0 to {SLOWEST}")
    config, profile = read_config(folder, options)
    graph = source = open_source(config.graph)
    saved = validated(RunFile, source) if is_run_file(source) else None
    if saved is not None:
        config, profile = read_config(folder, options, saved.options, source.file)
        graph = graph_source(source)
    sets = [parse_change(change) for change in options.sets]
    sets = sets if profile is None else [*profile.changes(graph, sets), *sets]
    program = _with_requests(load_program(graph, op_table(), sets=sets), options)
    asks = options.prompt is not None or options.prompts is not None
    if prompts is None and saved is not None and not asks:
        prompts = Prompts(prompts_of(saved, source))
    elif prompts is None:
        prompts = read_prompts(options.prompt, options.prompts, config.prompt)
    items = prompts.items
    if shared := read_documents(options.documents):  # a prefix of every prompt's own documents
        documents = [(*shared, *(d for d in p.documents if d not in shared)) for p in items]
        items = tuple(replace(p, documents=d) for p, d in zip(items, documents, strict=True))
    if saved is None or profile is not None:
        config = _with_drafter(config, program, options.drafter_model, profile)
    return Job(
        program,
        replace(config, graph=source.file if saved is None else saved.graph_file),
        items,
        _outline(options.outline, program, saved, source.file),
        made_with=None if saved is None else saved.made_with,
        result=None if saved is None or options.changes_a_run else saved.result,
        notes=prompts.notes,
    )


def _outline(
    given: Path | None, program: Program, saved: RunFile | None, file: str
) -> Outline | None:
    """The outline that the command line gives, else that of a repeated run."""
    skeleton = program.graph.skeleton
    if given is not None:
        if skeleton is None:
            raise UsageError(f"--outline: graph {program.graph.name!r} has no skeleton to give")
        return load_outline(given, max_branches=skeleton.max_branches, tools=skeleton.tools)
    if saved is None or saved.outline is None:
        return None
    most = skeleton.max_branches if skeleton is not None else 1
    outline = parse_outline(saved.outline, max_branches=most, tools=None)
    if outline.status not in ("ok", "direct"):
        raise OutlineError(f"{file}: outline: cannot be read back ({outline.status})")
    return outline


def prepare_graphs(graphs: Sequence[str], options: RunOptions) -> list[Job]:
    """Jobs of all graphs, specsot.yaml's if none is named; raises what `prepare` raises."""
    options = replace(options, prompt="?")
    jobs = [prepare(replace(options, graph=name)) for name in graphs] or [prepare(options)]
    names = [job.program.graph.name for job in jobs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"graph {twice!r} is named twice")
    return jobs


def _with_requests(program: Program, options: RunOptions) -> Program:
    name = program.graph.name
    if unknown := [state for state in options.breaks if state not in program.graph.states]:
        states = ", ".join(program.graph.states)
        raise UsageError(f"--break {unknown[0]}: graph {name!r} has the states {states}")
    if options.probe_blend and program.graph.blend is None:
        raise UsageError(f"--probe-blend: graph {name!r} has no block `blend`")
    if not options.explain_rounds:
        for option in ("branches", "rounds"):
            if getattr(options, option):
                raise UsageError(f"{flag_of(option)} selects rounds of --explain-rounds: give both")
        return program
    options.explains(0, "")
    explaining = program.with_settings("verify.accept", {"explain": True})
    if explaining is None:
        raise UsageError(f"--explain-rounds: graph {name!r} has no rounds that verify drafts")
    return explaining


def _with_drafter(
    config: RunOptions, program: Program, requested: str | None, profile: ChosenProfile | None
) -> RunOptions:
    """Which drafter: the command line, then the graph as the profile has changed it, then
    specsot.yaml, which knows nothing of the profile's target."""
    drafter = program.graph.drafter
    if named := requested or getattr(drafter, "model", None):
        return replace(config, drafter_model=named)
    if drafter.checkpoint == "target":
        return replace(config, drafter_model=config.model)
    if not drafter.has_model or config.model == EMBEDDED:
        return config
    if profile is not None:
        there = ", ".join(profile.profile.drafters) or "no drafters"
        what = f"profile {profile.name!r} has none; it has {there}: give --drafter-model"
    elif config.drafter_model == EMBEDDED:
        is_path = config.model[0] in "/.~" or config.model.count("/") > 1  # and no id of the Hub
        if is_path and not Path(config.model).expanduser().exists():
            raise ModelError(config.model, "is not a folder")
        what = "and the embedded drafter fits the embedded model only: give --drafter-model"
        what += f" for {config.model}"
    else:
        return config
    drafts = f"graph {program.graph.name!r} drafts with {drafter.kind}"
    raise LacksDrafterError(f"{drafts}, {what}, or --set drafter.kind=none")


# -- where a run happens: model folders, versions, threads, device ---------------------------------


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
    if not drafter.has_model:
        return target, None
    kind = drafter.checkpoint or drafter.kind
    return target, model_folder(job.options.drafter_model, kind, dtype)


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
    plugins = (*entry_points(group=OPS_GROUP), *entry_points(group=DRAFTERS_GROUP))
    return numbers | {p.dist.name: p.dist.version for p in plugins if p.dist is not None}


def set_up_torch(threads: int, device: str) -> None:
    """Raises UsageError for a device that is not there."""
    import torch

    torch.set_num_threads(threads)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device}: {first_line(error)}") from None


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
