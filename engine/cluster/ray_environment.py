"""What Ray reads of the environment when it is imported; so nothing of it is imported here."""

import os
import secrets
from importlib.util import find_spec

from ..errors import UsageError

LACKS = "workers are Ray actors: pip install 'specsot[ray]'"


def set_up_ray() -> None:
    """Authentication by token, no statistics; call it before anything imports Ray.

    A token that is there already, of a cluster that runs, stays.

    Raises:
        UsageError: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise UsageError(LACKS)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
