"""The outline's grammar: what it allows is an outline, every outline is allowed, no dead ends."""

from collections.abc import Callable
from functools import cache
from itertools import chain, combinations
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from specsot.states.text.grammar import (
    GrammarError,
    OutlineGrammar,
    OutlineMatcher,
    TokenGrammar,
    calls_grammar,
    choice_grammar,
    outline_grammar,
    regex_grammar,
    schema_grammar,
)
from specsot.states.text.outline import (
    MARKERS,
    Outline,
    Point,
    parse_list,
    parse_outline,
    render_outline,
    repeats,
    title_problem,
)

EMBEDDED = Path(__file__).parents[3] / "models" / "embedded" / "target" / "tokenizer.json"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
TEXTS = [
    "PLAN\n1|60|-|-|How rain forms\n2|70|Search|1|The water cycle\n3|120|-|1,2|Summary\nEND",
    "DIRECT",
    "Clouds are made of small drops. When they grow they fall as rain, snow or hail.",
    "Größe und Höhe der Wolken; 雨はどうやって降るのか。 Откуда берётся дождь?",
]
LIST = "1. How rain forms\n2. Floods in the news\n3. What to do about floods\n4. Rain again\n"
NAMES = ("bpe", "bytes", "fallback", "embedded")


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(model: models.BPE, use_regex: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def small_bpe(texts: list[str] = TEXTS, vocab_size: int = 500) -> Tokenizer:
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=ALPHABET,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts * 4, trainer)
    return tokenizer


