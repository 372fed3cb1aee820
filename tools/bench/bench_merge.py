"""The ways to make one answer of all parts: what each costs, and how many facts its text keeps.

    python -m tools.bench.bench_merge --threads 1

The embedded model, prompts about people in documents, whose facts are known. Every prompt is
answered once in every way, one after another (paired); the parts are the same, for only
`skeleton.merge` differs. Milliseconds are those of the state `merge`, from finished parts to the
combined answer's first token, medians over prompts; `whole` is that of the whole request against
`plain`. Rows are those that the parts had: how many of them the target computes again, at each
layer that does so. Bytes are what the ledger of the target's pool counts.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from specsot.engine.models import Models, load_models
from specsot.engine.prepare.environment import embedded_folder
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import Session
from specsot.states.scheduler import Does
from specsot.states.trace import Event, OpRan

from ..embedded.reading_prompts import ReadingPrompt, SetSettings, reading_prompts

GRAPH = "bim_blend_merge"
WAYS = {
    "concat": ("skeleton.merge=concat",),
    "plain": ("skeleton.merge=plain",),
    "blend": ("skeleton.merge=blend",),
    "attend": ("skeleton.merge=attend",),
}


@dataclass(slots=True)
class Figures:
    """What one way took, a number for each prompt."""

    fold: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    had: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    kept: int = 0
    facts: int = 0
    in_parts: int = 0


class Answered:
    """One prompt answered in one way."""

    def __init__(self, session: Session, prompt: ReadingPrompt, key: str) -> None:
        self.fold, self.again, self.had = 0.0, 0, 0
        asked = Prompt(key, prompt.question, documents=prompt.documents)
        run = session.start([asked], self._see)
        self.run, begun = run, perf_counter()
        while not run.finished:
            board, state, before = run.board, run.state, perf_counter()
            folding = state == "schedule" and board["step"].does is Does.FOLD
            if folding:
                (request,) = board["branches"].requests
                self.had = sum(b.length - b.start for b in request.parts)
                last = request.branches[-1]
                self.again = 0 if last.reads or last.prompt.chunks else self.had
            run.advance()
            self.fold += perf_counter() - before if folding else 0.0
        self.whole = perf_counter() - begun
        self.moved = int(sum(run.board["kv"].ledger.bytes.values()))
        (self.answer,) = run.board["answers"]

    def _see(self, event: Event) -> None:
        """Of a blended fold the rows that were computed again."""
        if isinstance(event, OpRan) and "committed" in event.results and self.run.state == "merge":
            blend: Any = self.run.board["committed"].blend
            if blend is not None:
                self.again = sum(blend.picked)


def sessions(models: Models, args: argparse.Namespace) -> dict[str, Session]:
    found = {}
    for way, sets in WAYS.items():
        layout = f"layout.kind={args.layout}"
        program = open_graph(GRAPH, (*sets, layout, "drafter.kind=none", *args.sets))
        found[way] = Session(program, models)
    return found


def measured(ways: dict[str, Session], prompts: Sequence[ReadingPrompt]) -> dict[str, Figures]:
    found = {way: Figures() for way in ways}
    for session in ways.values():  # nobody pays for what the first run loads
        Answered(session, prompts[0], "warm")
    for number, prompt in enumerate(prompts):
        for way, session in ways.items():
            one, figures = Answered(session, prompt, str(number)), found[way]
            if len(one.answer.sections) < 2:
                break  # the model asked for no parts
            parts = "\n".join(section.text for section in one.answer.sections)
            stated = [value for value in prompt.values if value in parts]
            figures.in_parts += len(stated)
            figures.facts += len(prompt.values)
            figures.kept += sum(value in one.answer.text for value in stated)
            figures.fold.append(one.fold)
            figures.whole.append(one.whole)
            figures.again.append(one.again)
            figures.had.append(one.had)
            figures.moved.append(one.moved)
    return found


def table(found: dict[str, Figures]) -> str:
    lines = [
        "| `merge` | ms of the fold | rows computed again | bytes moved | whole | facts kept |",
        "|---|---|---|---|---|---|",
    ]
    plain = found["plain"].whole
    for way, one in found.items():
        ratio = median(a / b for a, b in zip(one.whole, plain, strict=True))
        again, had = sum(one.again), sum(one.had)
        rows = f"{again} of {had}" if had else "none"
        lines.append(
            f"| {way} | {1e3 * median(one.fold):.1f} | {rows} | {sum(one.moved)} "
            f"| {ratio:.2f} | {one.kept} / {one.in_parts} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layout", default="bim")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--model", type=Path, default=embedded_folder("target"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = load_models(args.model, None)
    settings = SetSettings(args.prompts, args.documents, kinds=("search",), seed=args.seed)
    prompts = list(reading_prompts(settings, lambda text: len(models.tokenizer.encode(text))))
    print(table(measured(sessions(models, args), prompts)))


if __name__ == "__main__":
    main()
