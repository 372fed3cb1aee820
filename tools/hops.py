"""Counts the files, functions and Python calls of one decoding round.

    python -m tools.hops [GRAPH] [--rounds N] [--list] [--profile P]

GRAPH (default bim_eagle) runs on the embedded model through the public Python interface with every
call of the package traced. Printed are distinct files, distinct functions and calls, of the opening
until the first transition, of the steps until the first verified round, and per round afterwards.
`--list` names the files, those with the most calls first."""

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import specsot
from specsot import Prompt, open_session

ROOT = str(Path(specsot.__file__).parent) + "/"


class CallCounter:
    """Counts calls of the package's functions by file and qualified name."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

    def trace(self, frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(ROOT) and path != __file__:
            file = path[len(ROOT) :]
            self.calls[file, frame.f_code.co_qualname] += 1

    def report(self, title: str, *, per: int = 1, listed: bool = False) -> None:
        """Print the counts and start again from zero."""
        files: Counter[str] = Counter()
        for (file, _), count in self.calls.items():
            files[file] += count
        functions = len(self.calls)
        total = sum(self.calls.values()) / per
        print(f"{title}: {len(files)} files, {functions} functions, {total:.0f} calls a round")
        if listed:
            for file, count in files.most_common():
                print(f"  {count / per:9.1f}  {file}")
        self.calls.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graph", nargs="?", default="bim_eagle")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--profile")
    options = parser.parse_args()
    counter = CallCounter()
    profile = {"profile": options.profile} if options.profile else {}

    sys.setprofile(counter.trace)
    session = open_session(options.graph, max_new_tokens=64, **profile)
    run = session.start([Prompt("1", "Plan a weekend camping trip.")], lambda event: None)
    sys.setprofile(None)
    counter.report("opening", listed=options.list)

    sys.setprofile(counter.trace)
    while not run.finished and run.state != "verify":
        run.advance()
    sys.setprofile(None)
    counter.report("until the first verified round", listed=options.list)

    rounds = 0
    sys.setprofile(counter.trace)
    while not run.finished and rounds < options.rounds:
        run.advance()
        rounds += run.state in ("verify", "continuous_decode")
    sys.setprofile(None)
    counter.report(f"{rounds} rounds", per=max(rounds, 1), listed=options.list)


if __name__ == "__main__":
    main()
