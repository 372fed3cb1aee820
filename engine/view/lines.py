"""A run in plain lines: its progress without a live view, and every round of every branch with the
figures of each draft for `--explain-rounds`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from time import monotonic

from ...ops.draft.gamma import GammaRecord
from ...states.machine import Event, Moved, OpRan, Run, Sink
from ...states.round import GRAMMAR, MATCH, FinalToken, RoundSummary, VerifiedTree
from ...states.yaml.source import number_of
from ..events import Decode
from ..record.recorder import Recorder
from ..shell import printable

PROGRESS_SECONDS = 10.0  # between two lines without other news
POLL_SECONDS = 0.1  # between two checks of the branches: a run makes hundreds of moves in it

ENDS = {
    FinalToken.BONUS: "a bonus after a path accepted to its end",
    FinalToken.RESIDUAL: "drawn from what the rejection leaves of p",
    FinalToken.TARGET: "the target's own",
}


@dataclass(eq=False)
class PlainView:
    """A line when an outline is parsed and when a branch ends; otherwise one line every 10 s.
    announced: keys of requests whose outlines, and owners of branches whose ends were announced."""

    recorder: Recorder
    run: Run
    say: Callable[[str], None]
    announced: set[str | int] = field(default_factory=set)
    last_line: float = field(default_factory=monotonic)
    last_check: float = field(default_factory=monotonic)

    def __call__(self, event: Event) -> None:
        now = monotonic()
        if not isinstance(event, Moved) or now - self.last_check < POLL_SECONDS:
            return
        self.last_check = now
        self.announce()
        if now - self.last_line >= PROGRESS_SECONDS:
            meter = self.recorder.meter
            self._say(f"{event.target}: round {meter.rounds}, {number_of(meter.tokens, 'token')}")

    def announce(self) -> None:
        requests = self.run.board["branches"].requests if self.run.board else ()
        for request in requests:
            name = "" if len(requests) == 1 else f"[{request.key}] "
            outline = request.outline
            if outline is not None and request.key not in self.announced:
                self.announced.add(request.key)
                count = len(outline.points)
                what = number_of(count, "part") if count else f"no parts ({outline.status})"
                self._say(f"{name}outline: {what}")
            for branch in request.branches:
                if branch.ended and branch.owner not in self.announced:
                    self.announced.add(branch.owner)
                    title = f"{name}{branch.index + 1}. {printable(branch.title, '')}"
                    self._say(f"{title}: {number_of(len(branch.tokens), 'token')}, {branch.finish}")

    def _say(self, line: str) -> None:
        self.last_line = monotonic()
        self.say(f"{self.recorder.now / 1e9:6.1f} s  {line}\n")


def rounds_view(
    recorder: Recorder, run: Run, say: Callable[[str], None], wanted: Callable[[int, str], bool]
) -> Sink:
    """Writes a block per wanted round and branch; rounds have the numbers of trace.jsonl."""

    def view(event: Event) -> None:
        if isinstance(event, OpRan) and "committed" in event.results:
            number = recorder.meter.forwards
            summary = run.board["committed"]
            found = zip(summary.trees, blocks(number, summary, recorder.decode), strict=True)
            for block in (block for tree, block in found if wanted(number, tree.branch)):
                say(block)

    return view


def blocks(number: int, summary: RoundSummary, decode: Decode) -> Iterator[str]:
    rules = {MATCH: "match", GRAMMAR: "under a grammar: the best legal token at each place"}
    gamma: Sequence[GammaRecord | None] = summary.gamma or [None] * len(summary.trees)
    for tree, record in zip(summary.trees, gamma, strict=True):
        depths = tree.depths
        count = len(tree.drafts)
        tokens = tree.num_committed
        accepted = len(tree.path) - 1
        is_chain = len({depths[node] for node in tree.drafts}) == count
        rule = rules.get(tree.rule, f"rejection ({tree.rule})")
        offer = f"{'chain' if is_chain else 'tree'} of {count}, {rule}" if count else "no drafts"
        rows = list(_rows(tree, decode, 0 if is_chain else 2))
        width = max(len(label) for label, _ in rows)
        end = "" if tree.finish is None else f"; the branch ends ({tree.finish})"
        drafts = f"accepted {accepted} of {count} draft{'s' * (count != 1)}"
        lines = [
            f"round {number}  {tree.branch}  {offer}",
            *(f"  {label.ljust(width)}  {what}" for label, what in rows),
            f"  {drafts}, committed {tokens} token{'s' * (tokens != 1)}{end}",
        ]
        if record is not None:
            figures = {"entropy": record.h, "of its reference": record.h_norm}
            figures["smoothed"] = record.ema
            finite = ", ".join(f"{name} {n:.3g}" for name, n in figures.items() if isfinite(n))
            planned = f"gamma {record.gamma}, cut to {record.gamma_eff}"
            lines.append(f"  length: {planned}{finite and '; '}{finite}")
        yield "\n".join(lines) + "\n"


def _rows(tree: VerifiedTree, decode: Decode, indent: int) -> Iterator[tuple[str, str]]:
    """(label, description) of the root, the drafts with children after their parents, and the
    final token in its place, after all children of its parent; indent: blanks for each depth."""
    tokens = (tree.root, *tree.tokens[1:])
    depths = tree.depths
    *_, last = tree.path

    def row(depth: int, before: int | None, token: int, what: str) -> tuple[str, str]:
        place = f"[{tree.position + depth}]"
        return f"{' ' * indent * depth}{place} {piece(decode, before, token)}", what

    def rows_below(node: int) -> Iterator[tuple[str, str]]:
        for child in tree.drafts:
            if tree.parents[child] == node:
                what = _draft(tree, child, decode, tokens[node])
                yield row(depths[child], tokens[node], tokens[child], what)
                yield from rows_below(child)
        if node == last:
            yield row(depths[last] + 1, tokens[last], tree.final, f"final: {end}")

    assert tree.came is not None
    end = "dropped, the answer ends before it"
    accepted = len(tree.path) - 1
    if tree.num_committed > accepted:
        end = ENDS[tree.came]
    elif tree.finish == "stop" and tree.num_committed == accepted:
        end = f"{ENDS[tree.came]}; a stop token"
    yield row(0, None, tree.root, "root")
    yield from rows_below(0)


def _draft(tree: VerifiedTree, node: int, decode: Decode, parent: int) -> str:
    figures = tree.figures[node - 1]
    reached = tree.reached(node)
    mark = "not reached" if not reached else "accepted" if node in tree.path else "rejected"
    numbers: dict[str, float | None] = {"score": figures.score}
    target = ""
    if reached and figures.draw is not None:
        numbers["coin"] = figures.coin
        target = f"target {piece(decode, parent, figures.draw)}"
    if reached and figures.chance is not None:
        numbers |= {"p": figures.p, "q": figures.q, "r": figures.r}
        # The upper bound of r: h of the prefix under `block`, else p / q, which may exceed 1.
        if tree.rule != "block" and figures.q and figures.p is not None:
            numbers["p/q"] = figures.p / figures.q
        else:
            numbers["h" if tree.rule == "block" else "p/q"] = figures.chance
    shown = (f"{name} {value:<8.3g}" for name, value in numbers.items() if value is not None)
    return "  ".join([mark.ljust(11), *shown, target]).rstrip()


def piece(decode: Decode, before: int | None, token: int) -> str:
    """The text of a token after another one in quotation marks, or its id if that is empty."""
    text = decode([token])
    if before is not None:
        head = decode([before])
        whole = decode([before, token])
        text = whole[len(head) :] if whole.startswith(head) else text
    return f'"{printable(text, "")}"' if text else f"<{token}>"
