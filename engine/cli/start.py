"""Where the program starts, with as few imports as can be."""

from ..signals import end_at_once


def main() -> None:
    """Entry point of the `specsot` script."""
    end_at_once()  # the imports that follow take longer than a finger to Ctrl-C
    from .main import main

    main()
