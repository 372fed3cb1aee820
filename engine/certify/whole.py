"""Rejection sampling through whole runs: short answers of the graph against the target's law.

Every answer is a request with a seed of its own, so nothing but the engine's coins is random. The
law is put together from transformers' distributions behind every possible beginning; a high
temperature over few tokens leaves no beginning rare, and makes drafts wrong often enough.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ...states.machine import Run
from ...states.text.prompt_tokens import PromptTokens
from ..bench.sides import Side
from ..prepare.inputs import Prompt
from .chi2 import ALPHA, chi_square, p_value
from .filters import NEUTRAL
from .workbench import Bench, Check

HEAT, KEPT = 30.0, 3
LENGTH = 4  # the first token, a round of up to three, and what a shorter round leaves to the next
AT_ONCE = 200  # answers of a run
BEHIND = 8  # tokens of the prompt that the answers stand behind

Answer = tuple[int, ...]


def acceptance_checks(bench: Bench) -> Iterator[Check]:
    """Of a graph that accepts drafts by rejection, so that one seed is not one text."""
    sampling = bench.job.program.graph.sampling
    if not sampling.lossless:
        text = "sampling.skip_sample_adjustment: no residual is drawn from after a rejection"
        yield Check("rejection/adjusted", False, {}, text)
    if not sampling.exact:
        yield _whole_check(bench)


def _whole_check(bench: Bench) -> Check:
    """A chi-square test over all answers of `LENGTH` tokens."""
    drawn = (f"temperature={HEAT}", f"top_k={KEPT}", "top_p=1.0", *NEUTRAL)
    side = bench.side(bench.changed(*(f"sampling.{one}" for one in drawn), tokens=LENGTH))
    request = side.session.request(bench.prompts[0])
    ids = [*request.prefix, *request.tail][-BEHIND:]
    law, (counts, accepted) = _law(bench, ids), _answers(bench, side, ids)
    strange = sum(count for answer, count in counts.items() if answer not in law)
    counts_X = torch.tensor([counts[answer] for answer in law], dtype=torch.float64)
    chances_X = torch.tensor(list(law.values()), dtype=torch.float64)
    answers = bench.extent.answers
    statistic, df = chi_square(counts_X, answers * chances_X)
    p = p_value(statistic, df)
    figures = {
        "statistic": statistic,
        "df": df,
        "p_value": p,
        "samples": answers,
        "alpha": ALPHA,
        "impossible": strange,
        "accepted": accepted,
    }
    text = (
        f"{answers} answers of {LENGTH} tokens through whole runs, {accepted} drafts accepted, "
        f"against the law from transformers' logits: chi2 {statistic:.1f} (df {df}), p {p:.1e}"
    )
    text += f"; {strange} answers cannot be" if strange else ""
    return Check("rejection/whole runs", p >= ALPHA and not strange, figures, text)


def _law(bench: Bench, ids: Sequence[int]) -> dict[Answer, float]:
    """The probability of every answer."""
    law: dict[Answer, float] = {(): 1.0}
    for _ in range(LENGTH):
        law = {
            (*begun, token): chance * own
            for begun, chance in law.items()
            for token, own in _next(bench, [*ids, *begun])
        }
    return law


def _next(bench: Bench, ids: Sequence[int]) -> list[tuple[int, float]]:
    best = bench.reference.logits(ids, bench.dtype)[-1].double().topk(KEPT)
    chances = (best.values / HEAT).softmax(-1).tolist()
    return list(zip(best.indices.tolist(), chances, strict=True))


def _answers(bench: Bench, side: Side, ids: Sequence[int]) -> tuple[Counter[Answer], int]:
    """Answers by how often they came, and how many drafts were accepted in them."""
    counts: Counter[Answer] = Counter()
    accepted, answers = 0, bench.extent.answers
    for first in range(0, answers, AT_ONCE):
        bench.tell(f"whole runs: answer {first} of {answers} ...")
        board = side.session.board()
        for seed in range(first, min(first + AT_ONCE, answers)):
            plain = replace(
                side.session.request(Prompt(str(seed), "?", seed=seed)),
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
            counts[tuple(branch.tokens)] += 1
            accepted += sum(branch.accepted)
    return counts, accepted
