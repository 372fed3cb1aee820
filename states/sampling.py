"""How the branches of a round are drawn from: columns, coins, and what they have written."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ops.attention.metadata import tensor
from ..ops.sampling.coins import branch_key
from ..ops.sampling.processors import Sampler, SamplingColumns, columns, take_in_
from ..ops.sampling.settings import SamplingRules
from .request import Branch


@dataclass(slots=True)
class TokenCounts:
    """The ids before a branch (`processors.Sampler`), up to answer token number `counted`."""

    seen_V: Tensor
    counts_V: Tensor
    counted: int = 0


class Samplers:
    """Builds the sampler of every round. Columns are rebuilt when the branches change; committed
    tokens are counted if a rule penalises them."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self.device = device
        self._columns: tuple[tuple[int, ...], SamplingColumns, Tensor] | None = None
        self._counts: dict[int, TokenCounts] = {}

    def of(self, branches: Sequence[Branch]) -> Sampler | None:
        """The sampler of these branches; None if all of them decode greedily without penalties."""
        if all(rules_of(branch).plain for branch in branches):
            return None
        owners = tuple(branch.owner for branch in branches)
        if self._columns is None or self._columns[0] != owners:
            stops = [branch.request.stop_ids for branch in branches]
            merged = columns([*map(rules_of, branches)], stops, self.vocabulary, self.device)
            keys = [branch_key(branch.request.seed, branch.index) for branch in branches]
            self._columns = owners, merged, tensor(keys, self.device)
        _, rules, key_S = self._columns
        answered = [branch.num_cached_tokens for branch in branches]
        if rules.penalises:
            counts = [self._catch_up_(branch) for branch in branches]
            seen_SV = torch.stack([count.seen_V for count in counts])
            counts_SV = torch.stack([count.counts_V for count in counts])
        else:
            seen_SV = torch.zeros(len(branches), 0, dtype=torch.bool, device=self.device)
            counts_SV = seen_SV.int()
        return Sampler(rules, key_S, seen_SV, counts_SV, answered_S=tensor(answered, self.device))

    def forget(self, owners: Iterable[int]) -> None:
        for owner in owners:
            self._counts.pop(owner, None)

    def _catch_up_(self, branch: Branch) -> TokenCounts:
        if branch.owner not in self._counts:
            seen_V = torch.zeros(self.vocabulary, dtype=torch.bool, device=self.device)
            seen_V[tensor(branch.before, self.device)] = True
            counts_V = torch.zeros_like(seen_V, dtype=torch.int32)
            self._counts[branch.owner] = TokenCounts(seen_V, counts_V)
        counts = self._counts[branch.owner]
        ids_C = tensor(branch.tokens[counts.counted : branch.num_cached_tokens], self.device)
        take_in_(counts.seen_V[None], counts.counts_V[None], torch.zeros_like(ids_C), ids_C)
        counts.counted = branch.num_cached_tokens
        return counts


def rules_of(branch: Branch) -> SamplingRules:
    """A branch's rules. An outline has neither forced tokens nor a minimal length, and under a
    grammar the temperature alone applies to its legal tokens."""
    rules = branch.request.sampling
    if branch.matcher is not None:
        return SamplingRules(rules.temperature)
    differs = branch.is_root and (rules.forced or rules.min_new_tokens)
    return replace(rules, forced=(), min_new_tokens=0) if differs else rules
