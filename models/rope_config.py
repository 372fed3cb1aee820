"""How positions become angles, as a config.json says it in either spelling; without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .files import Fields

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
RENAMED = ("rope_type", "type", "rope_theta")  # keys with a field of their own in RopeConfig
ORIGINAL = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"
THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles.

    kind: one of ROPE_KINDS.
    theta: base of the frequencies.
    settings: the other keys, under the names of transformers' `rope_parameters`.
    trained: `max_position_embeddings` of the file.
    """

    kind: str
    theta: float
    settings: Mapping[str, Any]
    trained: int

    @property
    def limit(self) -> int:
        """Positions for which the frequencies do not depend on the sequence's length."""
        original = self.settings.get(ORIGINAL)
        return min(self.trained, original) if self.kind == "longrope" and original else self.trained


def rope_config(fields: Fields, trained: int, head_dim: int) -> RopeConfig:
    """Both spellings: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`."""
    inner = _inner(fields)
    kind = str(inner.get("rope_type") or inner.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise fields.wrong(f"rope type {kind!r} is not supported ({', '.join(ROPE_KINDS)})")
    if any(isinstance(value, dict) for value in inner.values.values()):
        raise fields.wrong("rope settings per layer type are not supported")
    theta = inner.number("rope_theta", fields.number("rope_theta", THETA))
    settings = {k: v for k, v in inner.values.items() if k not in RENAMED}
    if kind in ("llama3", "yarn", "longrope"):
        fallback = inner.integer(ORIGINAL, trained)
        settings[ORIGINAL] = fields.integer(ORIGINAL, fallback)
    if fields.number(PARTIAL, 1.0) != 1.0 or inner.number(PARTIAL, 1.0) != 1.0:
        raise fields.wrong(f"`{PARTIAL}` other than 1 is not supported")
    _check_rope(Fields(fields.path, settings), kind, head_dim)
    return RopeConfig(kind, theta, settings, trained)


def _check_rope(settings: Fields, kind: str, head_dim: int) -> None:
    required = {"linear": ["factor"], "dynamic": ["factor"], "yarn": ["factor"]}
    required["llama3"] = ["factor", "low_freq_factor", "high_freq_factor"]
    for key in required.get(kind, []):
        if settings.number(key, 0.0) == 0.0:
            raise settings.wrong(f"rope type {kind!r} needs `{key}`")
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        value = settings.get(key)
        if not isinstance(value, list) or len(value) != head_dim // 2:
            raise settings.wrong(f"`{key}` must hold {head_dim // 2} numbers")


def _inner(fields: Fields) -> Fields:
    scaling = fields.section("rope_scaling")
    return scaling if scaling.values else fields.section("rope_parameters")


def rope_notes(fields: Fields, trained: int) -> tuple[str, ...]:
    """What is assumed of the angles: of silence, and of two bases in one file.

    Args:
        trained: positions where the file is silent.
    """
    outer = fields.get("rope_theta")
    inner = _inner(fields).get("rope_theta")
    notes = []
    if outer is None and inner is None:
        notes.append(f"`rope_theta` is not given: {THETA:g} assumed")
    elif None not in (outer, inner) and outer != inner:
        notes.append(f"`rope_theta` is {outer} at the top and {inner} below: {inner} is used")
    if fields.get("max_position_embeddings") is None:
        notes.append(f"`max_position_embeddings` is not given: {trained} assumed")
    return tuple(notes)
