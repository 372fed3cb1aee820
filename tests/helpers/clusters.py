"""Runs on clusters: the same prompts alone and on workers, and workers that are lost on the way."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from helpers.thread_hosts import ThreadWorkers
from specsot.engine.models import Models, load_models
from specsot.engine.prepare.environment import embedded_folder
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.prepare.options import ClusterBlock, GroupSize
from specsot.engine.record.report import answers_of, output_digest
from specsot.engine.record.trace import Record
from specsot.engine.run.runner import perform
from specsot.engine.run.session import Session
from specsot.engine.workers.director import ClusterRecorder, Director, directed
from specsot.engine.workers.worker_groups import RunWorker
from specsot.states.machine import Run
from specsot.states.phases.merge import Answer
from specsot.states.text.documents import Document
from specsot.states.text.outline import Outline

CAMP = "The lake is cold in spring and warm in summer. Bring wood, water, a map and a tent. "
READ = (Document("Note", CAMP),)
"""Long enough for a prefix that is brought to others instead of being read again."""
CAMPING = Prompt("1", "Plan a weekend camping trip.")
BEES = Prompt("2", "Tell me about honey bees.", documents=READ)
KINDS = {"eagle1": "eagle1", "eagle2": "eagle2", "dflash": "dflash", "vanilla": "vanilla"}
DEADLINE = 5.0
TURNS = 20_000  # transitions after which a run on a cluster is stuck


@cache
def models_for(kind: str, packed: bool = True, part: tuple[int, int] = (0, 1)) -> Models:
    """The embedded target, or a part of it, with the embedded drafter of a kind."""
    plain = kind in ("none", "ngram")
    drafter = None if plain else embedded_folder({"eagle1": "eagle2"}.get(kind, kind))
    used = "eagle3" if plain else kind
    return load_models(embedded_folder("target"), drafter, used, packed=packed, part=part)


def session_of(
    graph: str,
    *sets: str,
    budget: int | None = 24,
    outline: Outline | None = None,
    packed: bool = True,
    part: tuple[int, int] = (0, 1),
) -> Session:
    """A shipped graph over the embedded models; packed: not if workers compute together; part: what
    of the target there is."""
    program = open_graph(graph, sets=sets)
    models = models_for(program.graph.drafter.kind, packed, part)
    return Session(program, models, max_new_tokens=budget, outline=outline)


@dataclass
class Ran:
    """A run that has ended, on a cluster."""

    digest: str
    answers: tuple[Answer, ...]
    director: Director
    recorder: ClusterRecorder
    records: list[Record]
    figures: dict[str, Any]

    def told(self, event: str) -> list[Record]:
        """What was told of workers, of one kind."""
        return [one for one in self.records if one.get("event") == event]


@dataclass
class Chaos:
    """Loses the worker that `whom` names, once, as soon as `when` holds before a transition;
    `watch` sees every transition after it."""

    when: Callable[[Director, Run], bool]
    whom: Callable[[Director], RunWorker]
    lose: Callable[[RunWorker], None] = field(default=lambda member: member.cut("was cut"))
    lost: list[str] = field(default_factory=list)
    watch: Callable[[Director, Run], None] = field(default=lambda director, run: None)

    def look(self, director: Director, run: Run) -> None:
        if self.lost:
            self.watch(director, run)
        elif self.when(director, run):
            member = self.whom(director)
            self.lost.append(member.name)
            self.lose(member)


def alone(session: Session, prompts: Sequence[Prompt]) -> str:
    """The digest of an ordinary run."""
    run, _, _ = perform(session, prompts)
    return output_digest(answers_of(run.manager.requests, session.prompts))


def on_workers(
    session: Session,
    prompts: Sequence[Prompt],
    *,
    workers: int = 2,
    hosts: Any = None,
    chaos: Chaos | None = None,
    deadline: float = DEADLINE,
    skeleton: int = 1,
    branches: int = 1,
) -> Ran:
    """The same on workers, by default in threads of this process; so many of them write an outline
    together (skeleton), and so many a branch. hosts: has the `source` of the workers."""
    records: list[Record] = []
    sizes = {"skeleton": GroupSize(tp=skeleton), "branches": GroupSize(tp=branches)}
    block = ClusterBlock(workers=workers, deadline=deadline, **sizes)
    source = (hosts or ThreadWorkers(session)).source
    run, recorder = directed(source, block, session, prompts, records.append)
    director: Director = run.board["cluster"]
    with closing(director.workers):
        while not run.finished:
            if chaos is not None:
                chaos.look(director, run)
            run.advance()
            assert run.steps < TURNS, f"stuck in {run.state}"
        recorder.flush()
        answers = answers_of(run.manager.requests, session.prompts)
        figures = recorder.figures(run.board)
        return Ran(output_digest(answers), answers, director, recorder, records, figures)


def open_files() -> int:
    """Of this process."""
    return len(list(Path("/dev/fd").iterdir()))
