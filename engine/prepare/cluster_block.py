"""The block `cluster` of specsot.yaml: where workers are, how many, and how they are grouped."""

from ipaddress import ip_address
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from ...states.yaml.spec import Int, Number, Spec, Text
from .options import Device

LOCAL = "local"
Workers = Annotated[Int, Field(ge=1, le=1024)]


def _address(text: str) -> str:
    try:
        return str(ip_address(text))
    except ValueError:
        what = "must be an IP address of this machine, such as 127.0.0.1"
        raise PydanticCustomError("interface", what) from None


def _place(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if text == LOCAL or (host and colon and port.isdigit()):
        return text
    what = "must be `local`, or HOST:PORT of a Ray cluster that runs"
    raise PydanticCustomError("address", what)


Address = Annotated[Text, AfterValidator(_place)]


class GroupSize(Spec):
    """How many workers compute together on one text (tensor parallelism)."""

    tp: Workers = 1


class ClusterBlock(Spec):
    """Workers of `specsot run --workers` and `specsot cluster up`."""

    address: Address = LOCAL
    workers: Workers = 2
    devices: tuple[Device, ...] = ()
    skeleton: GroupSize = GroupSize()
    branches: GroupSize = GroupSize()
    interface: Annotated[Text, AfterValidator(_address)] = "127.0.0.1"
    deadline: Annotated[Number, Field(gt=0, le=3600)] = 10.0

    @property
    def together(self) -> int:
        """The most workers that compute together."""
        return max(self.skeleton.tp, self.branches.tp)

    @property
    def parts(self) -> int:
        """The fewest: what a worker computes is never more than one of so many parts."""
        return min(self.skeleton.tp, self.branches.tp)
