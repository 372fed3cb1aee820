"""Whether top-k and top-p are applied: tokens that they cut away are drawn without them only."""

import torch

from .probe import ProbedRun, Trial, probe
from .workbench import Bench

HEAT, TOP_K, TOP_P = 3.0, 3, 0.5
EDGE = 1e-3  # of a score: float noise may move equally likely tokens over a border
NEUTRAL = (
    *("repetition_penalty=1.0", "presence_penalty=0.0", "frequency_penalty=0.0", "min_p=0.0"),
    *("logit_bias={}", "banned=[]", "forced=[]", "min_new_tokens=0"),
)
"""Sampling settings under which nothing but temperature, top-k and top-p changes a score."""
FILTERS = {"top_k": (f"top_k={TOP_K}", "top_p=1.0"), "top_p": ("top_k=0", f"top_p={TOP_P}")}


def filter_gate(bench: Bench, name: str) -> tuple[str, dict[str, float], list[str]]:
    """Held to transformers' own filter, over transformers' logits: text, figures, what is wrong."""
    own = FILTERS[name]
    free, every = _cut_away(bench, _sample(bench, "top_k=0", "top_p=1.0"), name)
    wrong, count = _cut_away(bench, _sample(bench, *own), name)
    figures: dict[str, float] = {"tokens": count, "outside": wrong, "outside_without": free}
    setting = own[name != "top_k"]
    text = f"at temperature {HEAT:g}, {wrong} of {count} tokens are outside of {setting}"
    text += f" that were drawn with it, {free} of {every} drawn without it"
    text += "" if free else ": too sure a model for this to tell anything"
    return text, figures, [f"{wrong} tokens should not have been drawn"] if wrong else []


def _sample(bench: Bench, *own: str) -> ProbedRun:
    sets = (f"temperature={HEAT}", *NEUTRAL, *own)
    return probe(bench, Trial(tuple(f"sampling.{one}" for one in sets)))


def _cut_away(bench: Bench, run: ProbedRun, name: str) -> tuple[int, int]:
    """(tokens that the filter cuts away, all tokens)."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    heat = TemperatureLogitsWarper(HEAT)
    keep = TopKLogitsWarper(TOP_K) if name == "top_k" else TopPLogitsWarper(TOP_P)
    outside = count = 0
    for branch, context in run.answers():
        ids = [*context, *branch.tokens]
        logits_QV = bench.reference.logits(ids, bench.dtype)[len(context) - 1 : -1]
        scores_QV = heat(None, logits_QV.double())
        kept_QV = keep(None, scores_QV.clone())
        least_Q1 = scores_QV.masked_fill(kept_QV.isinf(), torch.inf).amin(1, keepdim=True)
        tokens_Q1 = torch.tensor(branch.tokens, device=logits_QV.device)[:, None]
        outside += int((scores_QV.gather(1, tokens_Q1) < least_Q1 - EDGE).sum())
        count += len(branch.tokens)
    return outside, count
