"""Which workers of a group compute together, in integers: the same for drivers and workers."""

from ....models.sharded import place


def units_of(size: int, tp: int, largest: int) -> list[tuple[int, ...]]:
    """The units of `tp` ranks each among the ranks of a group, by their number.

    Units of several sizes lie inside each other: as many ranks as there are in whole units of the
    largest size form units, as `place` says; those that are left decode alone, or not at all.

    Args:
        largest: the size of the largest units, a multiple of `tp`.
    """
    if tp == 1:
        return [(rank,) for rank in range(size)]
    whole = size // largest * largest
    return [tuple(place(rank, whole, tp).members) for rank in range(whole // tp)]


def unit_of(rank: int, units: list[tuple[int, ...]]) -> int | None:
    """The number of the unit of a rank; None if it is in none."""
    return next((number for number, members in enumerate(units) if rank in members), None)
