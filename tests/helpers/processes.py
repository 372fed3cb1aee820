"""Commands as processes of their own."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def ended(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], code: int = 0
) -> subprocess.CompletedProcess[str]:
    """A command of specsot, in a folder; it must end with this code.

    Args:
        environment: besides that of this process.
    """
    done = subprocess.run(
        [sys.executable, "-m", "specsot", *words],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done
