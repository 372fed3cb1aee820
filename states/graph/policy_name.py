"""`scheduler.policy`: the name of a policy, specsot's or an installed package's."""

from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..yaml.source import hint, quoted
from ..yaml.spec import Text
from .plugins import installed_policies

POLICIES = ("fcfs", "max_throughput", "sot_priority")


def _known_policy(name: str) -> str:
    """A name that specsot or an installed package has; nothing is imported."""
    if name not in POLICIES and name not in (others := installed_policies()):
        known = [*POLICIES, *others]
        what = "no policy {name}; there are {known}" + hint(name, known)
        told = {"name": quoted(name), "known": ", ".join(known)}
        raise PydanticCustomError("policy", what, told)
    return name


PolicyName = Annotated[
    Text,
    AfterValidator(_known_policy),
    WithJsonSchema({"anyOf": [{"enum": list(POLICIES)}, {"type": "string"}]}),
]
