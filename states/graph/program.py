"""A checked graph: its ops with their settings, and the blackboard that they read and write.

Blackboard keys of a run, or of a cluster, exist before the first op and stay. Keys of a round are
written by ops, and dropped by the ops that use them up. `ops/__init__.py` explains shape letters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ...ops.registry import OpEntry
from ..yaml.source import Source
from .graph import Graph


class Key(NamedTuple):
    """A blackboard key. linear: each value is used exactly once: an op may write the key only where
    no earlier value can exist, or if it reads that value itself."""

    name: str
    lifetime: Literal["run", "cluster", "round"]
    holds: str
    linear: bool = False


VOCABULARY: tuple[Key, ...] = (
    Key("branches", "run", "BranchStateManager: requests, owners, tips, outputs, budgets"),
    Key("target", "run", "Target: the model whose output counts"),
    Key("drafter", "run", "Drafter: proposes the trees of the branches, stores what it needs"),
    Key("kv", "run", "KVCache: the target's pool and slot table"),
    Key("kv_draft", "run", "KVCache: the drafter's pool, None for drafters without one"),
    Key("host", "run", "HostReader: reads device values into host ints, and counts the reads"),
    Key("prompts", "run", "PromptBook: templates and tokenizer, the text side of a run"),
    Key("taps", "run", "which of the target's hidden states the drafter reads (HF indices)"),
    Key("inbox", "run", "Inbox: requests that arrive during the run"),
    Key("cluster", "cluster", "Director: workers and their assignments"),
    Key("step", "round", "StepPlan: what is ready, and what starts in this step; host ints"),
    Key("batch", "round", "Batch: rows of the coming forward and their branches", linear=True),
    Key("rows", "round", "Rows: tokens, positions, slots, segments of the next target forward"),
    Key("attention", "round", "AttentionPlan: groups of rows, the slots each may see, masks"),
    Key("plan", "round", "LayerPlan: one LayerStatus per layer of the next target forward"),
    Key("logits", "round", "logits_RV float32 of the rows that need them"),
    Key("features", "round", "taps_QF of every row, or None if no op reads them"),
    Key("blended", "round", "BlendReport of a forward with cached rows, else None"),
    Key("roots", "round", "FirstTokens: the tokens drawn at the prefill tips"),
    Key("draft_rows", "round", "committed tokens and their features, for the drafter"),
    Key("frontier", "round", "the first drafted level of every branch"),
    Key("proposal", "round", "Proposal: a token tree per branch, everything [S, ...]", linear=True),
    Key("accepted", "round", "Accepted: the accepted path of each tree"),
    Key("searches", "round", "Searches: the state of every beam search of a forward"),
    Key("chosen", "round", "Chosen: the selected beams and finished hypotheses"),
    Key("committed", "round", "RoundSummary: the tokens that the round added, host ints"),
    Key("answers", "round", "the finished answers in reading order"),
)

RUN_KEYS = frozenset(k.name for k in VOCABULARY if k.lifetime == "run")
CLUSTER_KEYS = frozenset({"cluster", "branches", "prompts"})  # branches: a RequestTable alone
LINEAR_KEYS = frozenset(k.name for k in VOCABULARY if k.linear)


@dataclass(frozen=True, slots=True)
class OpStep:
    """One op of a state: the variant for the graph's kinds, its settings, its `file:line`."""

    state: str
    entry: OpEntry
    settings: Mapping[str, Any]
    at: str


@dataclass(frozen=True, slots=True)
class Program:
    """A graph for a machine to run; `given`: the keys that must exist before the first op."""

    graph: Graph
    source: Source
    steps: Mapping[str, tuple[OpStep, ...]]
    guards: Mapping[str, OpEntry]
    given: frozenset[str]

    def with_settings(self, op: str, settings: Mapping[str, Any]) -> "Program | None":
        """The program with these settings in every use of this op, which the graph and so a
        repeated run do not have; None if no state uses it so."""
        steps = dict(self.steps)
        for state, ops in self.steps.items():
            for i, step in enumerate(ops):
                names = {setting.name for setting in step.entry.settings}
                if step.entry.name == op and settings.keys() <= names:
                    changed = replace(step, settings={**step.settings, **settings})
                    steps[state] = (*steps[state][:i], changed, *ops[i + 1 :])
        return None if steps == self.steps else replace(self, steps=steps)
