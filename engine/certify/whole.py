"""Rejection sampling through whole runs: short answers of the graph against the target's law.

Every answer is a request with a seed of its own, so nothing but the engine's coins is random. The
law is put together from transformers' distributions behind every possible beginning; a high
temperature over few tokens leaves no beginning rare, and makes drafts wrong often enough.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...states.machine import Run
from ...states.text.prompt_tokens import PromptTokens
from ..bench.sides import Side
from ..prepare.inputs import Prompt
from .chi2 import ALPHA, chi2_quantile, chi_square
from .filters import NEUTRAL, PLAIN
from .toys import Check
from .workbench import Bench

HEAT, KEPT = 30.0, 3
LENGTH = 4  # the first token, a round of up to three, and what a shorter round leaves to the next
AT_ONCE = 200  # answers of a run
BEHIND = 8  # tokens of the prompt that the answers stand behind

Answer = tuple[int, ...]


def whole_check(bench: Bench) -> Check:
    """A chi-square test over all answers of `LENGTH` tokens."""
    drawn = (f"temperature={HEAT}", f"top_k={KEPT}", "top_p=1.0", *NEUTRAL, *PLAIN)
    side = bench.side(bench.changed(*(f"sampling.{one}" for one in drawn), tokens=LENGTH))
    request = side.session.request(bench.prompts[0])
    ids = [*request.prefix, *request.tail][-BEHIND:]
    law, (seen, accepted) = _law(bench, ids), _answers(bench, side, ids)
    strange = sum(count for answer, count in seen.items() if answer not in law)
    counts_X = torch.tensor([seen[answer] for answer in law], dtype=torch.float64)
    chances_X = torch.tensor(list(law.values()), dtype=torch.float64)
    answers = bench.extent.answers
    statistic, df = chi_square(counts_X, answers * chances_X)
    critical = chi2_quantile(df, ALPHA)
    figures = {
        "statistic": statistic,
        "critical": critical,
        "df": df,
        "samples": answers,
        "alpha": ALPHA,
        "impossible": strange,
        "accepted": accepted,
    }
    text = (
        f"{answers} answers of {LENGTH} tokens through whole runs, {accepted} drafts accepted, "
        f"against the law from transformers' logits: chi2 {statistic:.1f}, critical {critical:.1f} "
        f"(df {df})"
    )
    text += f"; {strange} answers cannot be" if strange else ""
    return Check("rejection/whole runs", statistic <= critical and not strange, figures, text)


def _law(bench: Bench, ids: Sequence[int]) -> dict[Answer, float]:
    """The probability of every answer."""
    found: dict[Answer, float] = {(): 1.0}
    for _ in range(LENGTH):
        found = {
            (*begun, token): chance * own
            for begun, chance in found.items()
            for token, own in _next(bench, [*ids, *begun])
        }
    return found


def _next(bench: Bench, ids: Sequence[int]) -> list[tuple[int, float]]:
    best = bench.reference.logits(ids, bench.dtype)[-1].double().topk(KEPT)
    chances = (best.values / HEAT).softmax(-1).tolist()
    return list(zip(best.indices.tolist(), chances, strict=True))


def _answers(bench: Bench, side: Side, ids: Sequence[int]) -> tuple[Counter[Answer], int]:
    """Answers by how often they came, and how many drafts were accepted in them."""
    seen: Counter[Answer] = Counter()
    accepted, answers = 0, bench.extent.answers
    for first in range(0, answers, AT_ONCE):
        bench.tell(f"whole runs: answer {first} of {answers} ...")
        board = side.session.board()
        for seed in range(first, min(first + AT_ONCE, answers)):
            asked = side.session.request(Prompt(str(seed), "?", seed=seed))
            plain = replace(
                asked,
                prefix=PromptTokens(),
                tail=PromptTokens(tuple(ids)),
                stop_ids=frozenset(),
                budget=LENGTH,
                outline_budget=0,
                given=None,
                given_ids=[],
                new_matcher=None,
            )
            board["branches"].submit(plain)
        run = Run(side.job.program, board, lambda event: None)
        while not run.finished:
            run.advance()
        for branch in (b for request in board["branches"].requests for b in request.branches):
            seen[tuple(branch.tokens)] += 1
            accepted += sum(branch.accepted)
    return seen, accepted
