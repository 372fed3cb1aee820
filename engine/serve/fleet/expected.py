"""What a request will take, as far as one can say without its tokens: integers for a router."""

from collections.abc import Mapping
from typing import Any

from ..wire.protocol import Decode, Encode, Ended, Submit

BYTES = 4  # of a text, for each of its tokens
LONGEST = 32 << 10  # bytes of a beginning that are looked at
PARTS = 4  # of an outlined answer, as long as none has been seen
WEIGHT = 8  # answers over which a length is averaged
Asked = Submit | Encode | Decode


def beginning(asked: Asked) -> bytes:
    """What stands first in a prompt: equal beginnings are equal prompts up to there."""
    if not isinstance(asked, Submit):
        return b""
    texts = [asked.graph, asked.cache_salt, asked.rules]
    texts += [part for document in asked.documents for part in document]
    texts += [part for turn in asked.past for part in turn]
    texts += [asked.question if asked.text is None else asked.text]
    ids = b"".join(one.to_bytes(BYTES, "big") for one in asked.token_ids[: LONGEST // BYTES])
    return ("\0".join(texts).encode("utf-8", "surrogatepass") + ids)[:LONGEST]


def prompt_tokens(asked: Asked) -> int:
    """About how many tokens its prompt has."""
    if not isinstance(asked, Submit):
        return 0
    parts = [asked.rules, asked.question, asked.text or ""]
    parts += [text for pair in (*asked.past, *asked.documents) for text in pair]
    return len(asked.token_ids) + sum(map(len, parts)) // BYTES


class AnswerLengths:
    """How long answers have been, of each graph: what the next ones are expected to be."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, bool], float] = {}

    def of(self, asked: Asked, graphs: Mapping[str, Mapping[str, Any]]) -> int:
        """Tokens that are expected of an answer, its outline's too."""
        if not isinstance(asked, Submit):
            return 0
        facts = graphs.get(asked.graph, {})
        budget = asked.max_tokens or int(facts.get("budget", 1))
        outlined = _is_outlined(asked, facts)
        mean = self._means.get((asked.graph, outlined), budget * (PARTS if outlined else 1))
        return int(mean if outlined else min(mean, budget))

    def note_(self, asked: Asked, ended: Ended, graphs: Mapping[str, Mapping[str, Any]]) -> None:
        """An answer is as long as it became."""
        if not isinstance(asked, Submit):
            return
        key = asked.graph, _is_outlined(asked, graphs.get(asked.graph, {}))
        written = ended.usage["answer"] + ended.usage["outline"]
        mean = self._means.get(key, float(written))
        self._means[key] = mean + (written - mean) / WEIGHT


def _is_outlined(asked: Submit, facts: Mapping[str, Any]) -> bool:
    raw = asked.text is not None or bool(asked.token_ids) or asked.schema is not None
    return bool(facts.get("skeleton")) and asked.skeleton and not raw
