"""The figures of `bench_blend.py` as Markdown tables and plots, and in their page."""

from pathlib import Path
from typing import Any

from .blend_modes import FULL
from .blend_plot import COLOURS, Panel, Series, picture

PAGE, TTFT, QUALITY = "results.md", "blend_ttft.svg", "blend_quality.svg"
END = "<!-- /bench_blend -->"
KIND_NAMES = {"one_hop": "one hop", "two_hop": "two hops"}
Part = dict[str, Any]


def write(docs: Path, results: dict[str, Any]) -> None:
    """Tables between their marks in the page, and the plots beside it; only of what is measured.

    Raises:
        ValueError: the page lacks a mark.
    """
    page = (docs / PAGE).read_text(encoding="utf-8")
    if part := results.get("ttft"):
        page = inserted(page, "ttft", f"![time to first token]({TTFT})\n\n{ttft_table(part)}")
        (docs / TTFT).write_text(ttft_plot(part), encoding="utf-8")
    if part := results.get("quality"):
        text = f"![answers and divergence]({QUALITY})\n\n{quality_tables(part)}"
        page = inserted(page, "quality", text)
        (docs / QUALITY).write_text(quality_plot(part), encoding="utf-8")
    (docs / PAGE).write_text(page, encoding="utf-8")


def inserted(page: str, name: str, text: str) -> str:
    """The page with `text` in place of what stands behind its mark."""
    mark = f"<!-- bench_blend: {name} -->"
    before, found, rest = page.partition(mark)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"{PAGE} has no {mark} with {END} behind it")
    return f"{before}{mark}\n\n{text}\n\n{END}{after}"


def ttft_table(part: Part) -> str:
    """Relative times, measured and by the cost model, a row per mode."""
    lengths = _sorted(part["tokens"])
    rows = [
        [
            _named(name),
            *(f"{one[name]['relative']:.2f} / {one[name]['model']:.2f}" for _, one in lengths),
        ]
        for name in lengths[0][1]
    ]
    rows.append(
        ["seconds of a full prefill", *(f"{one[FULL]['seconds']:.2f}" for _, one in lengths)]
    )
    how = part["conditions"]
    return (
        f"{_machine(how)}; medians over {how['repeats']} rounds, each of which runs every row "
        f"once. Of a prompt's tokens {how['suffix']} are the suffix, the others are cached. Time "
        "to first token, full prefill = 1, measured / by the cost model:\n\n"
        + _table(["ratio", *(f"{tokens} tokens" for tokens, _ in lengths)], rows)
    )


def quality_tables(part: Part) -> str:
    """Answers, divergences and errors, a row per mode."""
    how, cells = part["conditions"], _cells(part)
    names = list(cells[0][1])
    heads = ["ratio", *(title for title, _ in cells)]
    right = [[_named(n), *(_share(found[n]) for _, found in cells)] for n in names]
    far = [
        [_named(n), *(f"{found[n]['kl']:.2g} / {found[n]['kl_value']:.2g}" for _, found in cells)]
        for n in names
    ]
    return "\n\n".join(
        [
            f"{_machine(how)}; {how['prompts']} prompts of each kind and length. Answers that are "
            "right word for word, with Wilson's 95 % interval; behind the semicolon those that are "
            "the same as after a full prefill:",
            _table(heads, right),
            "KL(full, blended) in nats, means: at the last token of the prompt / at the first "
            "token of what was asked for, behind the right answer's words before it:",
            _table(heads, far),
            _error_table(part),
        ]
    )


def _error_table(part: Part) -> str:
    """Errors per layer at the greatest length, means over the kinds."""
    _, found = _sorted(part["sizes"])[-1]
    kinds = list(found["kinds"].values())
    layers = range(len(kinds[0][FULL]["error_k"]))
    rows = []
    for name in kinds[0]:
        k, v = ([sum(kind[name][f"error_{c}"][i] for kind in kinds) / len(kinds) for i in layers]
                for c in "kv")  # fmt: skip
        rows.append([_named(name), *(f"{a:.2f} / {b:.2f}" for a, b in zip(k, v, strict=True))])
    return (
        f"Distance of the documents' K / V from a full prefill's, relative to the latter's norm, "
        f"with {found['rows']:.0f} tokens of documents:\n\n"
        + _table(["ratio", *(f"layer {i}" for i in layers)], rows)
    )


def ttft_plot(part: Part) -> str:
    """Measured lines and, dashed, the cost model's."""
    lengths = _sorted(part["tokens"])
    names = list(lengths[0][1])
    colours = [(number % COLOURS, tokens, one) for number, (tokens, one) in enumerate(lengths)]
    lines = [Series(f"{t} tokens", c, [o[n]["relative"] for n in names]) for c, t, o in colours]
    lines += [
        Series("cost model", c, [o[n]["model"] for n in names], dashed=True) for c, _, o in colours
    ]
    title, caption = "Time to first token, full prefill = 1", "share of cached rows recomputed"
    top = max(1.0, *(value for line in lines for value in line.values))
    return picture([Panel(title, caption, _places(names), lines, top)], width=640)


def quality_plot(part: Part) -> str:
    """Right answers, and the divergence where the asked value begins."""
    cells = _cells(part)
    names = list(cells[0][1])
    right, far = [], []
    for number, (title, found) in enumerate(cells):
        colour, of = number % COLOURS, [found[name] for name in names]
        bars = [tuple(one["interval"]) for one in of]
        right.append(Series(title, colour, [one["right"] for one in of], bars))
        far.append(Series(title, colour, [one["kl_value"] for one in of]))
    top = max(value for line in far for value in line.values) or 1.0
    caption = "share of cached rows recomputed; lines: tokens of documents"
    panels = [
        Panel("Right answers", caption, _places(names), right, 1.0, percent=True),
        Panel("KL at the asked value, nats", caption, _places(names), far, top),
    ]
    return picture(panels, width=470)


def _cells(part: Part) -> list[tuple[str, Part]]:
    """A title and the modes' figures for every length and kind."""
    return [
        (f"{KIND_NAMES[kind]}, {found['rows']:.0f}", of)
        for _, found in _sorted(part["sizes"])
        for kind, of in found["kinds"].items()
    ]


def _share(one: Part) -> str:
    low, high = one["interval"]
    return f"{one['right']:.0%} ({low:.0%} to {high:.0%}); {one['same']:.0%}"


def _sorted(lengths: dict[str, Any]) -> list[tuple[int, Any]]:
    return sorted((int(length), found) for length, found in lengths.items())


def _named(name: str) -> str:
    return {"reuse": "none (`plan: reuse`)", FULL: "1 (full prefill)"}.get(name, name)


def _places(names: list[str]) -> list[str]:
    return ["full" if name == FULL else name for name in names]


def _machine(how: Part) -> str:
    threads = f"{how['threads']} thread{'s' if how['threads'] > 1 else ''}"
    return f"{how['dtype']}, {threads} ({how['machine']}), torch {how['torch']}"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
