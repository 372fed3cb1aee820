"""Whether a drafter helps, as far as a run can tell by itself, and what may be wrong if not."""

from collections.abc import Mapping
from typing import Any

ENOUGH = 24  # branch-rounds that say something
USELESS = 1.1  # tau_step below which drafts are as good as none
DRAFTING = ("expand_root", "grow_tree")
VERIFYING = ("verify", "continuous_decode")


def doubts(metrics: Mapping[str, Any], kind: str) -> list[str]:
    """Lines for stderr; none if the drafter helps, drafts nothing, or has had too few rounds.

    A round of plain decoding costs at most what a round that verifies a tree does, so a run is
    slower than its own plain rounds at least where drafting costs more than the tokens it saves.

    Args:
        metrics: metrics.json.
        kind: of the graph's drafter.
    """
    rounds = metrics["branch_rounds"]
    tau = metrics["tau_step"]
    if not metrics["drafted"] or rounds < ENOUGH:
        return []
    if tau < USELESS:
        causes = "the text repeats nothing" if kind == "ngram" else _OF_MODELS
        return [f"the drafter does not help: tau_step {tau:.2f} in {rounds} rounds; {causes}"]
    states = metrics["states"]
    draft, verify = (
        sum(states.get(name, {}).get("milliseconds", 0.0) for name in names)
        for names in (DRAFTING, VERIFYING)
    )
    if draft <= (tau - 1) * verify:
        return []
    return [
        f"drafting costs more than it saves: {draft:.0f} ms of drafting beside {verify:.0f} ms of "
        f"verifying at tau_step {tau:.2f}; try a smaller tree (--set drafter.nodes=N) or "
        "--set drafter.kind=none"
    ]


_OF_MODELS = (
    "likely it was trained for another model, its rope base or a norm is not the one it was "
    "trained with, or its tokenizer is another"
)
