"""What a checkpoint is, without loading it."""

from dataclasses import dataclass
from pathlib import Path

from ..config import decoder_config
from ..files import ModelError


@dataclass(frozen=True, slots=True)
class Inspection:
    """kind: target or a drafter's; graphs: that can use it; assumed: what no file says."""

    kind: str
    family: str
    facts: tuple[tuple[str, str], ...]
    graphs: tuple[str, ...]
    assumed: tuple[str, ...]
    problems: tuple[str, ...]


def inspect_model(path: Path) -> Inspection:
    """What the files of a folder say."""
    try:
        config = decoder_config(path)
    except ModelError as error:
        return Inspection("unknown", "", (), (), (), (str(error),))
    facts = (("layers", str(config.num_layers)), ("vocabulary", str(config.vocab_size)))
    return Inspection("target", config.family, facts, (), (), ())
