"""What holds for sampled text: one seed, one text, and it is the target's own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from helpers.drafters import SETTINGS, drafting
from helpers.support import (
    Graphs,
    Reference,
    Tiny,
    branches_of,
    contexts,
    memory_of,
    outline_of,
    requests_of,
    run_all,
)
from specsot.engine.prepare.inputs import Prompt
from specsot.ops.sampling.coins import branch_key, perturbed, token_keys
from specsot.ops.sampling.processors import Past, columns, process, take_in_
from specsot.states.machine import Run
from specsot.states.request import Branch, Finish
from specsot.states.sampling import rules_of

KINDS = ("none", *SETTINGS)
CHOICES = (("none", 0), *((kind, n) for kind in SETTINGS for n in range(len(SETTINGS[kind]))))
RULES: dict[str, tuple[str, ...]] = {
    "all": (),
    "top_k": ("top_k=5",),
    "top_p": ("top_p=0.8",),
    "min_p": ("min_p=0.05",),
    "filters": ("top_k=12", "top_p=0.95", "min_p=0.01", "filter_order=filters_first"),
    "penalties": ("repetition_penalty=1.3", "presence_penalty=0.4", "frequency_penalty=0.3"),
    "biases": ("logit_bias={3: 2.5, 7: -1.0}", "banned=[5, 11]", "min_new_tokens=4"),
    "everything": ("top_k=20", "top_p=0.9", "repetition_penalty=1.2", "forced=[9, 4]"),
}
"""Filters and penalties that a run is drawn with."""
FACTORS: dict[str, tuple[Any, ...]] = {
    "drafter": CHOICES,
    "layout": ("bim", "batching", "paged"),
    "blocks": (1, 16, 64),
    "attention": ("auto", "dense", "grouped", "cascade"),
    "parts": (1, 2, 3, 4, 5, 6, 7, 8),
    "temperature": (0.3, 1.0, 1.5),
    "rules": tuple(RULES),
    "order": ("fcfs", "longest_first", "shortest_first"),
    "max_num_branches": (1, 3, 8),
    "share": ("outline", "prompt"),
    "stops": ((2,), ()),
}
QUESTIONS = (Prompt("0", "hello"), Prompt("1", "a second question", seed=5, max_new_tokens=9))


def sampling_of(case: dict[str, Any]) -> list[str]:
    own = (f"temperature={case['temperature']}", *RULES[case["rules"]])
    return [f"sampling.{one}" for one in own]


def drawn(case: dict[str, Any], made: Tiny, graphs: Graphs, budget: int = 14) -> Run:
    """The run of a case, on the tiny models; `drafter` is (kind, number of its settings)."""
    kind, number = case["drafter"]
    own = SETTINGS[kind][number] if kind != "none" else ()
    session = graphs.session(
        "bim_plain",
        made.models if kind == "none" else drafting(made, kind),
        made.book(case["share"], case["stops"]),
        outline=outline_of(case["parts"], {2: (1,)} if case["parts"] > 1 else None),
        budget=budget,
        sets=(
            f"drafter.kind={kind}",
            *own,
            *(f"layout.{key}={case[key]}" for key in ("max_num_branches", "order")),
            *memory_of(case),
            *sampling_of(case),
        ),
    )
    return run_all(session, QUESTIONS)


def plain(case: dict[str, Any]) -> dict[str, Any]:
    """The same without a drafter, one sequence, all at once, in reading order."""
    alone = {"drafter": ("none", 0), "layout": "bim", "order": "fcfs", "max_num_branches": 8}
    return case | alone | {"blocks": 1, "attention": "dense"}


def check_own(run: Run, book: Any, reference: Reference) -> None:
    """Every token is the best of the target's processed scores plus its coins' noise.

    The scores are transformers' (teacher forcing), the processors are those that tests/ops holds
    to transformers' own.
    """
    for request in requests_of(run):
        for branch, context in contexts(request, book, plain=False):
            _check_branch(branch, context, reference)


def _check_branch(branch: Branch, context: Sequence[int], reference: Reference) -> None:
    logits_QV = reference.logits([*context, *branch.tokens], reference.dtype)[len(context) - 1 :]
    stops = branch.request.stop_ids
    for place, logits_V in enumerate(logits_QV):
        best = int(_order(branch, context, place, logits_V).argmax())
        if place < len(branch.tokens):
            assert branch.tokens[place] == best, f"{branch.name}: token {place}"
        elif branch.finish is Finish.STOP:
            assert best in stops, f"{branch.name}: stopped too early"
    reference.tally.tokens += len(branch.tokens)


def _order(
    branch: Branch, context: Sequence[int], place: int, logits_V: torch.Tensor
) -> torch.Tensor:
    size, row = len(logits_V), torch.zeros(1, dtype=torch.int64)
    seen_1V, counts_1V = torch.zeros(1, size).bool(), torch.zeros(1, size).int()
    seen_1V[0, list(context)] = True
    answer = torch.tensor(branch.tokens[:place], dtype=torch.int64)
    take_in_(seen_1V, counts_1V, torch.zeros_like(answer), answer)
    past = Past(seen_1V, counts_1V, row + place, row[:, None][:, :0], row[:, None][:, :0].bool())
    rules = columns([rules_of(branch)], [branch.request.stop_ids], size, torch.device("cpu"))
    scores_1V = process(logits_V[None], rules, row, past)
    if rules.all_greedy:
        return scores_1V[0]
    key = row + branch_key(branch.request.seed, branch.index)
    return perturbed(scores_1V, token_keys(key, row + len(context) + place))[0]


def texts(run: Run) -> dict[str, list[tuple[list[int], str]]]:
    """Every branch's tokens and how it ended, by request."""
    return {
        request.key: [(list(b.tokens), str(b.finish)) for b in request.all_branches()]
        for request in requests_of(run)
    }


def tokens(run: Run) -> int:
    return sum(len(branch.tokens) for branch in branches_of(run))


Make = Callable[..., Tiny]
