"""An answer's text in reading order, as soon as each piece of it is certain."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...states.graph.graph import Graph
from .events import BranchFinished, OutlineRead, StreamEvent, TextWritten


@dataclass(slots=True)
class ReadingOrder:
    """Parts are written side by side: the first that has not ended is shown, the others are kept
    until it is their turn. Where parts are combined, the combined answer is shown alone.

    What comes out, joined, is `Answer.text`; so blanks at a part's end wait for what follows them.

    Args:
        combines: the graph makes one answer of the parts. raw: blanks stay as they are written.
    """

    combines: bool = False
    raw: bool = False
    titles: tuple[str, ...] = ()
    _texts: dict[int, str] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _at: int = 0
    _begun: bool = False

    @classmethod
    def of(cls, graph: Graph, *, raw: bool = False) -> "ReadingOrder":
        skeleton = graph.skeleton
        return cls(skeleton is not None and skeleton.merge != "concat", raw)

    def take(self, event: StreamEvent) -> str:
        """What can be read now, and could not before."""
        if isinstance(event, OutlineRead):
            return self.outlined(event.titles)
        if isinstance(event, TextWritten):
            return self.written(event.index, event.text)
        if isinstance(event, BranchFinished):
            return self.ended(event.index)
        return ""

    def outlined(self, titles: Sequence[str]) -> str:
        self.titles = tuple(titles)
        self._at = len(titles) if self.combines and len(titles) > 1 else 0
        return ""

    def written(self, index: int, text: str) -> str:
        if index < self._at:
            return ""
        self._texts[index] = self._texts.get(index, "") + text
        return self._readable()

    def ended(self, index: int) -> str:
        if index < self._at:
            return ""
        self._ended.add(index)
        return self._readable()

    def _readable(self) -> str:
        text = ""
        while self._at in self._texts or self._at in self._ended:
            done = self._at in self._ended
            text += self._of_part(self._texts.pop(self._at, ""), done)
            if not done:
                break
            self._at = self._at + 1
            self._begun = False
        return text

    def _of_part(self, text: str, done: bool) -> str:
        """What of the part that is being read is certain."""
        if self.raw:
            return text
        head = ""
        if not self._begun:
            text = text.lstrip()
            if not (text or done):
                return ""
            self._begun, head = True, self._heading(self._at)
        certain = text.rstrip()
        if not done and len(certain) < len(text):
            self._texts[self._at] = text[len(certain) :]
        return head + certain

    def _heading(self, index: int) -> str:
        """What stands before a part, as in the whole answer."""
        gap = "\n\n" if 0 < index < len(self.titles) else ""
        known = index < len(self.titles)
        return f"{gap}{index + 1}. {self.titles[index]}\n\n" if known else ""


def pieces_of(events: Iterator[StreamEvent], graph: Graph) -> Iterator[str]:
    """The text of an answer in reading order, as soon as it is known."""
    order = ReadingOrder.of(graph)
    for event in events:
        if text := order.take(event):
            yield text
