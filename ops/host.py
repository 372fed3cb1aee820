"""The one place where device values reach the host, so that every synchronisation is counted."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(slots=True)
class HostReader:
    """Counts reads: `reads`, one per round, and `full_reads` of whole score rows."""

    reads: int = 0
    full_reads: int = 0

    def read(self, values: Tensor) -> npt.NDArray[np.int64]:
        """A device tensor of integers as a host array (one synchronisation)."""
        self.reads += 1
        return _to_host(values)

    def read_all(self, values: Iterable[Tensor]) -> list[npt.NDArray[np.int64]]:
        """The integers of several device tensors as host arrays of their shapes, in one read."""
        parts = list(values)
        filled = [part.reshape(-1).long() for part in parts if part.numel()]
        flat = self.read(torch.cat(filled or [parts[0].reshape(-1)]))
        arrays = []
        start = 0
        for part in parts:
            arrays.append(flat[start : start + part.numel()].reshape(part.shape))
            start += part.numel()
        return arrays

    def read_order(self, scores_V: Tensor) -> npt.NDArray[np.int64]:
        """All token ids of one score row, best first: only when a grammar forbids the best ones."""
        self.full_reads += 1
        return _to_host(scores_V.argsort(descending=True, stable=True))


def _to_host(values: Tensor) -> npt.NDArray[np.int64]:
    host: npt.NDArray[np.int64] = values.cpu().numpy()
    return host
