"""Answers, distributions and cached numbers of the embedded target on a blended cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specsot.engine.chunks.store import ChunkStore
from specsot.engine.models import Models
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.record.metrics import divergence, mean_errors, relative_errors
from specsot.engine.run.session import Session
from specsot.states.machine import Run
from specsot.states.trace import Event, OpRan

from ..embedded.reading_prompts import ReadingPrompt, SetSettings, reading_prompts
from .blend_modes import FULL, Mode, session_of
from .blend_ttft import Tell

KINDS = ("one_hop", "two_hop")
DOCUMENTS = 3  # of each prompt
MOST = 64  # tokens of an answer
Z = 1.96  # of a 95 % interval


@dataclass(frozen=True, slots=True)
class Read:
    """What one run made of a prompt.

    text: its answer. log_V: log-probabilities behind the last token of the prompt; value_V: behind
        the right answer's words up to those that were asked for. kv_L2x: K and V ([layers, 2, rows
        x heads x head_dim]) of the documents' rows, as the pool holds them.
    """

    text: str
    log_V: Tensor
    value_V: Tensor
    kv_L2x: Tensor
    rows: int


@dataclass(slots=True)
class Tally:
    """Figures of one mode over prompts of one kind."""

    right: int = 0
    same: int = 0
    kl: list[float] = field(default_factory=list)
    kl_value: list[float] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)

    def add(self, read: Read, full: Read, answer: str) -> None:
        self.right += read.text == answer
        self.same += read.text == full.text
        self.kl.append(divergence(full.log_V, read.log_V))
        self.kl_value.append(divergence(full.value_V, read.value_V))
        self.errors.append(relative_errors(read.kv_L2x, full.kv_L2x))

    def figures(self) -> dict[str, Any]:
        """n, shares with their intervals, means over prompts."""
        n = len(self.kl)
        return {
            "n": n,
            "right": self.right / n,
            "interval": interval(self.right, n),
            "same": self.same / n,
            "kl": mean(self.kl),
            "kl_value": mean(self.kl_value),
            **mean_errors(self.errors),
        }


def measure(
    models: Models, modes: Sequence[Mode], tokens: int, prompts: int, seed: int, tell: Tell
) -> dict[str, Any]:
    """Per kind of question: figures of every mode, on the same prompts.

    Args:
        tokens: of the documents of a prompt together, about. prompts: of each kind.
    """
    store = ChunkStore(1 << 30)
    fixed = ("layout.max_num_branches=1", f"limits.max_new_tokens={MOST}")
    opened = {mode: session_of(mode, models, store, *fixed) for mode in modes}
    tallies = {kind: {mode.name: Tally() for mode in modes} for kind in KINDS}
    sizes: list[int] = []
    for number, asked in enumerate(questions(models, tokens, prompts, seed), 1):
        full = read(opened[Mode(FULL)], asked)
        sizes.append(full.rows)
        for mode, session in opened.items():
            found = full if mode.name == FULL else read(session, asked)
            tallies[asked.kind][mode.name].add(found, full, *asked.answers)
        tell(f"{tokens} tokens of documents, prompt {number} of {len(KINDS) * prompts}")
    kinds = {
        kind: {name: tally.figures() for name, tally in found.items()}
        for kind, found in tallies.items()
    }
    return {"rows": mean(sizes), "kinds": kinds}


def questions(models: Models, tokens: int, prompts: int, seed: int) -> Iterator[ReadingPrompt]:
    """So many prompts of each kind, in turn; no document occurs twice."""
    settings = SetSettings(4 * prompts, DOCUMENTS, 0.0, tokens=tokens, kinds=KINDS, seed=seed)
    left = dict.fromkeys(KINDS, prompts)
    for asked in reading_prompts(settings, lambda text: len(models.tokenizer.tokenize(text))):
        if left[asked.kind]:
            left[asked.kind] -= 1
            yield asked
        if not any(left.values()):
            return
    raise ValueError(f"too few prompts of a kind: {left} are missing")


def read(session: Session, asked: ReadingPrompt) -> Read:
    """One prompt through the graph: its prefill is looked at, then it goes on to the answer."""
    with prefilled(session, asked) as run:
        (request,) = run.board["branches"].requests
        rows = [at for c in request.tail.chunks for at in range(c.at, c.at + len(c.ids))]
        log_V, kv_L2x = run.sink.log_V, held(run, rows)
        while not run.finished:
            run.advance()
        text = session.prompts.decode(request.branches[0].tokens)
    with prefilled(session, asked, up_to_value(session, asked)) as run:
        return Read(text, log_V, run.sink.log_V, kv_L2x, len(rows))


def prefilled(session: Session, asked: ReadingPrompt, more: Sequence[int] = ()) -> Run:
    """A run behind the prefill of a prompt and perhaps the beginning of its answer."""
    request = session.request(Prompt("1", asked.question, documents=asked.documents))
    request.tail += more
    board, sink = session.board(), Sink()
    board["branches"].submit(request)
    sink.run = run = Run(session.program, board, sink)
    while run.state != "prefill":
        run.advance()
    return run


class Sink:
    """Keeps the distribution that a run's first forward gives its only prompt."""

    run: Run
    log_V: Tensor | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, OpRan) and event.op == "target.forward_" and self.log_V is None:
            (logits_V,) = self.run.board["logits"].double()
            self.log_V = logits_V.log_softmax(-1)


def up_to_value(session: Session, asked: ReadingPrompt) -> list[int]:
    """Ids of the right answer before the first one with a part of what was asked for."""
    (answer,), (value,) = asked.answers, asked.values
    tokenizer = session.models.tokenizer
    found = tokenizer(answer, add_special_tokens=False, return_offsets_mapping=True)
    first = answer.rindex(value)
    ends = [end for _, end in found["offset_mapping"]]
    return found["input_ids"][: next(i for i, end in enumerate(ends) if end > first)]


def held(run: Run, rows: list[int]) -> Tensor:
    """[layers, 2, x] of these rows of the only sequence, in the order of their positions."""
    pool = run.board["kv"]
    slots = np.argsort(np.where(pool.committed, pool.position, 1 << 30), kind="stable")[rows]
    return pool.data[:, :, :, torch.tensor(slots)].flatten(2)


def interval(hits: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, z2 = hits / n, Z * Z / n
    middle = (share + z2 / 2) / (1 + z2)
    half = Z * ((share * (1 - share) / n + z2 / (4 * n)) ** 0.5) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)
