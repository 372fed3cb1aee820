"""A run in plain lines on stderr: its progress without a live view, and for `--explain-rounds`
every round of every branch, each draft with its figures."""

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from time import monotonic

from ...ops.draft.gamma import GammaRecord
from ...ops.verify.verify import DraftFigures
from ...states.machine import Event, Moved, OpRan, Run, Sink
from ...states.request import Request
from ...states.round import GRAMMAR, MATCH, ExplainedDraft, ExplainedRound, FinalToken, RoundSummary
from ..record.recorder import Recorder
from ..text_stream import Decode, printable

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
            self._announce_request(request, "" if len(requests) == 1 else f"[{request.key}] ")

    def _announce_request(self, request: Request, name: str) -> None:
        if request.outline is not None and request.key not in self._parsed:
            self._parsed.add(request.key)
            count = len(request.outline.points)
            what = f"{count} parts" if count else f"no parts ({request.outline.status})"
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
        lines = [f"round {number}  {entry.branch}  {_offer(entry)}", *_rows(entry, decode)]
        lines += [f"  {_totals(entry)}"]
        lines += [] if record is None else [f"  {_length(record)}"]
        yield "\n".join(lines) + "\n"


def _offer(entry: ExplainedRound) -> str:
    count = len(entry.drafts)
    if not count:
        return "no drafts"
    what = "chain" if _is_chain(entry) else "tree"
    ways = {MATCH: "match", GRAMMAR: "under a grammar: the best legal token at each place"}
    return f"{what} of {count}, {ways.get(entry.rule, f'rejection ({entry.rule})')}"


def _is_chain(entry: ExplainedRound) -> bool:
    return len({draft.depth for draft in entry.drafts}) == len(entry.drafts)


def _rows(entry: ExplainedRound, decode: Decode) -> list[str]:
    """The root, the drafts with children after their parents, and the final token in its place."""
    tokens = {0: entry.root} | {draft.node: draft.token for draft in entry.drafts}
    indent = 0 if _is_chain(entry) else 2
    rows = [(_label(entry, 0, 0, piece(decode, None, entry.root)), "root")]
    last = max((draft.node for draft in entry.drafts if draft.accepted), default=0)
    for place in _places(entry.drafts, last):
        if isinstance(place, ExplainedDraft):
            depth = place.depth
            token = place.token
            before = tokens[place.parent]
            what = _draft(place, entry.rule, decode, before)
        else:
            depth = entry.accepted + 1
            token = entry.final
            before = tokens[last]
            what = f"final: {_end(entry)}"
        rows.append((_label(entry, depth, indent, piece(decode, before, token)), what))
    width = max(len(label) for label, _ in rows)
    return [f"  {label.ljust(width)}  {what}" for label, what in rows]


def _label(entry: ExplainedRound, depth: int, indent: int, text: str) -> str:
    return f"{' ' * indent * depth}[{entry.position + depth}] {text}"


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
    mark = "accepted" if draft.accepted else "rejected"
    mark = mark if draft.reached else "not reached"
    parts = [mark.ljust(11), *_number("score", figures.score)]
    if draft.reached and figures.draw is not None:
        parts += [*_number("coin", figures.coin), f"target {piece(decode, parent, figures.draw)}"]
    if draft.reached and figures.chance is not None:
        parts += [*_number("p", figures.p), *_number("q", figures.q), *_number("r", figures.r)]
        parts += _number("h" if rule == "block" else "p/q", _ratio(figures, rule))
    return "  ".join(parts).rstrip()


def _ratio(figures: DraftFigures, rule: str) -> float | None:
    """The upper bound of r: h of the prefix under `block`, else p / q, which may exceed 1."""
    if rule == "block" or not figures.q or figures.p is None:
        return figures.chance
    return figures.p / figures.q


def _number(name: str, value: float | None) -> list[str]:
    return [] if value is None else [f"{name} {value:<8.3g}"]


def _end(entry: ExplainedRound) -> str:
    if entry.committed > entry.accepted:
        return ENDS[entry.came]
    if entry.finish == "stop" and entry.committed == entry.accepted:
        return f"{ENDS[entry.came]}; a stop token"
    return "not kept, the answer ends before it"


def _totals(entry: ExplainedRound) -> str:
    drafts = len(entry.drafts)
    tokens = entry.committed
    text = f"accepted {entry.accepted} of {drafts} draft{'s' * (drafts != 1)}, "
    text += f"committed {tokens} token{'s' * (tokens != 1)}"
    return text if entry.finish is None else f"{text}; the branch ends ({entry.finish})"


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
