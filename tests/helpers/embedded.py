"""The embedded models in tests: sessions on the real tokenizer, outlines held to masked greedy."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from helpers.support import Reference, contexts, graphs, requests_of
from specsot.engine.models import Models, load_models
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.job import embedded_folder
from specsot.engine.run.core import EngineCore
from specsot.engine.run.session import Prompt, Session
from specsot.states.request import Branch, Finish
from specsot.states.text.outline import Outline, Point

PLAIN = ("autoregressive", "eagle")


@dataclass
class Embedded:
    models: Models = field(
        default_factory=lambda: load_models(embedded_folder("target"), embedded_folder("eagle3"))
    )
    reference: Reference = field(default_factory=lambda: Reference(embedded_folder("target")))

    def run(
        self,
        graph: str,
        questions: Sequence[str],
        *,
        outline: Outline | None = None,
        sets: Sequence[str] = (),
        budget: int | None = None,
        models: Models | None = None,
    ) -> EngineCore:
        """A whole run of a shipped graph as it ships, but for `sets`; with EAGLE-3 by default."""
        program = open_graph(graph, sets=tuple(sets), table=graphs.table)
        models = models or self.models
        session = Session(program, models, max_new_tokens=budget, outline=outline)
        run = session.start([Prompt(str(i), q) for i, q in enumerate(questions)], lambda e: None)
        while not run.finished:
            run.advance()
        return run

    def check(self, run: EngineCore, graph: str) -> int:
        """Hold every branch, outlines under their grammar, to transformers; returns the tokens."""
        book, before = run.board["prompts"], self.reference.tally.tokens
        for request in requests_of(run):
            for branch, context in contexts(request, book, graph in PLAIN):
                if branch.matcher is None:
                    self.reference.check(branch, context, book.stop_ids)
                else:
                    self.check_outline(branch, context, book.stop_ids)
        return self.reference.tally.tokens - before

    def check_outline(self, branch: Branch, context: Sequence[int], stops: Sequence[int]) -> None:
        """Greedy decoding with the grammar as a logits processor writes the same outline."""
        make = branch.request.new_matcher
        assert make is not None
        matcher = make()
        ids = [*context, *branch.tokens]
        logits_QV = self.reference.logits(ids, torch.float32)[len(context) - 1 :]
        ended = branch.finish is Finish.STOP
        for place, token in enumerate([*branch.tokens, *([None] if ended else [])]):
            legal_V = torch.from_numpy(matcher.legal_mask())
            own = int(logits_QV[place].masked_fill(~legal_V, -torch.inf).argmax())
            if token is None:
                assert own in stops, f"{branch.name}: ended too early"
            else:
                assert own == token, f"{branch.name}: token {place} is {token}, not {own}"
                matcher.advance(token)
        self.reference.tally.tokens += len(branch.tokens) + ended


def given_outline(count: int, deps: bool = False) -> Outline:
    """An outline of `count` parts; with `deps` the last part builds on all others."""
    needs = {count: tuple(range(1, count))} if deps and count > 1 else {}
    titles = ("Main parts", "Goal", "Steps", "Time and cost", "Risks", "Food", "Water", "Summary")
    points = tuple(Point(i, 60, None, needs.get(i, ()), titles[i - 1]) for i in range(1, count + 1))
    return Outline("plan", points, (), "ok")


def titles_named(embedded: Embedded, asked: Sequence[Any], **more: Any) -> tuple[int, int]:
    """Titles of outlines for these probes that name aspects of the subjects, and all titles."""
    right = total = 0
    run = embedded.run("bim_eagle", [probe.question for probe in asked], **more)
    for request, probe in zip(requests_of(run), asked, strict=True):
        assert request.outline is not None
        titles = [point.title for point in request.outline.points]
        assert len(set(titles)) == len(titles)
        right += sum(title in (*probe.titles, "Summary") for title in titles)
        total += len(titles)
    return right, total
