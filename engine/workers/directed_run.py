"""A run on workers, driven like any other: the director's machine with its recorder."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..models import load_models
from ..prepare.environment import model_folders, set_up_torch
from ..prepare.files import open_graph
from ..prepare.inputs import Prompt
from ..prepare.job import Job
from ..prepare.options import ClusterBlock
from ..record.metrics import Marks, Meter, counted_figures, ratio
from ..record.recorder import Recorder
from ..record.trace import Write
from ..run.core import EngineCore
from ..run.session import Session, tie
from ..text_stream import Decode
from .director import Director
from .link import WorkerSource
from .protocol import summed
from .worker_groups import WorkerGroups

MACHINE = "machines/cluster"
BY_LENGTH = ("lengths", "chosen")  # counters whose keys are numbers


class ClusterRecorder(Recorder):
    """Records the events of the director's machine, and what happens to workers; there are no
    pictures, as the director has no pool.

    director: whose workers are counted. memory: `held_figures` of their engines, the latest.
    """

    def __init__(self, decode: Decode, write: Write | None = None) -> None:
        super().__init__(decode, write)
        self.director: Director | None = None
        self.memory: list[Mapping[str, Any]] = []

    def take_snapshot(self) -> None:
        """No pictures."""

    def report(self, record: Mapping[str, Any]) -> None:
        """Record something that is not an event of the machine."""
        if record["event"] not in ("tokens", "outline"):
            self.write_record({"kind": "cluster", **record})
            return
        marks = self.meter.marks.setdefault(str(record["request"]), Marks())
        if record["event"] == "outline":
            marks.outline = self.now
        else:
            marks.first_token = self.now if marks.first_token is None else marks.first_token
            marks.last_token = self.now

    def figures(self, board: Mapping[str, Any]) -> dict[str, Any]:
        """metrics.json: what all workers did together, and what the director saw."""
        director = self.director
        assert director is not None
        counts = director.count_()
        present = director.workers.workers
        weights = {one.name: one.greeting.weights[1] for one in present if one.greeting}
        meter = meter_of([one.counts for one in counts.values()], self.meter)
        meter.tokens = sum(director.tokens.values())
        self.memory = [memory for one in counts.values() for memory in one.memory]
        memory: dict[str, Any] = summed(self.memory)
        memory["host_reads"]["per_round"] = ratio(memory["host_reads"]["total"], meter.forwards)
        if (cache := memory["prefix_cache"]) is not None:
            cache["hit_rate"] = ratio(cache["reused"], cache["asked"])
        workers = [
            {
                "name": name,
                "weights": weights.get(name, 0),
                "tokens": director.tokens[name],
                "target_forwards": worker.counts.get("forwards", 0),
                "open_files": worker.open_files,
                "peak_memory": worker.peak_memory,
            }
            for name, worker in counts.items()
        ]
        cluster = {
            "workers": workers,
            "lost": director.workers.losses,
            "regroup": asdict(director.figures),
        }
        return {**counted_figures(meter), **memory, "cluster": cluster}


def meter_of(counts: Sequence[Mapping[str, Any]], director: Meter) -> Meter:
    """The counters of all workers together, and the director's transitions and times."""
    total = Meter()
    total.add(director)
    total.marks = director.marks
    for values in counts:
        meter = Meter()
        for name, value in values.items():
            if name == "requests":
                for key, lengths in value.items():
                    total.requests.setdefault(key, Counter()).update(_by_length(lengths))
            elif isinstance(value, Mapping):
                setattr(meter, name, _by_length(value) if name in BY_LENGTH else Counter(value))
            else:
                setattr(meter, name, value)
        most_active = max(total.most_active, meter.most_active)
        total.add(meter)
        total.most_active = most_active
    return total


def _by_length(values: Mapping[str, int]) -> Counter[int]:
    return Counter({int(length): count for length, count in values.items()})


DirectedRun = Callable[
    [Session, Sequence[Prompt], Write | None], tuple[EngineCore, ClusterRecorder]
]


def driver_session(job: Job) -> Session:
    """A session without weights: the models are checked, but not loaded. Raises UsageError,
    ModelError, GraphError: what cannot be used, and where."""
    set_up_torch(1, "cpu")
    target, drafter = model_folders(job)
    models = load_models(
        target,
        drafter,
        job.program.graph.drafter.kind,
        device="meta",
        dtype=job.options.dtype,
        weights=job.options.weights,
        scan=False,
    )
    return tie(job, models)


def directed(
    source: WorkerSource,
    block: ClusterBlock,
    session: Session,
    prompts: Sequence[Prompt],
    write: Write | None = None,
) -> tuple[EngineCore, ClusterRecorder]:
    """A run on workers before its first transition, with its recorder; `recorder.director.close`
    ends the workers. Raises PromptError: a text that cannot be a prompt. UsageError: there is no
    such interface. ClusterError: the workers cannot start."""
    recorder = ClusterRecorder(session.prompts.decode, write)
    workers = WorkerGroups(source, block, recorder.report)
    try:
        director = Director(session, workers, recorder.report)
        recorder.director = director
        director.submit(prompts)
        board = {"cluster": director, "branches": director.table, "prompts": session.prompts}
        run = EngineCore(open_graph(MACHINE), board, recorder)
        workers.load_()
    except BaseException:
        workers.close()
        raise
    recorder.attach(run)  # its time starts, as that of every run, once models are loaded
    return run, recorder
