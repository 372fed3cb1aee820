"""What Ray reads of the environment when it is imported; so nothing of it is imported here."""

import os
import secrets
from importlib.util import find_spec

from ..errors import UsageError
from .standing import standing

LACKS = "workers are Ray actors: pip install 'specsot[ray]'"


def set_up_ray(address: str) -> None:
    """Authentication by token, no statistics; call it before anything imports Ray.

    The token is that of the cluster which `specsot cluster up` has started at this address, or that
    of the environment, or a new one.

    Raises:
        UsageError: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise UsageError(LACKS)
    there = standing()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if there is not None and there.address == address:
        os.environ["RAY_AUTH_TOKEN"] = there.token
    elif "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
