"""A run in plain lines: its progress without a live view, every round of every branch with the
figures of each draft for `--explain-rounds`, and the replay of a saved run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite
from time import monotonic

from ...ops.draft.gamma import GammaRecord
from ...states.machine import Event, Moved, OpRan, Run, Sink
from ...states.round import GRAMMAR, MATCH, ExplainedDraft, ExplainedRound, FinalToken, RoundSummary
from ..events import Decode, printable
from ..record.recorder import Record, Recorder
from ..record.replay import Replay, trees_of
from ..record.run_view import draft_tree
from .drafts import MAX_ROWS, tree_lines

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
            self._say(f"{event.target}: round {meter.rounds}, {meter.tokens} tokens")

    def announce(self) -> None:
        requests = self.run.board["branches"].requests if self.run.board else ()
        for request in requests:
            name = "" if len(requests) == 1 else f"[{request.key}] "
            outline = request.outline
            if outline is not None and request.key not in self.announced:
                self.announced.add(request.key)
                count = len(outline.points)
                what = f"{count} parts" if count else f"no parts ({outline.status})"
                self._say(f"{name}outline: {what}")
            for branch in request.branches:
                if branch.ended and branch.owner not in self.announced:
                    self.announced.add(branch.owner)
                    title = f"{name}{branch.index + 1}. {printable(branch.title, '')}"
                    self._say(f"{title}: {len(branch.tokens)} tokens, {branch.finish}")

    def _say(self, line: str) -> None:
        self.last_line = monotonic()
        self.say(f"{self.recorder.now / 1e9:6.1f} s  {line}\n")


def rounds_view(recorder: Recorder, run: Run, say: Callable[[str], None]) -> Sink:
    """Writes a block per branch and round; rounds have the numbers of trace.jsonl."""

    def view(event: Event) -> None:
        if isinstance(event, OpRan) and "committed" in event.results:
            for block in blocks(recorder.meter.forwards, run.board["committed"], recorder.decode):
                say(block)

    return view


def blocks(number: int, summary: RoundSummary, decode: Decode) -> Iterator[str]:
    rules = {MATCH: "match", GRAMMAR: "under a grammar: the best legal token at each place"}
    gamma: Sequence[GammaRecord | None] = summary.gamma or [None] * len(summary.explained)
    for entry, record in zip(summary.explained, gamma, strict=True):
        count = len(entry.drafts)
        tokens = entry.committed
        is_chain = len({draft.depth for draft in entry.drafts}) == count
        rule = rules.get(entry.rule, f"rejection ({entry.rule})")
        offer = f"{'chain' if is_chain else 'tree'} of {count}, {rule}" if count else "no drafts"
        rows = list(_rows(entry, decode, 0 if is_chain else 2))
        width = max(len(label) for label, _ in rows)
        end = "" if entry.finish is None else f"; the branch ends ({entry.finish})"
        accepted = f"accepted {entry.accepted} of {count} draft{'s' * (count != 1)}"
        lines = [
            f"round {number}  {entry.branch}  {offer}",
            *(f"  {label.ljust(width)}  {what}" for label, what in rows),
            f"  {accepted}, committed {tokens} token{'s' * (tokens != 1)}{end}",
            *([] if record is None else [f"  length: {_length(record)}"]),
        ]
        yield "\n".join(lines) + "\n"


def _rows(entry: ExplainedRound, decode: Decode, indent: int) -> Iterator[tuple[str, str]]:
    """(label, description) of the root, the drafts with children after their parents, and the
    final token in its place; indent: blanks for each depth."""

    def label(depth: int, before: int | None, token: int) -> str:
        return f"{' ' * indent * depth}[{entry.position + depth}] {piece(decode, before, token)}"

    tokens = {0: entry.root} | {draft.node: draft.token for draft in entry.drafts}
    yield label(0, None, entry.root), "root"
    last = max((draft.node for draft in entry.drafts if draft.accepted), default=0)
    end = "dropped, the answer ends before it"
    if entry.committed > entry.accepted:
        end = ENDS[entry.came]
    elif entry.finish == "stop" and entry.committed == entry.accepted:
        end = f"{ENDS[entry.came]}; a stop token"
    for draft in _places(entry.drafts, last):
        if draft is None:
            yield label(entry.accepted + 1, tokens[last], entry.final), f"final: {end}"
        else:
            before = tokens[draft.parent]
            what = _draft(draft, entry.rule, decode, before)
            yield label(draft.depth, before, draft.token), what


def _places(
    drafts: Sequence[ExplainedDraft], last: int, node: int = 0
) -> Iterator[ExplainedDraft | None]:
    """The drafts below a node in order; None for the final token, after all children of `last`."""
    for draft in drafts:
        if draft.parent == node:
            yield draft
            yield from _places(drafts, last, draft.node)
    if node == last:
        yield None


def _draft(draft: ExplainedDraft, rule: str, decode: Decode, parent: int) -> str:
    figures = draft.figures
    mark = "not reached" if not draft.reached else "accepted" if draft.accepted else "rejected"
    numbers: dict[str, float | None] = {"score": figures.score}
    target = ""
    if draft.reached and figures.draw is not None:
        numbers["coin"] = figures.coin
        target = f"target {piece(decode, parent, figures.draw)}"
    if draft.reached and figures.chance is not None:
        numbers |= {"p": figures.p, "q": figures.q, "r": figures.r}
        # The upper bound of r: h of the prefix under `block`, else p / q, which may exceed 1.
        if rule != "block" and figures.q and figures.p is not None:
            numbers["p/q"] = figures.p / figures.q
        else:
            numbers["h" if rule == "block" else "p/q"] = figures.chance
    shown = (f"{name} {value:<8.3g}" for name, value in numbers.items() if value is not None)
    return "  ".join([mark.ljust(11), *shown, target]).rstrip()


def _length(record: GammaRecord) -> str:
    figures = {"entropy": record.h, "of its reference": record.h_norm, "smoothed": record.ema}
    finite = (f"{name} {value:.3g}" for name, value in figures.items() if isfinite(value))
    planned = f"gamma {record.gamma}, cut to {record.gamma_eff}"
    return "; ".join(filter(None, (planned, ", ".join(finite))))


def piece(decode: Decode, before: int | None, token: int) -> str:
    """The text of a token after another one in quotation marks, or its id if that is empty."""
    text = decode([token])
    if before is not None:
        head = decode([before])
        whole = decode([before, token])
        text = whole[len(head) :] if whole.startswith(head) else text
    return f'"{printable(text, "")}"' if text else f"<{token}>"


# -- a replay -------------------------------------------------------------------------------------


def replay_lines(replay: Replay, width: int = 100) -> Iterator[str]:
    """The transitions and rounds of a run, each draft with its mark, as plain lines."""
    scene = replay.scene
    yield f"{scene.graph} · {scene.layout} · {scene.drafter} · {printable(scene.model, '')}"
    for request in replay.requests:
        yield f"? [{printable(request.key, '')}] {printable(request.question, '')}"
    for record in chain.from_iterable(map(replay.records_of, range(len(replay)))):
        if record["kind"] == "move":
            guard = f"  ({record['guard']})" if record["guard"] else ""
            yield f"{record['t'] / 1e9:8.3f} s  {record['from']} → {record['to']}{guard}"
        elif record["kind"] == "round":
            yield from _round_lines(record, replay.text_of, width)


def _round_lines(record: Record, text: Callable[[int], str], width: int) -> Iterator[str]:
    trees = {tree.branch: draft_tree(record["round"], tree, text) for tree in trees_of(record)}
    longest = max(map(len, record["branches"]), default=0)
    for name, count in zip(record["branches"], record["committed"], strict=True):
        shown = printable(name, "").ljust(longest)
        head = f"            round {record['round']}  {shown} +{count}"
        if name not in trees:
            yield head
            continue
        tree = trees[name]
        front = head + f"  {tree.accepted}/{tree.drafted}".ljust(8)
        for line in tree_lines(tree, max(width - len(head) - 10, 30), MAX_ROWS):
            yield f"{front}{line.plain}".rstrip()
            front = " " * (len(head) + 8)
