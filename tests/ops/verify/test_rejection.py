"""Rejection sampling: golden decisions in both precisions, batches, padding, purity."""

from typing import Any

import pytest
import torch
from helpers.laws import accept_block, target_match
from helpers.vanilla import cases, tensor
from torch import Tensor
from torch.nn.functional import pad

from specsot.ops.sampling.settings import CHAIN_RULES, Rule
from specsot.ops.verify.rejection import Acceptance, accept_chain, accept_tree, inverse_cdf

KINDS = pytest.mark.parametrize("kind", [torch.float64, torch.float32], ids=["64", "32"])
CLOSE = {torch.float64: 1e-12, torch.float32: 3e-7}


def close(found: Tensor, wanted: Any, kind: torch.dtype) -> bool:
    return torch.allclose(found.double(), tensor(wanted), rtol=0, atol=CLOSE[kind])


def ids(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


# --- golden --------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("case", cases("inverse_cdf"))
def test_inverse_cdf(case: Any, kind: torch.dtype) -> None:
    weights_RV, u_R = tensor([case["weights"]], kind), tensor([case["u"]], kind)
    assert inverse_cdf(weights_RV, u_R).tolist() == [case["index"]]


@KINDS
@pytest.mark.parametrize("case", cases("residual"))
def test_residual(case: Any, kind: torch.dtype) -> None:
    p_V, q_V = tensor(case["p"], kind), tensor(case["q"], kind)
    size = len(p_V)
    tokens_S1 = torch.arange(size)[:, None]
    laws = p_V.expand(size, 2, -1), q_V.expand(size, 1, -1)
    coins = torch.ones(size, 1), torch.zeros(size)
    verdict = accept_chain(*laws, tokens_S1, torch.ones_like(tokens_S1).bool(), *coins)
    rejected_S = ~verdict.path_ST[:, 1]
    left_SV = verdict.weights_SV[rejected_S]
    assert close(left_SV, [case["residual"]] * len(left_SV), kind)
    accepted = (verdict.chance_SN[:, 0] * q_V).sum()
    assert close(accepted[None], [case["acceptance"]], kind)


def chain_arguments(case: Any, coin: str, kind: torch.dtype) -> tuple[Tensor, ...]:
    size, drafts = len(case["p"][0]), len(case["draft"])
    return (
        tensor([case["p"]], kind),
        tensor([case["q"]], kind).view(1, drafts, size),
        ids([case["draft"]]).view(1, drafts),
        torch.ones(1, drafts, dtype=torch.bool),
        tensor([case[coin]], kind).view(1, drafts),
        tensor([case["u"]], kind),
    )


# Of each rule of chains: its cases, and their keys of the coins and of the chances.
CHAINS = [
    (accept_chain, "accept_chain", "r", "accept_prob"),
    (accept_block, "block_verify", "eta", "h"),
]


@KINDS
@pytest.mark.parametrize(
    "rule, case, coin, chance",
    [(rule, case, *keys) for rule, name, *keys in CHAINS for case in cases(name)],
)
def test_chains(rule: Any, case: Any, coin: str, chance: str, kind: torch.dtype) -> None:
    verdict = rule(*chain_arguments(case, coin, kind))
    count, drafts = case["n_accepted"], len(case["draft"])
    assert verdict.path_ST.tolist() == [[node <= count for node in range(drafts + 1)]]
    assert verdict.bonus_S.tolist() == [case["next_token"]]
    assert [*case["draft"][:count], case["next_token"]] == case["emitted"]
    assert close(verdict.weights_SV[0], case["adjusted"], kind)
    tried = drafts if rule is accept_block else min(count + 1, drafts)
    assert close(verdict.chance_SN[0, :tried], case[chance][:tried], torch.float32)
    assert verdict.chance_SN[0, tried:].isnan().all()


@pytest.mark.parametrize("rule", [accept_chain, accept_block])
@pytest.mark.parametrize("case", cases("accept_greedy"))
def test_one_hot_distributions_accept_exactly_the_greedy_tokens(case: Any, rule: Any) -> None:
    drafts = len(case["draft"])
    size = max(*case["target_argmax"], *case["draft"], 0) + 1
    p_STV = torch.eye(size)[ids([case["target_argmax"]])]
    tokens_SN = ids([case["draft"]]).view(1, drafts)
    valid_SN = torch.ones(1, drafts, dtype=torch.bool)
    for q_SNV in (None, torch.eye(size)[tokens_SN]):
        for coin in (0.0, 0.5, 0.9999999):
            r_SN, u_S = torch.full((1, drafts), coin), torch.tensor([coin])
            verdict = rule(p_STV, q_SNV, tokens_SN, valid_SN, r_SN, u_S)
            assert verdict.path_ST.sum() - 1 == case["n_accepted"]
            assert verdict.bonus_S.tolist() == [case["next_token"]]


def with_q(rule: str) -> bool:
    return rule in (Rule.WITH_REPLACEMENT, Rule.WITHOUT_REPLACEMENT)


def judged(p: Tensor, q: Tensor | None, *rest: Any) -> Acceptance:
    """By a rule of trees, or `target_match`, which has no coins for nodes and is no rule."""
    tokens, parents, valid, r, u, rule = rest
    if rule == "target_match":
        return target_match(p, tokens, parents, valid, u)
    return accept_tree(p, q, tokens, parents, valid, r, u, Rule(rule))


@KINDS
@pytest.mark.parametrize("case", cases("accept_node"))
def test_nodes(case: Any, kind: torch.dtype) -> None:
    rule, count = case["method"], len(case["children"])
    p_STV = tensor([[case["p"]] * (count + 1)], kind)
    q_STV = tensor([[case["q"]] * (count + 1)], kind) if with_q(rule) else None
    nodes = ids([case["children"]]), torch.full((1, count), -1), torch.ones(1, count).bool()
    coins = tensor([case["r"]], kind), tensor([[case["u"]] * (count + 1)], kind)
    verdict = judged(p_STV, q_STV, *nodes, *coins, rule)
    accepted = torch.nonzero(verdict.path_ST[0, 1:]).flatten().tolist()
    assert accepted == ([] if case["child"] < 0 else [case["child"]])
    if accepted:
        assert case["children"][accepted[0]] == case["token"]
    else:
        assert verdict.bonus_S.tolist() == [case["token"]]
        assert close(verdict.weights_SV[0], case["weights"], kind)
    if rule != "target_match":
        tried = len(case["probs"])
        assert close(verdict.chance_SN[0, :tried], case["probs"], torch.float32)
        assert verdict.chance_SN[0, tried:].isnan().all()


def tree_arguments(case: Any, kind: torch.dtype) -> tuple[Any, ...]:
    rule = case["method"]
    count = len(case["tokens"]) - 1
    return (
        tensor([case["p"]], kind),
        tensor([case["q"]], kind) if with_q(rule) else None,
        ids([case["tokens"][1:]]),
        ids([case["parent"][1:]]) - 1,
        torch.ones(1, count, dtype=torch.bool),
        tensor([case["r"][1:]], kind),
        tensor([case["u"]], kind),
        rule,
    )


@KINDS
@pytest.mark.parametrize("case", cases("accept_tree"))
def test_trees(case: Any, kind: torch.dtype) -> None:
    assert len(case["r"]) == len(case["tokens"])
    verdict = judged(*tree_arguments(case, kind))
    assert torch.nonzero(verdict.path_ST[0, 1:]).flatten().add(1).tolist() == case["path"]
    assert verdict.bonus_S.tolist() == [case["final_token"]]
    assert close(verdict.weights_SV[0], case["final_weights"], kind)
    emitted = [case["tokens"][node] for node in case["path"]]
    assert [*emitted, case["final_token"]] == case["emitted"]


# --- batches, padding, purity --------------------------------------------------------------------


@pytest.mark.parametrize("rule, name, coin", [chain[:3] for chain in CHAINS])
def test_chains_of_unequal_length_are_verified_side_by_side(
    rule: Any, name: str, coin: str
) -> None:
    some = cases(name)
    most = max(len(case["draft"]) for case in some)
    size = max(len(case["p"][0]) for case in some)
    rows = []
    for case in some:
        p, q, tokens, valid, r, u = chain_arguments(case, coin, torch.float64)
        end, more = most - tokens.shape[1], size - p.shape[2]
        p, q = (pad(pad(one, (0, more)), (0, 0, 0, end), value=1.0) for one in (p, q))
        tokens, valid, r = (pad(one, (0, end)) for one in (tokens, valid, r))
        rows.append((p, q, tokens, valid, r, u))  # what is padded would be accepted if valid
    verdict = rule(*(torch.cat(column) for column in zip(*rows, strict=True)))
    assert (verdict.path_ST.sum(1) - 1).tolist() == [case["n_accepted"] for case in some]
    assert verdict.bonus_S.tolist() == [case["next_token"] for case in some]


def test_padding_nodes_of_a_tree_are_never_accepted() -> None:
    p_STV, invalid_SN = torch.full((1, 3, 2), 0.5), torch.zeros(1, 2, dtype=torch.bool)
    nodes = ids([[0, 0]]), ids([[-1, -1]]), invalid_SN
    coins = torch.zeros(1, 2), torch.full((1, 3), 0.2)
    verdict = accept_tree(p_STV, None, *nodes, *coins, Rule.TOPK)
    assert verdict.path_ST.tolist() == [[True, False, False]]
    assert verdict.bonus_S.tolist() == [0]


def test_a_tree_of_its_root_alone_draws_from_the_target() -> None:
    p_STV, u_ST = torch.tensor([[[0.25, 0.75]], [[1.0, 0.0]]]), torch.tensor([[0.3], [0.999]])
    none = torch.zeros(2, 0)
    nodes = none.long(), none.long(), none.bool()
    verdict = accept_tree(p_STV, None, *nodes, none, u_ST, Rule.TOPK)
    assert verdict.bonus_S.tolist() == [1, 0]
    assert verdict.path_ST.tolist() == [[True], [True]]


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule not in CHAIN_RULES])
def test_a_rule_and_a_law_that_do_not_fit_are_refused(rule: Rule) -> None:
    p_STV, none = torch.ones(1, 1, 1), torch.zeros(1, 0)
    q_STV = None if with_q(rule) else p_STV
    with pytest.raises(ValueError, match="do not fit"):
        accept_tree(p_STV, q_STV, none.long(), none.long(), none.bool(), none, none, rule)


def test_half_precision_is_judged_in_float32() -> None:
    p_STV = torch.tensor([[[0.5, 0.5], [0.25, 0.75]]], dtype=torch.bfloat16)
    draft = p_STV[:, :1], ids([[0]]), torch.tensor([[True]])
    verdict = accept_chain(p_STV, *draft, torch.tensor([[0.9]]), torch.tensor([0.1]))
    assert verdict.weights_SV.dtype == torch.float32


def test_nothing_given_is_changed() -> None:
    case = cases("accept_tree")[0]
    arguments = [
        *tree_arguments(case, torch.float64),
        *chain_arguments(cases("accept_chain")[5], "r", torch.float64),
    ]
    held = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    judged(*arguments[:8])
    accept_chain(*arguments[8:])
    accept_block(*arguments[8:])
    for before, after in zip(held, arguments, strict=True):
        assert before is after or torch.equal(before, after)
