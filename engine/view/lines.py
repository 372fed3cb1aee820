"""A run in plain lines on stderr: its progress without a live view, and for `--explain-rounds`
every round of every branch, each draft with its figures."""

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from time import monotonic

from ...ops.draft.gamma import GammaRecord
from ...states.machine import Event, Moved, OpRan, Run, Sink
from ...states.round import GRAMMAR, MATCH, ExplainedDraft, ExplainedRound, FinalToken, RoundSummary
from ..events import Decode, printable
from ..record.recorder import Recorder

PROGRESS_SECONDS = 10.0  # between two lines without other news
POLL_SECONDS = 0.1  # between two checks of the branches: a run makes hundreds of moves in it

ENDS = {
    FinalToken.BONUS: "a bonus after a path accepted to its end",
    FinalToken.RESIDUAL: "drawn from what the rejection leaves of p",
    FinalToken.TARGET: "the target's own",
}


class PlainView:
    """A line when an outline is parsed and when a branch ends; otherwise one line every 10 s."""

    def __init__(self, recorder: Recorder, run: Run, say: Callable[[str], None]) -> None:
        self.recorder = recorder
        self.run = run
        self.say = say
        self._announced: set[int] = set()
        self._parsed: set[str] = set()
        self._last_line = monotonic()
        self._last_check = self._last_line

    def __call__(self, event: Event) -> None:
        now = monotonic()
        if not isinstance(event, Moved) or now - self._last_check < POLL_SECONDS:
            return
        self._last_check = now
        self.announce()
        if now - self._last_line >= PROGRESS_SECONDS:
            meter = self.recorder.meter
            self._say(f"{event.target}: round {meter.rounds}, {meter.tokens} tokens")

    def announce(self) -> None:
        """Announce new outlines and ended branches."""
        requests = self.run.board["branches"].requests if self.run.board else ()
        for request in requests:
            name = "" if len(requests) == 1 else f"[{request.key}] "
            outline = request.outline
            if outline is not None and request.key not in self._parsed:
                self._parsed.add(request.key)
                count = len(outline.points)
                what = f"{count} parts" if count else f"no parts ({outline.status})"
                self._say(f"{name}outline: {what}")
            for branch in request.branches:
                if branch.ended and branch.owner not in self._announced:
                    self._announced.add(branch.owner)
                    title = f"{name}{branch.index + 1}. {printable(branch.title, '')}"
                    self._say(f"{title}: {len(branch.tokens)} tokens, {branch.finish}")

    def _say(self, line: str) -> None:
        self._last_line = monotonic()
        self.say(f"{self.recorder.now / 1e9:6.1f} s  {line}\n")


def rounds_view(recorder: Recorder, run: Run, say: Callable[[str], None]) -> Sink:
    """Writes a block per branch and round; rounds have the numbers of trace.jsonl."""

    def view(event: Event) -> None:
        if isinstance(event, OpRan) and "committed" in event.results:
            for block in blocks(recorder.meter.forwards, run.board["committed"], recorder.decode):
                say(block)

    return view


def blocks(number: int, summary: RoundSummary, decode: Decode) -> Iterator[str]:
    """The round's blocks, branch by branch."""
    gamma: Sequence[GammaRecord | None] = summary.gamma or [None] * len(summary.explained)
    for entry, record in zip(summary.explained, gamma, strict=True):
        count = len(entry.drafts)
        tokens = entry.committed
        is_chain = len({draft.depth for draft in entry.drafts}) == count
        rules = {MATCH: "match", GRAMMAR: "under a grammar: the best legal token at each place"}
        offer = f"{'chain' if is_chain else 'tree'} of {count}, "
        offer += rules.get(entry.rule, f"rejection ({entry.rule})")
        lines = [f"round {number}  {entry.branch}  {offer if count else 'no drafts'}"]
        rows = list(_rows(entry, decode, 0 if is_chain else 2))
        width = max(len(label) for label, _ in rows)
        lines += [f"  {label.ljust(width)}  {what}" for label, what in rows]
        totals = f"  accepted {entry.accepted} of {count} draft{'s' * (count != 1)}, "
        totals += f"committed {tokens} token{'s' * (tokens != 1)}"
        totals += "" if entry.finish is None else f"; the branch ends ({entry.finish})"
        lines.append(totals)
        if record is not None:
            lines.append(f"  {_length(record)}")
        yield "\n".join(lines) + "\n"


def _rows(entry: ExplainedRound, decode: Decode, indent: int) -> Iterator[tuple[str, str]]:
    """(label, description) of the root, the drafts with children after their parents, and the
    final token in its place; indent: blanks for each depth."""

    def label(depth: int, before: int | None, token: int) -> str:
        return f"{' ' * indent * depth}[{entry.position + depth}] {piece(decode, before, token)}"

    tokens = {0: entry.root} | {draft.node: draft.token for draft in entry.drafts}
    yield label(0, None, entry.root), "root"
    last = max((draft.node for draft in entry.drafts if draft.accepted), default=0)
    for draft in _places(entry.drafts, last):
        if draft is not None:
            before = tokens[draft.parent]
            what = _draft(draft, entry.rule, decode, before)
            yield label(draft.depth, before, draft.token), what
            continue
        end = "not kept, the answer ends before it"
        if entry.committed > entry.accepted:
            end = ENDS[entry.came]
        elif entry.finish == "stop" and entry.committed == entry.accepted:
            end = f"{ENDS[entry.came]}; a stop token"
        yield label(entry.accepted + 1, tokens[last], entry.final), f"final: {end}"


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
    parts = [mark.ljust(11), *_number("score", figures.score)]
    if draft.reached and figures.draw is not None:
        parts += [*_number("coin", figures.coin), f"target {piece(decode, parent, figures.draw)}"]
    if draft.reached and figures.chance is not None:
        parts += [*_number("p", figures.p), *_number("q", figures.q), *_number("r", figures.r)]
        # The upper bound of r: h of the prefix under `block`, else p / q, which may exceed 1.
        if rule == "block":
            parts += _number("h", figures.chance)
        else:
            ratio = figures.chance
            if figures.q and figures.p is not None:
                ratio = figures.p / figures.q
            parts += _number("p/q", ratio)
    return "  ".join(parts).rstrip()


def _number(name: str, value: float | None) -> list[str]:
    return [] if value is None else [f"{name} {value:<8.3g}"]


def _length(record: GammaRecord) -> str:
    figures = {"entropy": record.h, "of its reference": record.h_norm, "smoothed": record.ema}
    finite = [f"{name} {value:.3g}" for name, value in figures.items() if isfinite(value)]
    planned = f"length: gamma {record.gamma}, cut to {record.gamma_eff}"
    return "; ".join([planned, *([", ".join(finite)] if finite else [])])


def piece(decode: Decode, before: int | None, token: int) -> str:
    """The text of a token in quotation marks, or its id if the text is empty.

    A token's text can depend on the token before it.
    """
    text = decode([token])
    if before is not None:
        head = decode([before])
        whole = decode([before, token])
        text = whole[len(head) :] if whole.startswith(head) else text
    return f'"{printable(text, "")}"' if text else f"<{token}>"
