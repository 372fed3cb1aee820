"""The collectives of a tensor-parallel group, counted, and failing for good once they have failed.

The group's own timeout is the deadline: a rank that is dead or hangs is an error on all others
after it, on the CPU (gloo) at the collective itself, on GPUs (NCCL) by torch's watchdog, which ends
the process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .shares import peers, place


class RankLost(RuntimeError):
    """A collective did not come about: a rank is dead, hangs, or does something else."""


@dataclass(slots=True)
class Ranks:
    """This rank's place in a process group.

    group: one of torch.distributed, or a process group that nobody else knows of; None for all
        ranks of the default one.
    sums, gathers, sent: collectives so far, and the bytes that this rank put into them.
    """

    group: Any
    index: int
    count: int
    sums: int = 0
    gathers: int = 0
    sent: int = 0
    lost: str = ""

    def sum_(self, x: Tensor) -> Tensor:
        """Add up what all ranks have, in place; the same bits everywhere. Raises RankLost."""
        self.sums += 1
        self._counted(x)
        try:
            self._members.allreduce([x]).wait()
        except RuntimeError as error:
            raise self._is_lost("all_reduce", error) from error
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[...] of each rank, of one shape -> [count, ...], everywhere. Raises RankLost."""
        self.gathers += 1
        self._counted(x)
        parts = x.new_empty(self.count, *x.shape)
        try:
            self._members.allgather([list(parts.unbind())], [x.contiguous()]).wait()
        except RuntimeError as error:
            raise self._is_lost("all_gather", error) from error
        return parts

    def first(self, number: int, device: torch.device) -> int:
        """What the first rank says. Raises RankLost.

        Args:
            device: where the group's tensors lie.
        """
        said: list[int] = self.gather(torch.tensor(number, device=device)).tolist()
        return said[0]

    def leave_(self) -> None:
        """Give back the sockets of one of `split_ranks`; every rank of it must."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.lost = f"rank {self.index} of {self.count} has left its group"

    def check_alike(self, said: Sequence[int], device: torch.device) -> None:
        """Raise ValueError, on every rank, if they do not all say the same numbers.

        Args:
            device: where the group's tensors lie.
        """
        all_RN = self.gather(torch.tensor(said, dtype=torch.int64, device=device)).tolist()
        if any(one != all_RN[0] for one in all_RN):
            raise ValueError(f"the ranks are not alike: {all_RN}")

    @property
    def _members(self) -> Any:
        return dist.group.WORLD if self.group is None else self.group

    def _counted(self, x: Tensor) -> None:
        if self.lost:
            raise RankLost(self.lost)
        self.sent += x.numel() * x.element_size()

    def _is_lost(self, what: str, error: RuntimeError) -> RankLost:
        """From now on nobody waits for this group any more."""
        reason = str(error).splitlines()[0]
        self.lost = f"rank {self.index} of {self.count}: {what} failed: {reason}"
        return RankLost(self.lost)


def split_ranks(tp: int, seconds: float, before: int = 0) -> tuple[Ranks, Ranks]:
    """All ranks of the default process group in groups of `tp`: this rank's own, and the group in
    which it exchanges what it has of groups of `before` (0: of all ranks), see `peers`. Every rank
    must call it, and at the same time.

    Args:
        seconds: after which a collective of these groups is an error.

    Raises:
        ValueError: the groups do not come out even.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    own = [place(one, ranks, tp).members for one in range(ranks)]
    others = [peers(one, ranks, before or ranks, tp) for one in range(ranks)]
    limit = timedelta(seconds=seconds)
    return _opened(own, rank, limit), _opened(others, rank, limit)


def _opened(groups: Sequence[range], rank: int, limit: timedelta) -> Ranks:
    """A rank has to open every group, those of others too; `groups` by rank."""
    opened = {one: dist.new_group(list(one), timeout=limit) for one in dict.fromkeys(groups)}
    mine = groups[rank]
    return Ranks(opened[mine], mine.index(rank), len(mine))
