"""The graphs that are to be served, checked. No torch here: the HTTP side checks them too."""

from collections.abc import Sequence
from dataclasses import replace

from ...errors import UsageError
from ...prepare.job import Job, prepare
from ...prepare.options import RunOptions


def check_graphs(graphs: Sequence[str], options: RunOptions) -> list[Job]:
    """Jobs of all graphs, specsot.yaml's if none is named; raises what `prepare` raises."""
    asked = replace(options, prompt="?")
    jobs = [prepare(replace(asked, graph=name)) for name in graphs] or [prepare(asked)]
    names = [job.program.graph.name for job in jobs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"graph {twice!r} is named twice")
    return jobs
