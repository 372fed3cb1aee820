"""The blackboard's vocabulary: every key that an op may read or write. The one place for it.

Keys of a run are there before the first op and stay, or those of a cluster, where the machine
directs workers; keys of a round are written by ops and used up by the ops that drop them. Shape
letters are explained in `ops/__init__.py`.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Key:
    """A blackboard key: how long it lives, and what it holds.

    linear: its values are used one by one: an op may write it only where no earlier value can still
        be there, or if it reads that value itself.
    """

    name: str
    lifetime: Literal["run", "cluster", "round"]
    holds: str
    linear: bool = False


VOCABULARY: tuple[Key, ...] = (
    Key("branches", "run", "BranchStateManager: requests, owners, tips, outputs, budgets"),
    Key("target", "run", "Target: the model whose output counts"),
    Key("drafter", "run", "Drafter: proposes the trees of the branches, keeps what it needs"),
    Key("kv", "run", "KVCache: the target's pool and slot table"),
    Key("kv_draft", "run", "KVCache: the drafter's pool, None for drafters without one"),
    Key("host", "run", "HostReader: the only way from device values to host ints"),
    Key("prompts", "run", "PromptBook: templates and tokenizer, the text side of a run"),
    Key("taps", "run", "which of the target's hidden states the drafter reads (HF indices)"),
    Key("inbox", "run", "Inbox: requests that come while the run goes, and whether more may"),
    Key("cluster", "cluster", "ClusterDirector: workers, and who of them does what"),
    Key("step", "round", "StepPlan: what this step does, and who starts in it; host ints"),
    Key("batch", "round", "Batch: rows of the forward in flight, and whose they are", linear=True),
    Key("rows", "round", "Rows: tokens, positions, slots, segments of the next target forward"),
    Key("attention", "round", "AttentionPlan: groups of rows, the slots each may see, masks"),
    Key("plan", "round", "LayerPlan: one LayerStatus per layer of the next target forward"),
    Key("logits", "round", "logits_RV float32 of the rows that asked for them"),
    Key("features", "round", "taps_QF of every row, or None when nobody reads them"),
    Key("blended", "round", "BlendReport of a forward with cached rows, else None"),
    Key("roots", "round", "FirstTokens: the tokens drawn at the prefill tips"),
    Key("draft_rows", "round", "what the drafter reads: committed tokens and their features"),
    Key("frontier", "round", "the first drafted level of every branch"),
    Key("proposal", "round", "Proposal: a token tree per branch, everything [S, ...]", linear=True),
    Key("accepted", "round", "Accepted: the path of each tree that the target agreed with"),
    Key("searches", "round", "Searches: what is known of every beam search of a forward"),
    Key("chosen", "round", "Chosen: which beams live on, which hypotheses are kept"),
    Key("committed", "round", "RoundSummary: what the round added, host ints"),
    Key("answers", "round", "the finished answers in reading order"),
)

RUN_KEYS = frozenset(k.name for k in VOCABULARY if k.lifetime == "run")
CLUSTER_KEYS = frozenset({"cluster", "branches", "prompts"})  # branches: a RequestTable alone
LINEAR_KEYS = frozenset(k.name for k in VOCABULARY if k.linear)
