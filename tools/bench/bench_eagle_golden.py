"""EAGLE-1, -2 and -3 in both layouts, on the trained tiny model of the recorded runs.

    python -m tools.bench.bench_eagle_golden

No head of EAGLE-1 or -2 is embedded; this is what they accept where there is one. One sequence per
prompt, 64 tokens, the drafters' default trees.
"""

import json
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))

from helpers.support import FixedBook, Graphs, tiny_models  # noqa: E402

from specsot.engine.models import with_drafter  # noqa: E402
from specsot.engine.prepare.inputs import Prompt  # noqa: E402
from specsot.engine.record.metrics import Meter  # noqa: E402
from specsot.engine.run.session import Session  # noqa: E402
from specsot.states.trace import Event, OpRan  # noqa: E402

EAGLE = TESTS / "golden" / "eagle"
HEADS = {"eagle1": "llama_eagle2", "eagle2": "llama_eagle2", "eagle3": "llama_eagle3"}


def measured(session: Session, keys: list[str]) -> Meter:
    """A whole run, counted."""
    meter = Meter()

    def count(event: Event) -> None:
        if isinstance(event, OpRan) and event.op in ("branch.start_", "branch.commit_"):
            meter.forward_done(run.board["committed"], 0)

    run = session.start([Prompt(key, key) for key in keys], count)
    while not run.finished:
        run.advance()
    return meter


def main() -> None:
    runs = json.loads((EAGLE / "e2_llama" / "case.json").read_text())["runs"]
    prompts = {str(number): run["prompt_ids"] for number, run in enumerate(runs)}
    target, graphs = tiny_models(EAGLE / "targets" / "llama", None, ()), Graphs()
    print("drafter | layout | tau_step | acceptance_rate")
    for kind, head in HEADS.items():
        models = with_drafter(target, EAGLE / "drafts" / head, kind)
        for layout in ("bim", "batching"):
            sets = (f"drafter.kind={kind}", f"layout.kind={layout}")
            book = FixedBook(prompts)
            session = graphs.session("autoregressive", models, book, budget=64, sets=sets)
            meter = measured(session, list(prompts))
            print(f"{kind} | {layout} | {meter.tau_step:.2f} | {meter.acceptance_rate:.3f}")


if __name__ == "__main__":
    main()