def byte_only() -> Tokenizer:
    vocab = {token: i for i, token in enumerate([*SPECIAL, *ALPHABET])}
    tokenizer = byte_level(models.BPE(vocab, []))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """The older kind: a mark for blanks, characters, and <0x..> tokens for the rest."""
    merges = [("▁", "E"), ("E", "N"), ("EN", "D"), ("P", "L"), ("A", "N"), ("PL", "AN")]
    tokens = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), "▁", *map(chr, range(33, 127)), "é"]
    vocab = {t: i for i, t in enumerate([*tokens, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    return tokenizer


@cache
def tokenizer_of(name: str) -> Tokenizer:
    if name == "embedded":
        if not EMBEDDED.exists():
            pytest.skip("no embedded model here")
        return Tokenizer.from_file(str(EMBEDDED))
    if name == "lists":  # some of its tokens cross the end of a line
        return small_bpe([LIST], 600)
    return {"bpe": small_bpe, "bytes": byte_only, "fallback": byte_fallback}[name]()


@cache
def grammar_of(name: str, max_branches: int = 8) -> OutlineGrammar:
    tokenizer = tokenizer_of(name)
    size = tokenizer.get_vocab_size() + 13
    return OutlineGrammar(tokenizer, size, [2, 0], max_branches, ["Search", "Web Search"])


def walk(matcher: OutlineMatcher, seed: int, flat: bool) -> list[int]:
    """Decode with random logits; `flat`: every legal token alike, else each has its own liking."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    while not matcher.finished:
        mask = matcher.legal_mask()
        assert mask.any(), f"dead end after {ids}"
        scores = rng.gumbel(size=mask.shape) + (0 if flat else rng.normal(0, 8, size=mask.shape))
        ids.append(int(np.where(mask, scores, -np.inf).argmax()))
        matcher.advance(ids[-1])
    return ids


def read(name: str, ids: list[int], max_branches: int = 8) -> Outline:
    text = tokenizer_of(name).decode(ids, skip_special_tokens=True)
    assert "\ufffd" not in text
    return parse_outline(text, max_branches=max_branches, tools=["Search", "Web Search"])


def spell(name: str, text: str) -> list[int]:
    return list(tokenizer_of(name).encode(text, add_special_tokens=False).ids)


def accepts(name: str, text: str, max_branches: int = 8) -> bool:
    matcher = grammar_of(name, max_branches).matcher()
    try:
        take(matcher, text, name)
    except ValueError:
        return False
    return matcher.is_legal(2)


def take(matcher: OutlineMatcher, text: str, name: str = "lists") -> None:
    for token in spell(name, text):
        matcher.advance(token)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flat", [True, False])
def test_random_decoding_always_ends_in_an_outline(name: str, flat: bool) -> None:
    kinds = set()
    for seed in range(60):
        matcher = grammar_of(name).matcher()
        outline = read(name, walk(matcher, seed, flat))
        assert outline.status in ("ok", "direct")
        assert (outline.skipped, outline.mended) == ((), ())
        kinds.add(len(outline.points))
    assert {0, 1, 2} <= kinds


@pytest.mark.parametrize("name", NAMES)
def test_long_plans_end_too(name: str) -> None:
    texts = bytes_of(name)
    closing = np.array([b"\nE" in text for text in texts])
    opening = np.array([text.startswith((b"D", b"E")) for text in texts])
    for seed in range(6):
        rng, matcher = np.random.default_rng(seed), grammar_of(name).matcher()
        ids, line = list[int](), b""
        while not matcher.finished:
            legal = matcher.legal_mask()
            ends = closing if line.count(b"|") == 4 else closing | opening
            others = np.flatnonzero(legal[: len(texts)] & ~ends)
            ids.append(int(rng.choice(others if len(others) else np.flatnonzero(legal))))
            matcher.advance(ids[-1])
            line = (line + texts[ids[-1]]).rpartition(b"\n")[2]
        outline = read(name, ids)
        assert (outline.status, len(outline.points)) == ("ok", 8)
        assert (outline.skipped, outline.mended) == ((), ())


@pytest.mark.parametrize(
    "text",
    [
        *("", "PLAN", "PLAN\n", "PLAN\nEND", "plan\n1|60|-|-|A\nEND", " DIRECT", "DIRECT\n"),
        *("PLAN \n1|60|-|-|A\nEND", "PLAN\n1|60|-|-|A\nEND\n", "PLAN\n1|60|-|-|A\n END"),
        *("PLAN\n2|60|-|-|A\nEND", "PLAN\n01|60|-|-|A\nEND", "PLAN\n1|60|-|-|A\n1|60|-|-|B\nEND"),
        *("PLAN\n1|60|-|-|A\n3|60|-|-|B\nEND", "PLAN\n1|60|-|-|A\nEND" + SPECIAL[0] * 2),
        *(f"PLAN\n1|{n}|-|-|A\nEND" for n in ("", "0", "5", "09", "101", "999", "1000", "-10")),
        *(f"PLAN\n1|60|{t}|-|A\nEND" for t in ("", "search", "Fly", "Web", "Search ", "None")),
        *(f"PLAN\n1|60|-|{d}|A\nEND" for d in ("", "1", "0", "2")),
        *(
            f"PLAN\n1|60|-|-|Title\n2|60|-|-|B\n3|60|-|{d}|A\nEND"
            for d in ("3", "2,1", "1,1", "1,", ",1", "1, 2", "1,2,3", "-,1", "12", "1-")
        ),
        *(f"PLAN\n1|60|-|-|{t}\nEND" for t in ("", " A", "-", "A ", "A|B", "A\tB", "A\x7f")),
        *(f"PLAN\n1|60|-|-|{t}\nEND" for t in ("A\u2028B", "A\u202eB", "A\u3000")),
        *(f"PLAN\n1|60|-|-|{t}\nEND" for t in ("a<b", "a[b", "END", "PLAN", "DIRECT", "caf\ufffd")),
        *(f"PLAN\n1|60|-|-|{t}\nEND" for t in ("x" * 61, "雨" * 61, "A\u3000", "A\ufeffB")),
        *(f"PLAN\n1|60|-|-|a {m} b\nEND" for m in MARKERS),
        *(f"PLAN\n1|60|-|-|a{s}b\nEND" for s in SPECIAL),
    ],
)
def test_everything_else_is_not(text: str) -> None:
    assert not accepts("bpe", text)
    assert not accepts("bytes", text)


@pytest.mark.parametrize("last", [2, 5, 8])
def test_every_increasing_list_of_dependencies_is_allowed(last: int) -> None:
    lines = [f"{i}|60|-|-|A\n" for i in range(1, last)]
    ids = range(1, last)
    subsets = chain.from_iterable(combinations(ids, n) for n in range(1, last))
    for deps in subsets:
        text = "PLAN\n" + "".join(lines) + f"{last}|60|-|{','.join(map(str, deps))}|B\nEND"
        assert accepts("bytes", text), deps


def test_more_than_nine_branches() -> None:
    lines = [f"{i}|60|-|-|A\n" for i in range(1, 12)]
    head = "PLAN\n" + "".join(lines)
    for deps in ("-", "1", "10", "11", "1,10,11", "2,9,10", "1,2,3,4,5,6,7,8,9,10,11"):
        assert accepts("bytes", head + f"12|60|-|{deps}|B\nEND", 12), deps
    for deps in ("12", "0", "10,1", "1,1", "11,12", "10,10", "100", "1,12"):
        assert not accepts("bytes", head + f"12|60|-|{deps}|B\nEND", 12), deps
    assert not accepts("bytes", head + "12|60|-|-|B\n13|60|-|-|C\nEND", 12)
    for seed in range(10):
        matcher = grammar_of("bytes", 12).matcher()
        outline = read("bytes", walk(matcher, seed, flat=True), 12)
        assert outline.status in ("ok", "direct") and not outline.mended


@st.composite
def outlines(draw: st.DrawFn) -> tuple[Point, ...]:
    """Outlines inside the grammar: lengths as it writes them, titles with a letter in front."""
    letters = st.characters(categories=["L", "N"], max_codepoint=0x2FFF)
    inner = st.text(st.characters(categories=["L", "N", "P", "S", "Zs"], exclude_characters="|"))
    points = []
    for i in range(1, draw(st.integers(1, 8)) + 1):
        title = (draw(letters) + draw(inner)).translate({60: 40, 91: 40}).strip()[:60].strip()
        title = "A" if title_problem(title) else title
        length = draw(st.integers(10, 99) | st.integers(10, 99).map(lambda n: 10 * n))
        deps = draw(st.sets(st.integers(1, i - 1))) if i > 1 else set[int]()
        tool = draw(st.sampled_from([None, "Search", "Web Search"]))
        points.append(Point(i, length, tool, tuple(sorted(deps)), title))
    return tuple(points)


TITLES = (
    *("A", "7 ways", "x" * 60, "雨" * 60, "Ähnlich", "A (x] y> 1. z", "ENDS", "END."),
    *("a\u00a0b", "No \U0001f469\u200d\U0001f467 here", "Ⅷ", "a \u0627\u0644\u0639"),
)


def with_examples(test: Callable[..., None]) -> Callable[..., None]:
    for title in TITLES:
        test = example((Point(1, 60, None, (), title),), Random(0))(test)
    return test


@with_examples
@settings(max_examples=20, deadline=None)
@given(outlines(), st.randoms(use_true_random=False))
def test_every_outline_is_allowed_however_it_is_cut_into_tokens(
    points: tuple[Point, ...], random: Random
) -> None:
    text = render_outline(points)
    assert accepts("bpe", text) and accepts("bytes", text)
    assert random_spelling("bpe", text, random) == text
    assert random_spelling("fallback", text, random) == text


def random_spelling(name: str, text: str, random: Random) -> str:
    matcher, left, ids = grammar_of(name).matcher(), text.encode(), list[int]()
    while left:
        legal = np.flatnonzero(matcher.legal_mask()).tolist()
        fitting = [t for t in legal if left.startswith(bytes_of(name)[t])]
        ids.append(random.choice(fitting))
        left = left[len(bytes_of(name)[ids[-1]]) :]
        matcher.advance(ids[-1])
    assert matcher.is_legal(0) and matcher.is_legal(2)
    return str(tokenizer_of(name).decode(ids))


@cache
def bytes_of(name: str) -> list[bytes]:
    table = LLTokenizer(tokenizer_of(name).to_str())
    return [table.decode_bytes([t]) for t in range(tokenizer_of(name).get_vocab_size())]


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_turn_is_legal_at_the_end_and_nowhere_else(name: str) -> None:
    grammar = grammar_of(name)
    matcher = grammar.matcher()
    for token in spell(name, TEXTS[0]):
        mask = matcher.legal_mask()
        assert mask.dtype == np.bool_ and mask.shape == (grammar.vocab_size,)
        assert not mask[:4].any()
        assert not mask[tokenizer_of(name).get_vocab_size() :].any()
        matcher.advance(token)
    assert np.flatnonzero(matcher.legal_mask()).tolist() == [0, 2]
    assert not matcher.finished
    for eos in (0, 2):
        matcher.advance(eos)
        assert matcher.finished
        assert not matcher.legal_mask().any()
        assert not any(matcher.is_legal(t) for t in range(grammar.vocab_size))
        matcher.rollback(1)
    assert np.flatnonzero(matcher.legal_mask()).tolist() == [0, 2]


@pytest.mark.parametrize("name", NAMES)
def test_speculation_leaves_no_trace(name: str) -> None:
    grammar, rng = grammar_of(name), np.random.default_rng(1)
    truth = grammar.matcher()
    seen = grammar.matcher()
    for token in [*spell(name, TEXTS[0]), 2]:
        for k in range(1, 5):
            before = seen.consumed
            for _ in range(k):
                legal = np.flatnonzero(seen.legal_mask())
                if len(legal):
                    seen.advance(int(rng.choice(legal)))
            went = seen.consumed - before
            back = int(rng.integers(0, went + 1))
            seen.rollback(back)
            seen.rollback(went - back)
            assert (seen.legal_mask() == truth.legal_mask()).all()
            assert (seen.consumed, seen.finished) == (truth.consumed, truth.finished)
        truth.advance(token)
        seen.advance(token)


def test_rollback_to_the_beginning_and_past_it() -> None:
    matcher = grammar_of("bpe").matcher()
    first = matcher.legal_mask()
    ids = [*spell("bpe", TEXTS[0]), 2]
    for token in ids:
        matcher.advance(token)
    for count in (len(ids) + 1, -1):
        with pytest.raises(ValueError, match="undo"):
            matcher.rollback(count)
    matcher.rollback(0)
    assert matcher.finished
    matcher.rollback(len(ids))
    assert (matcher.legal_mask() == first).all()


def test_an_illegal_token_leaves_the_state_alone() -> None:
    matcher = grammar_of("bpe").matcher()
    take(matcher, "PLAN\n1|60|-|-|Rain", "bpe")
    mask = matcher.legal_mask()
    for bad in (0, 1, 2, -1, grammar_of("bpe").vocab_size, 10**9, *np.flatnonzero(~mask)[:50]):
        assert not matcher.is_legal(int(bad))
        with pytest.raises(ValueError, match="not legal"):
            matcher.advance(int(bad))
        assert (matcher.legal_mask() == mask).all()


@pytest.mark.parametrize("name", NAMES)
def test_forced_tokens(name: str) -> None:
    matcher, tokenizer = grammar_of(name).matcher(), tokenizer_of(name)
    assert matcher.forced() == []
    first = spell(name, "PLAN")[0]
    matcher.advance(first)
    assert "PLAN\n1|".startswith(tokenizer.decode([first, *matcher.forced()]))
    assert matcher.forced()
    matcher.rollback(1)
    for token in [*spell(name, TEXTS[0]), 2]:
        forced = matcher.forced()
        for each in forced:
            assert np.flatnonzero(matcher.legal_mask()).tolist() == [each]
            matcher.advance(each)
        matcher.rollback(len(forced))
        matcher.advance(token)
    assert matcher.forced() == []


def test_padding_and_truncation_of_the_tokenizer_do_not_matter() -> None:
    tokenizer = small_bpe()
    tokenizer.enable_padding(length=8, pad_id=0)
    tokenizer.enable_truncation(2)
    matcher = OutlineGrammar(tokenizer, 513, [2], 8).matcher()
    forced = []
    for token in spell("bpe", "PLAN\n1|60|-|-|A\nEND"):
        assert matcher.legal_mask()[token]
        forced += matcher.forced()
        matcher.advance(token)
    assert 0 not in forced
    assert len(tokenizer.encode("x").ids) == 8


def test_bad_settings() -> None:
    tokenizer = tokenizer_of("bytes")
    size = tokenizer.get_vocab_size()
    with pytest.raises(GrammarError, match="max_branches"):
        OutlineGrammar(tokenizer, size, [2], 0)
    for eos in ([], [size], [-1]):
        with pytest.raises(GrammarError, match="end-of-turn"):
            OutlineGrammar(tokenizer, size, eos, 3)
    with pytest.raises(GrammarError, match="logits"):
        OutlineGrammar(tokenizer, size - 1, [2], 3)


def test_names_of_tools() -> None:
    names = ["get_weather-2.0", "Web Search", "x" * 64]
    grammar = OutlineGrammar(tokenizer_of("bytes"), 260, [2], 2, names)
    for name in names:
        matcher = grammar.matcher()
        take(matcher, f"PLAN\n1|60|{name}|-|A\nEND", "bytes")
        assert matcher.is_legal(2)
    for bad in ("None", "none", "-", " a", "a ", "", 'a"b', "a\\b", "a|b", "a\nb", "x" * 65):
        with pytest.raises(GrammarError, match="tool"):
            outline_grammar(3, [bad])


def test_no_limit_is_hit_however_many_outlines_are_written() -> None:
    rng = np.random.default_rng(3)
    letters = [*range(0x41, 0x5B), *range(0xC0, 0x24F), *range(0x3041, 0x3090), 0x1F600, 0x20]
    matcher = grammar_of("bytes").matcher()
    take(matcher, "PLAN\n1|60|-|-|", "bytes")
    for _ in range(150):
        title = spell("bytes", "A" + "".join(map(chr, rng.choice(letters, 58))) + "Z")
        for token in title:
            matcher.advance(token)
        assert np.flatnonzero(matcher.legal_mask()).tolist() == spell("bytes", "\n")
        matcher.rollback(len(title))


def little_tokenizer(text: str) -> Tokenizer:
    tokenizer = byte_level(models.BPE(), use_regex=True)
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def test_a_tokenizer_that_lacks_bytes_writes_what_it_can_spell() -> None:
    tokenizer = little_tokenizer("PLAN 1|60|-|-|Rain\n")
    matcher = OutlineGrammar(tokenizer, tokenizer.get_vocab_size(), [2], 3).matcher()
    rng = np.random.default_rng(0)
    while not matcher.finished:
        legal = np.flatnonzero(matcher.legal_mask())
        assert len(legal) > 0 and (2 not in legal or len(legal) == 1)
        matcher.advance(int(rng.choice(legal)))
        assert matcher.consumed < 300


def test_a_tokenizer_that_cannot_begin_an_outline_is_refused() -> None:
    tokenizer = little_tokenizer("rain")
    with pytest.raises(GrammarError, match="no token that can begin an outline"):
        OutlineGrammar(tokenizer, tokenizer.get_vocab_size(), [2], 3)


# -- the format `list` ---------------------------------------------------------------------------


@cache
def lists_of(most: int) -> OutlineGrammar:
    tokenizer = tokenizer_of("lists")
    return OutlineGrammar(tokenizer, tokenizer.get_vocab_size(), [2], most, form="list")


@pytest.mark.parametrize("most", [1, 2, 8])
def test_what_the_grammar_of_lists_allows_is_read_without_mending(most: int) -> None:
    rng = np.random.default_rng(most)
    question = "What is rain?"
    for _ in range(25):
        matcher, ids = lists_of(most).matcher(question), []
        while not matcher.finished:
            legal = np.flatnonzero(matcher.legal_mask())
            ends = [t for t in legal if t == 2 or "\n" in tokenizer_of("lists").decode([t])]
            ids.append(int(rng.choice(ends if ends and rng.random() < 0.5 else legal)))
            matcher.advance(ids[-1])
        outline = parse_list(tokenizer_of("lists").decode(ids), max_branches=most)
        assert outline.status == "ok" and not outline.mended
        assert min(2, most) <= len(outline.points) <= most
        titles = [p.title for p in outline.points]
        assert not any(repeats(t, titles[:i], question) for i, t in enumerate(titles))


def test_a_title_ends_where_it_says_something_new() -> None:
    newline = tokenizer_of("lists").encode("\n").ids[0]
    for text in ("1. How can I improve my time", "1. Rain\n2. rain"):
        matcher = lists_of(4).matcher("How can I improve my time management?")
        take(matcher, text)
        assert not matcher.is_legal(newline) and not matcher.is_legal(2)
        take(matcher, " today")
        assert matcher.is_legal(newline)
        matcher.rollback(len(tokenizer_of("lists").encode(" today").ids))
        assert not matcher.is_legal(newline)


# -- answers --------------------------------------------------------------------------------------

FIELD = {"a": {"type": "integer"}}
NESTED = {"properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"properties": FIELD}}}
BOTH = {"allOf": [{"properties": FIELD}, {"properties": {"b": {"type": "integer"}}}]}
TWO = {"f": {"properties": FIELD, "required": ["a"]}, "g": {"properties": {}}}
CALL, OTHER = '{"name":"f","arguments":{"a":1}}', '{"name":"g","arguments":{}}'
HELD: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "closed": (
        schema_grammar({"type": "object", "properties": FIELD}),
        ("{}", '{"a":1}'),
        ('{"a": 1}', '{"b":1}', '{"a":1,"b":1}'),
    ),
    "open": (
        schema_grammar({"type": "object", "properties": FIELD, "additionalProperties": True}),
        ('{"a":1,"b":1}',),
        ('{"a":"x"}',),
    ),
    "nested": (schema_grammar(NESTED), ('{"x":{"a":1}}',), ('{"x":{"b":1}}', '{"y":1}')),
    "named properties": (
        schema_grammar({"properties": {"properties": {"type": "object"}}}),
        ('{"properties":{"any":1}}',),
        ('{"other":1}',),
    ),
    "combined": (schema_grammar(BOTH), ('{"a":1,"b":2}',), ('{"a":"x"}',)),
    "any object": (schema_grammar({"type": "object"}), ('{"any":[1]}',), ("[1]", "1")),
    "pattern": (regex_grammar(r"[ab]+/\d|x\/y"), ("ab/1", "x/y"), ("ab", "ab/12", "c/1")),
    "choice": (choice_grammar(["red", 'a "b"', "ré\n"]), ("red", 'a "b"', "ré\n"), ("re", "blue")),
    "one call": (
        calls_grammar(TWO, 1, free=False),
        (f"[{CALL}]", f"[{OTHER}]"),
        ("text", f"[{CALL},{OTHER}]", '[{"name":"f","arguments":{}}]', "[]"),
    ),
    "calls": (calls_grammar(TWO, 3, free=False), (f"[{CALL},{OTHER},{CALL}]",), (f"[{CALL}",)),
    "calls or text": (
        calls_grammar(TWO, 1, free=True),
        (f"[{CALL}]", "Any text [{", "[x] y", " a", "[{"[:1] + "1]"),
        ("", "[", '[{"name":"h"', " [{"),
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_an_answer_has_the_form_of_its_grammar(name: str) -> None:
    grammar, good, bad = HELD[name]
    tokenizer = tokenizer_of("embedded")
    end = tokenizer.token_to_id("<|im_end|>")
    new = TokenGrammar(tokenizer, tokenizer.get_vocab_size(), [end]).matchers(grammar)

    def is_whole(text: str) -> bool:
        matcher = new()
        for token in spell("embedded", text):
            if not matcher.is_legal(token):
                return False
            matcher.advance(token)
        return matcher.is_legal(end)

    assert [text for text in good if not is_whole(text)] == []
    assert [text for text in bad if is_whole(text)] == []


def test_forms_that_are_too_large_or_wrong() -> None:
    deep: dict[str, object] = {}
    for _ in range(40):
        deep = {"allOf": [deep]}
    for make in (
        lambda: schema_grammar(deep),
        lambda: schema_grammar({"enum": ["x" * 20_000]}),
        lambda: schema_grammar({"const": float("nan")}),
        lambda: choice_grammar(["x" * 20_000]),
        lambda: regex_grammar("x" * 20_000),
        lambda: calls_grammar({f"f{n}": {"title": "x" * 9_000} for n in range(20)}, 1, free=True),
    ):
        with pytest.raises(GrammarError):
            make()
    tokenizer = tokenizer_of("embedded")
    grammars = TokenGrammar(tokenizer, tokenizer.get_vocab_size(), [1])
    for wrong in (regex_grammar("("), schema_grammar({"allOf": 5}), "start: /(?=a)/"):
        with pytest.raises(GrammarError) as told:
            grammars.matchers(wrong)
        assert "\n" not in str(told.value) and not str(told.value).startswith("at ")
