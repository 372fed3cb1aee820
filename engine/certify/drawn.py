"""What is drawn by rejection, against the law that it should have, in short answers of whole runs.

Every answer is a request with a seed of its own, so nothing but the engine's coins is random. The
law is put together from transformers' distributions behind every possible beginning; a high
temperature over few tokens leaves no beginning rare, and makes drafts wrong often enough.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...states.request import Request
from ...states.text.tokens import PromptTokens
from ..bench.sides import Side
from .reference import Bench, Check

NEUTRAL = (
    *("repetition_penalty=1.0", "presence_penalty=0.0", "frequency_penalty=0.0", "min_p=0.0"),
    *("logit_bias={}", "banned=[]", "forced=[]", "min_new_tokens=0", "top_k=0", "top_p=1.0"),
)
HEAT = 30.0
CHOICES = 3
LENGTH = 4  # the first token, a round of up to three, and what a shorter round leaves to the next
AT_ONCE = 200  # answers of a run
BEHIND = 8  # tokens of the prompt before the answers
ALPHA = 1e-6  # a correct rule has a smaller p-value once in a million changes of the seed
FEWEST = 5.0  # expected samples in a cell; rarer ones are counted together

Answer = tuple[int, ...]


def neutral_sampling(*settings: str) -> tuple[str, ...]:
    """Settings with nothing but these that changes a score."""
    return tuple(f"sampling.{setting}" for setting in (*NEUTRAL, *settings))


def acceptance_checks(bench: Bench) -> Iterator[Check]:
    """A chi-square test over all answers of `LENGTH` tokens, for acceptance by rejection."""
    sampling = bench.graph.sampling
    if not sampling.lossless:
        text = "sampling.skip_sample_adjustment: no residual is drawn from after a rejection"
        yield Check("rejection/adjusted", False, {}, text)
    if sampling.exact:
        return
    sets = neutral_sampling(f"temperature={HEAT}", f"top_k={CHOICES}")
    side = bench.side(bench.changed(*sets, tokens=LENGTH))
    request = side.session.request(bench.prompts[0])
    ids = [*request.prefix, *request.tail][-BEHIND:]
    law = _law(bench, ids)
    counts, accepted = _answers(bench, side, ids)
    strange = sum(count for answer, count in counts.items() if answer not in law)
    counts_X = torch.tensor([counts[answer] for answer in law], dtype=torch.float64)
    chances_X = torch.tensor(list(law.values()), dtype=torch.float64)
    answers = bench.extent.answers
    statistic, df = chi_square(counts_X, answers * chances_X)
    p = p_value(statistic, df)
    figures = {"statistic": statistic, "df": df, "p_value": p, "samples": answers, "alpha": ALPHA}
    figures |= {"impossible": strange, "accepted": accepted}
    text = (
        f"{answers} answers of {LENGTH} tokens through whole runs, {accepted} drafts accepted, "
        f"against the law from transformers' logits: chi2 {statistic:.1f} (df {df}), p {p:.1e}"
    )
    text += f"; {strange} answers cannot be" if strange else ""
    yield Check("rejection/whole runs", p >= ALPHA and not strange, figures, text)


def _law(bench: Bench, ids: Sequence[int]) -> dict[Answer, float]:
    """The probability of every answer."""
    law: dict[Answer, float] = {(): 1.0}
    for _ in range(LENGTH):
        beginnings = law
        law = {}
        for beginning, chance in beginnings.items():
            logits_V = bench.reference.logits([*ids, *beginning], bench.dtype)[-1]
            best = logits_V.double().topk(CHOICES)
            chances = (best.values / HEAT).softmax(-1).tolist()
            for token, share in zip(best.indices.tolist(), chances, strict=True):
                law[*beginning, token] = chance * share
    return law


def _answers(bench: Bench, side: Side, ids: Sequence[int]) -> tuple[Counter[Answer], int]:
    """Answers by how often they came, and how many drafts were accepted in them."""
    counts: Counter[Answer] = Counter()
    accepted = 0
    answers = bench.extent.answers
    sampling = side.session.sampling
    empty = PromptTokens()
    tail = PromptTokens(tuple(ids))
    for first in range(0, answers, AT_ONCE):
        bench.tell(f"whole runs: answer {first} of {answers} ...")
        requests = [
            Request(str(seed), seed, "?", empty, tail, frozenset(), LENGTH, 0, sampling)
            for seed in range(first, min(first + AT_ONCE, answers))
        ]
        core = side.session.start(requests, lambda event: None)
        while core.step():
            pass
        for branch in (b for request in core.requests for b in request.branches):
            counts[tuple(branch.tokens)] += 1
            accepted += sum(branch.accepted)
    return counts, accepted


def chi_square(seen_X: Tensor, expected_X: Tensor) -> tuple[float, int]:
    """Pearson's (statistic, degrees of freedom) of counts; infinite if the impossible was seen.

    Cells with fewer than `FEWEST` expected samples are counted together, with the next larger
    ones if they are still too few.
    """
    possible_X = expected_X > 0
    if (seen_X[~possible_X] > 0).any():
        return float("inf"), int(possible_X.sum().item()) - 1
    expected_C, order_C = expected_X[possible_X].sort()
    seen_C = seen_X[possible_X][order_C]
    rare = int((expected_C < FEWEST).sum().item())
    if rare:
        rare = max(rare, int((expected_C.cumsum(0) < FEWEST).sum().item()) + 1)
        seen_C = torch.cat([seen_C[:rare].sum(0, keepdim=True), seen_C[rare:]])
        expected_C = torch.cat([expected_C[:rare].sum(0, keepdim=True), expected_C[rare:]])
    return ((seen_C - expected_C) ** 2 / expected_C).sum().item(), len(expected_C) - 1


def p_value(statistic: float, df: int) -> float:
    """The probability that chi-square with `df` degrees of freedom exceeds the statistic."""
    half = torch.tensor([df / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
