"""A run on a cluster, driven like any other: the driver's machine with its recorder."""

from collections.abc import Callable, Sequence

from ..models import load_models
from ..prepare.cluster_block import ClusterBlock
from ..prepare.environment import model_folders, set_up_torch
from ..prepare.files import open_graph
from ..prepare.inputs import Prompt
from ..prepare.job import Job
from ..record.trace import Write
from ..run.core import EngineCore
from ..run.session import Session, tie
from .driver.director import Director
from .driver.membership import Membership
from .driver.ports import Launcher
from .driver.recording import ClusterRecorder

MACHINE = "machines/cluster"
DirectedRun = Callable[
    [Session, Sequence[Prompt], Write | None], tuple[EngineCore, ClusterRecorder]
]


def driver_session(job: Job) -> Session:
    """The graph with its tokenizer, for a process that decodes nothing: the models are checked, but
    have no weights.

    Raises:
        UsageError, ModelError, GraphError: what cannot be used, and where.
    """
    set_up_torch(1, "cpu")
    target, drafter = model_folders(job)
    kind = job.program.graph.drafter.kind
    weights = job.options.weights
    models = load_models(
        target, drafter, kind, device="meta", dtype=job.options.dtype, weights=weights, scan=False
    )
    return tie(job, models)


def directed(
    launcher: Launcher,
    block: ClusterBlock,
    session: Session,
    prompts: Sequence[Prompt],
    write: Write | None = None,
) -> tuple[EngineCore, ClusterRecorder]:
    """A run on so many workers before its first transition, with a recorder that takes its events.

    Raises:
        PromptError: a text that cannot be a prompt. UsageError: there is no such interface.
        ClusterError: the workers cannot begin.
    """
    recorder = ClusterRecorder(session.prompts.decode, write)
    membership = Membership(launcher, block, recorder.happened)
    director = Director(session, membership, recorder.happened)
    recorder.director = director
    director.submit(prompts)
    board = {"cluster": director, "branches": director.table, "prompts": session.prompts}
    run = EngineCore(open_graph(MACHINE), board, recorder)
    membership.begin_()
    recorder.attach(run)  # its time begins, as that of every run, once models are loaded
    return run, recorder
