"""What several tests share: prompts as ids, models, and the reference that answers are held to."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from specsot.engine.files import open_graph
from specsot.engine.session import Models, Prompt, Session
from specsot.models.eagle3 import Eagle3
from specsot.models.weights import load_eagle3, load_target
from specsot.states.branches import Branch, Finish, Request
from specsot.states.machine import Run
from specsot.states.outline import Outline, Point


class TokenBook:
    """Prompts for models without a tokenizer: ids drawn from the text itself, so repeatable."""

    def __init__(self, vocab: int, share: str, stop_ids: Sequence[int], hoist: int = 3) -> None:
        self.vocab, self.share, self.hoist = vocab, share, hoist
        self.stop_ids = tuple(stop_ids)

    def ids(self, text: str, low: int, high: int) -> list[int]:
        draw = random.Random(text)
        return [draw.randrange(self.vocab) for _ in range(draw.randint(low, high))]

    def plain(self, question: str) -> list[int]:
        return [*self.skeleton(question)[0], *self.direct("prompt")]

    def skeleton(self, question: str) -> tuple[list[int], list[int]]:
        return self.ids(f"prefix {question}", 3, 40), self.ids(f"tail {question}", 1, 9)

    def branch(
        self, point: Point, outline: Outline, dep_ids: Sequence[tuple[int, Sequence[int]]]
    ) -> tuple[list[int], list[int]]:
        own = self.ids(f"own {point.id} {point.title}", 1, 12)
        for dep, ids in dep_ids:
            own += [dep, *ids]
        return self.ids("hoist", 1, 1) * self.hoist, own

    def direct(self, share: str | None = None) -> list[int]:
        return self.ids(f"direct {share or self.share}", 1, 9)

    def outline_ids(self, points: Sequence[Point]) -> list[int]:
        return self.ids(f"outline {len(points)}", 5, 30)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def outline_of(count: int, deps: dict[int, tuple[int, ...]] | None = None) -> Outline:
    """A given outline of `count` branches."""
    points = tuple(
        Point(i, 50, None, (deps or {}).get(i, ()), f"Part {i}") for i in range(1, count + 1)
    )
    return Outline("plan", points, (), "ok")


def tiny_models(
    target_dir: Path, drafter_dir: Path | None, stop_ids: Sequence[int], dtype: str = "float32"
) -> Models:
    """A tiny target and drafter, no tokenizer."""
    kind = getattr(torch, dtype)
    target = load_target(target_dir, dtype=kind)
    drafter: Eagle3 | None = None
    if drafter_dir is not None:
        drafter = load_eagle3(drafter_dir, target, dtype=kind)
    return Models(target, drafter, None, tuple(stop_ids), torch.device("cpu"), kind)


def run_all(session: Session, texts: Sequence[str], check: bool = True) -> Run:
    """A run over the prompts, driven to its end; pools are checked after every phase."""
    run = session.start([Prompt(str(i), text) for i, text in enumerate(texts)], lambda event: None)
    while not run.finished:
        run.advance()
        if check:
            check_pools(run)
    return run


def check_pools(run: Run) -> None:
    for key in ("kv", "kv_draft"):
        if run.board[key] is not None:
            run.board[key].check_integrity()


def contexts(request: Request, book: TokenBook, plain: bool) -> list[tuple[Branch, list[int]]]:
    """Every branch with the token ids it was decoded behind, put together without the engine."""
    if plain:
        return [(request.branches[0], list(book.plain(request.question)))]
    prefix, tail = book.skeleton(request.question)
    shared, found = [*prefix], []
    root = request.root
    assert root is not None and request.outline is not None
    if request.given is None:
        found.append((root, [*prefix, *tail]))
    if book.share == "outline":
        shared += [*tail, *(request.given_ids or root.tokens)]
    done = {b.point.id: b.tokens for b in request.branches if b.point}
    for branch in request.branches:
        if branch.point is None:
            found.append((branch, [*shared, *book.direct()]))
            continue
        quoted = [(dep, done[dep]) for dep in branch.point.deps]
        hoist, own = book.branch(branch.point, request.outline, quoted)
        found.append((branch, [*shared, *hoist, *own]))
    return found


@dataclass
class Reference:
    """Greedy decoding by transformers, checked by teacher forcing: one forward per answer."""

    folder: Path
    tokens: int = 0
    ties: int = 0

    def __post_init__(self) -> None:
        self.models: dict[torch.dtype, torch.nn.Module] = {}

    def logits(self, ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self.models:
            model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype)
            self.models[dtype] = model.eval()
        with torch.inference_mode():
            return self.models[dtype](torch.tensor([list(ids)])).logits[0]

    def check(self, branch: Branch, context: Sequence[int], stop_ids: Sequence[int]) -> None:
        """Raise AssertionError at the first token that is not the target's own."""
        answer = [*branch.tokens]
        assert not set(answer) & set(stop_ids), "a stop token inside the answer"
        assert branch.finish in (Finish.STOP, Finish.LENGTH), branch.finish
        logits_QV = self.logits([*context, *answer], torch.float32)[len(context) - 1 :]
        own = logits_QV.argmax(-1).tolist()
        for place, token in enumerate(answer):
            assert own[place] == token or self.tie(branch, context, place), (
                f"{branch.name}: token {place} is {token}, the target says {own[place]}"
            )
        if branch.finish is Finish.STOP:
            assert own[len(answer)] in stop_ids, f"{branch.name}: stopped too early"
        else:
            assert len(answer) == branch.budget
        self.tokens += len(answer)

    def tie(self, branch: Branch, context: Sequence[int], place: int) -> bool:
        """A numeric tie: equal in float64 and closer than 1e-4 in float32."""
        ids = [*context, *branch.tokens[:place]]
        top = self.logits(ids, torch.float32)[-1].topk(2).values
        exact = int(self.logits(ids, torch.float64)[-1].argmax())
        near = bool(top[0] - top[1] < 1e-4) and exact == branch.tokens[place]
        self.ties += near
        return near


def check_lossless(run: Run, book: TokenBook, reference: Reference, plain: bool) -> None:
    """Every branch of every request (the outline too) holds the target's own tokens."""
    for request in run.board["branches"].requests:
        for branch, context in contexts(request, book, plain):
            reference.check(branch, context, book.stop_ids)


