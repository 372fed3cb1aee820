"""Several graphs over one target: loaded once, each with its own drafter and pools."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....models.load.checkpoint import model_hash
from ...models import Models, with_drafter
from ...prepare.environment import model_folders
from ...prepare.job import Job
from ...prepare.options import RunOptions
from ...run.session import Session, load, tie
from ..wire.jobs import check_graphs


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What is told of a served graph.

    states, ways: of its machine. longest: tokens of prompt and answer together. budget: tokens of
    an answer, or of each part, if nobody says otherwise.
    """

    name: str
    doc: str
    model: str
    model_hash: str
    layout: str
    drafter: str
    skeleton: bool
    initial: str
    states: tuple[str, ...]
    ways: tuple[tuple[str, str, str], ...]
    longest: int
    vocabulary: int
    budget: int
    stop_ids: tuple[int, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)


def open_graphs(
    graphs: Sequence[str], options: RunOptions
) -> Iterator[tuple[str, Session, GraphFacts]]:
    """Every graph with its session; the target is loaded by the first of them."""
    models: Models | None = None
    for job in check_graphs(graphs, options):
        if models is None:
            session = load(job)
            models = session.models
        else:
            folder = model_folders(job)[1]
            kind = job.program.graph.drafter.kind
            own = replace(models, drafter=None)
            session = tie(job, own if folder is None else with_drafter(own, folder, kind))
        yield session.program.graph.name, session, _facts(job, session)


def _facts(job: Job, session: Session) -> GraphFacts:
    graph = session.program.graph
    target = session.models.target
    ways = tuple((s, e.to, e.when or "") for s in graph.states for e in graph.edges_from(s))
    return GraphFacts(
        graph.name,
        graph.doc,
        job.options.model,
        model_hash(model_folders(job)[0]),
        graph.layout.kind,
        graph.drafter.kind,
        graph.skeleton is not None,
        graph.initial,
        tuple(graph.states),
        ways,
        min(target.max_positions, graph.layout.kv_slots),
        target.vocab_size,
        session.budget,
        tuple(session.prompts.stop_ids),
        {"temperature": graph.sampling.temperature},
    )
