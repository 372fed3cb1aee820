"""`python -m specsot`, the same as the script `specsot`."""

from .engine.cli.start import main

if __name__ == "__main__":
    main()
