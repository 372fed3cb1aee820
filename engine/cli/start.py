"""Where the program starts, with as few imports as can be."""

import gc

from ..signals import end_at_once

YOUNG = 50_000  # objects that are made before Python looks for garbage; by itself 700


def main() -> None:
    """Entry point of the `specsot` script."""
    end_at_once()  # the imports that follow take longer than a finger to Ctrl-C
    # They make a million objects that stay: looking through them is a tenth of a start's time.
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    from .main import main

    main()
