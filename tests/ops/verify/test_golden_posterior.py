"""EAGLE's sampled verification: the recorded rounds, with the uniform numbers that it consumed."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specsot.ops.sampling.processors import Sampler, columns, process
from specsot.ops.sampling.settings import Rule, SamplingRules
from specsot.ops.verify.rejection import accept_tree

EAGLE = Path(__file__).parents[2] / "golden" / "eagle"
MODELS = ("e2_llama", "e3_llama")
ONE = torch.zeros(1, dtype=torch.int64)


def entries() -> Iterator[Any]:
    for model in MODELS:
        for case in json.loads((EAGLE / model / "posterior.json").read_text()):
            yield pytest.param(model, case, id=f"{model}-{case['key']}")


def parents_of(paths: list[list[int]], count: int) -> list[int]:
    """Parents among the drafted nodes (-1: the root) from the paths to the leaves."""
    parents = [-1] * (count - 1)
    for path in paths:
        for above, node in pairwise(n for n in path if n >= 0):
            parents[node - 1] = above - 1
    return parents


def warped(logits_NV: Tensor, case: Any) -> Tensor:
    """EAGLE's order: temperature, top p, top k, each only if it is given."""
    rules = [SamplingRules(case["temperature"], top_p=case["top_p"] or 1.0)]
    rules += [SamplingRules(1.0, top_k=case["top_k"])] if case["top_k"] else []
    for one in rules:
        own = columns([one], [()], logits_NV.shape[1], logits_NV.device)
        none_10 = torch.zeros(1, 0, dtype=torch.int64)
        sampler = Sampler(own, ONE, none_10.bool(), none_10.int(), answered_S=ONE)
        rows = ONE.expand(len(logits_NV))
        none_N0 = none_10.expand(len(rows), 0)
        logits_NV = process(logits_NV, sampler, rows, tokens_RC=none_N0, path_RC=none_N0.bool())
    return logits_NV.softmax(-1)


def coins(parents: list[int], tokens: list[int], case: Any) -> tuple[list[float], list[int]]:
    r_N, draws, at, path = [0.0] * len(parents), iter(case["uniform_draws"]), -1, []
    wanted = iter(case["accepted_tokens"])
    while True:
        token = next(wanted, None)
        children = [n for n, parent in enumerate(parents) if parent == at]
        for node in children:
            r_N[node] = next(draws)
            if tokens[node] == token:
                at = node
                path.append(node)
                break
        else:
            assert token is None, "an accepted token that is in no tree"
            assert next(draws, None) is None, "more numbers than children were tried"
            return r_N, path


@pytest.mark.parametrize(("model", "case"), list(entries()))
def test_a_recorded_round(model: str, case: Any) -> None:
    found = load_file(EAGLE / model / "posterior.safetensors")
    logits_NV, drafted, paths = (
        found[f"{case['key']}.{name}"]
        for name in ("tree_logits", "draft_tokens", "retrieve_indices")
    )
    parents = parents_of(paths.tolist(), len(drafted))
    tokens = drafted.tolist()[1:]
    r_N, path = coins(parents, tokens, case)
    verdict = accept_tree(
        warped(logits_NV, case)[None],
        None,
        torch.tensor([tokens]),
        torch.tensor([parents]),
        torch.ones(1, len(tokens), dtype=torch.bool),
        torch.tensor([r_N], dtype=torch.float64),
        torch.full((1, len(drafted)), 0.5),
        Rule.TOPK,
    )
    assert torch.nonzero(verdict.path_ST[0, 1:]).flatten().tolist() == path
    assert len(path) == case["accept_length"]
    wanted_V = found[f"{case['key']}.sample_p"]
    assert torch.allclose(verdict.weights_SV[0].float(), wanted_V.float(), rtol=1e-4, atol=1e-6)
