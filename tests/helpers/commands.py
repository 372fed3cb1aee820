"""A command line in this process."""

import pytest

from specsot.engine.cli.main import main


def call(*words: str) -> int:
    """Its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    return int(caught.value.code or 0)
