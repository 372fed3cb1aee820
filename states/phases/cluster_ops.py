"""The ops and guards of the machine that directs workers: it decodes nothing itself."""

from typing import Protocol

from ...ops.registry import guard, op
from ..request_table import RequestTable
from ..text.prompts import PromptBook
from .merge import Answer, delivered


class ClusterDirector(Protocol):
    """What directs the workers of a cluster; `engine.cluster.driver.director` has the real one."""

    def form_group_(self) -> None: ...
    def write_outlines_(self) -> None: ...
    def read_outlines_(self) -> None: ...
    def regroup_(self) -> None: ...
    def give_branches_(self) -> None: ...
    def gather_(self) -> None: ...
    @property
    def group_changed(self) -> bool: ...
    @property
    def outlines_wanted(self) -> bool: ...
    @property
    def outlines_written(self) -> bool: ...
    @property
    def branches_wanted(self) -> bool: ...
    @property
    def all_ended(self) -> bool: ...


@op("cluster.form_group_", commits=True)
def form_group_(cluster: ClusterDirector) -> None:
    """Workers that are there become one process group; those that are gone are replaced."""
    cluster.form_group_()


@op("cluster.write_outlines_")
def write_outlines_(cluster: ClusterDirector) -> None:
    """Workers begin with outlines that nobody writes."""
    cluster.write_outlines_()


@op("cluster.read_outlines_", commits=True)
def read_outlines_(cluster: ClusterDirector) -> None:
    """Read finished outlines into branches; anything else falls back to one ordinary answer."""
    cluster.read_outlines_()


@op("cluster.regroup_")
def regroup_(cluster: ClusterDirector) -> None:
    """Say who decodes which branch, and bring prefixes to those who lack them: one collective
    for each."""
    cluster.regroup_()


@op("cluster.give_branches_")
def give_branches_(cluster: ClusterDirector) -> None:
    """Workers begin with branches that were placed."""
    cluster.give_branches_()


@op("cluster.gather_", commits=True)
def gather_(cluster: ClusterDirector) -> None:
    """Take in what workers have committed, and who is gone; waits a little for the first."""
    cluster.gather_()


@op("cluster.merge", writes="answers")
def merge_all(branches: RequestTable, prompts: PromptBook) -> tuple[Answer, ...]:
    """The answers of all requests, in reading order."""
    return tuple(delivered(one, prompts) for one in branches.requests)


@guard("group_changed")
def group_changed(cluster: ClusterDirector) -> bool:
    """A worker is gone, or a new one is ready."""
    return cluster.group_changed


@guard("outlines_wanted")
def outlines_wanted(cluster: ClusterDirector) -> bool:
    """Outlines are to be written that nobody writes, and a worker has room."""
    return cluster.outlines_wanted


@guard("outlines_written")
def outlines_written(cluster: ClusterDirector) -> bool:
    """Outlines are written and are to be read."""
    return cluster.outlines_written


@guard("branches_wanted")
def branches_wanted(cluster: ClusterDirector) -> bool:
    """Branches are known that nobody has, and a worker has room."""
    return cluster.branches_wanted


@guard("all_ended")
def all_ended(cluster: ClusterDirector) -> bool:
    """Every request has come to an end."""
    return cluster.all_ended
