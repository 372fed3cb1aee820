"""What is recorded of a run on a cluster: the driver's moves, what happens to workers, figures."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...record.metrics import Marks, counted_figures
from ...record.recorder import Recorder
from ...record.trace import Write
from ...text_stream import Decode
from ..workers.counting import held_by_all, meter_of
from ..workers.messages import Counted
from .director import Director


class ClusterRecorder(Recorder):
    """Takes the driver's events, and what it tells beside them; there is no pool to make pictures
    of.

    Attributes:
        director: whom figures are asked of. held: what workers held when they were asked last.
    """

    def __init__(self, decode: Decode, write: Write | None = None) -> None:
        super().__init__(decode, write)
        self.director: Director | None = None
        self.held: list[Mapping[str, Any]] = []

    def take_snapshot(self) -> None:
        """No pictures."""

    def happened(self, record: Mapping[str, Any]) -> None:
        """Something that is no event of the machine."""
        if record["event"] == "tokens":
            self._mark(str(record["request"]))
        elif record["event"] == "outline":
            self.meter.marks.setdefault(str(record["request"]), Marks()).outline = self.now
        else:
            self.write_record({"kind": "cluster", **record})

    def _mark(self, key: str) -> None:
        marks = self.meter.marks.setdefault(key, Marks())
        marks.first_token = self.now if marks.first_token is None else marks.first_token
        marks.last_token = self.now

    def figures(self, board: Mapping[str, Any]) -> dict[str, Any]:
        """metrics.json: what all workers did together, and what the driver saw."""
        assert self.director is not None
        director = self.director
        counted = self.director.counted()
        meter = meter_of([one.counts for one in counted.values()], self.meter)
        meter.tokens = sum(director.tokens.values())
        self.held = [held for one in counted.values() for held in one.held]
        held = held_by_all(self.held, meter)
        return {**counted_figures(meter), **held, "cluster": _cluster(director, counted)}


def _cluster(director: Director, counted: Mapping[str, Counted]) -> dict[str, Any]:
    weights = {one.name: one.loaded.weights[1] for one in director.membership.members if one.loaded}
    workers = [
        {
            "name": name,
            "weights": weights.get(name, 0),
            "tokens": director.tokens[name],
            "target_forwards": one.counts.get("forwards", 0),
            "open_files": one.open_files,
            "peak_memory": one.peak_memory,
        }
        for name, one in counted.items()
    ]
    lost = director.membership.losses
    return {"workers": workers, "lost": lost, "regroup": asdict(director.regrouping.figures)}


def shown(record: Mapping[str, Any]) -> Sequence[str]:
    """What of it people are told, a line each."""
    if record["event"] == "lost":
        return [f"{record['worker']} is lost: {record['why']}; another one takes its place"]
    return []
