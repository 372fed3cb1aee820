"""Being a driver of a Ray cluster. `set_up_ray` comes before this is imported."""

import signal
from threading import current_thread, main_thread
from typing import Any

import ray
from ray.exceptions import RayError

from ..errors import ClusterError
from ..prepare.cluster_block import LOCAL

NAMESPACE = "specsot"


def connect(address: str, **more: Any) -> None:
    """Be a driver of a cluster, or of one that is started for it; raises ClusterError.

    What a signal does stays as it was: Ray would end the process.
    """
    settings = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR", **more}
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=None if address == LOCAL else address, **settings)
        if current_thread() is main_thread():
            signal.signal(signal.SIGTERM, before)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        first = str(error).strip().split("\n", 1)[0]
        raise ClusterError(f"no Ray cluster at {address}: {first}") from None


def disconnect() -> None:
    """Be none any more; what only this driver had ends. Signals do what they did: Ray makes SIGTERM
    end the process, behind Python's back."""
    ray.shutdown()
    if current_thread() is main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
