"""`specsot bench --tune`: the tree sizes, draft lengths and blocks that pay here, as a profile.

Every setting that a kind of drafter has is an experiment of its own, the ones before it as they
were found: its values are sides that answer the same prompts in turn, and the fastest one stays.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import yaml

from ..errors import UsageError
from ..prepare.options import RunOptions
from ..record.run_folder import BestEffortRunFolder
from ..shell import complain, deliver, exit_code, json_text
from .command import measure
from .experiment import PARTS, BenchOptions, prepare_experiment, text_of

if TYPE_CHECKING:
    from .rows import Row


PROFILE = "profile.yaml"
FIGURE = "speedup_decode"
MARGIN = 1.02  # what is so much faster only is not worth a larger tree, or another setting
SEVERAL = 4  # branches that a graph with an outline is tuned for beside one
BRANCHED = "num_draft_tokens"  # the setting that may differ by the number of branches

_TREES = {"num_draft_tokens": (2, 4, 8, 16, 32), "draft_depth": (2, 3, 5, 7)}
AXES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "eagle3": _TREES,
    "eagle2": _TREES,
    "dflash": {
        "grow": ("chain", "ddtree"),
        "block_size": (2, 3, 4, 6, 8),
        "num_draft_tokens": (4, 8, 16, 32),
    },
    "vanilla": {"gamma": (1, 2, 3, 4, 6, 8, 12)},
    "ngram": {"num_draft_tokens": (1, 2, 4, 8), "draft_depth": (3, 6, 10)},
}
AT_FIRST = {"eagle3": {"draft_depth": 5, "top_k": 4}, "eagle2": {"draft_depth": 5, "top_k": 4}}


@dataclass(slots=True)
class Tuning:
    """What was found so far. drafter: settings of the block; gains: each experiment's, in words."""

    kind: str
    options: RunOptions
    bench_options: BenchOptions
    branched: bool
    drafter: dict[str, Any] = field(default_factory=dict)
    gains: list[str] = field(default_factory=list)

    def try_(self, name: str, values: tuple[Any, ...]) -> None:
        """Take the value that is fastest; where branches are few and many, one of each."""
        if name == BRANCHED and self.branched:
            best = {parts: self._best(name, values, parts) for parts in (1, SEVERAL)}
            same = len(set(best.values())) == 1 or "auto" in best.values()
            self.drafter[name] = best[SEVERAL] if same else best
            return
        parts = SEVERAL if self.branched else None
        self.drafter[name] = self._best(name, values, parts)

    def _best(self, name: str, values: tuple[Any, ...], parts: int | None) -> Any:
        rows = dict(self._rows(name, values, parts))
        if not rows:
            raise UsageError(f"--tune: no prompt was answered with drafter.{name}")
        speeds = {value: _value(row) for value, row in rows.items()}
        best = max(speeds, key=lambda value: speeds[value])
        chosen = next(value for value in values if speeds.get(value, 0) * MARGIN >= speeds[best])
        at = "" if parts is None else f", {parts} branches"
        shown = ", ".join(f"{value} {speed:.2f}" for value, speed in speeds.items())
        self.gains.append(f"{name}{at}: {chosen} (against plain decoding: {shown})")
        complain(self.gains[-1])
        return chosen

    def _rows(
        self, name: str, values: tuple[Any, ...], parts: int | None
    ) -> "Iterator[tuple[Any, Row]]":
        graph = self.bench_options.refs[0]
        sets = [
            f"drafter.{key}={_text(setting)}"
            for key, setting in self.drafter.items()
            if key != name
        ]
        candidates = [[f"drafter.{name}={_text(value)}", *sets] for value in values]
        refs = (
            f"{graph}@drafter.kind=none",
            *(f"{graph}@{','.join(setting)}" for setting in candidates),
        )
        vary = [] if parts is None else [f"{PARTS}={parts}"]
        bench_options = replace(self.bench_options, refs=refs, vary=vary, out=None)
        comparison, _, rows = measure(prepare_experiment(bench_options, self.options), None)
        if comparison.code:
            raise UsageError("--tune: a side failed: " + "; ".join(comparison.problems[:3]))
        yield from zip(values, rows[1:], strict=False)


def _text(value: Any) -> str:
    """As `--set` takes it; the keys of a map stay numbers."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"
    return text_of(value)


def _value(row: "Row") -> float:
    estimate = row.figures.get(FIGURE)
    return 0.0 if estimate is None else estimate.value


@exit_code
def tune_command(bench_options: BenchOptions, options: RunOptions) -> int:
    """Measure, and print (or keep) a profile; returns the exit code."""
    if len(bench_options.refs) != 1 or bench_options.vary or bench_options.against:
        raise UsageError("--tune takes one graph, and neither --vary nor --against")
    (job,) = prepare_experiment(bench_options, options).jobs
    graph = job.program.graph
    kind = graph.drafter.kind
    if kind not in AXES:
        raise UsageError(f"--tune: nothing to tune of a drafter of kind {kind!r}")
    tuning = Tuning(kind, options, bench_options, graph.skeleton is not None)
    tuning.drafter |= AT_FIRST.get(kind, {})
    for name, values in AXES[kind].items():
        if name == BRANCHED and tuning.drafter.get("grow") == "chain":
            continue
        tuning.try_(name, values)
    files = None if bench_options.out is None else BestEffortRunFolder.at(bench_options.out)
    text = profile_text(tuning, options, job.options.model)
    if files is not None:
        files.write_text(PROFILE, text)
        for fault in files.faults:
            complain(fault)
    shown = json_text({"drafter": tuning.drafter, "gains": tuning.gains})
    delivered = deliver(shown if options.as_json else text, str(bench_options.out or ""))
    return 0 if delivered and not (files and files.faults) else 1


def profile_text(tuning: Tuning, options: RunOptions, model: str) -> str:
    """YAML for a specsot.yaml, with what was measured as comments."""
    name = options.profile or "tuned"
    settings = dict(tuning.drafter)
    if options.drafter_model is not None:
        settings = {"model": options.drafter_model, **settings}
    profile: dict[str, Any] = {"model": model, "drafters": {tuning.kind: settings}}
    if options.dtype is not None:
        profile["dtype"] = options.dtype
    notes = "".join(f"# {line}\n" for line in tuning.gains)
    return notes + str(yaml.safe_dump({"profiles": {name: profile}}, sort_keys=False))
