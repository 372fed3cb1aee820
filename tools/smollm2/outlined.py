"""Does a small real model write outlines that can be used? Counts over files of prompts.

    python -m tools.smollm2.outlined --prompts questions.jsonl --prompts tasks.jsonl

Every prompt is answered with `bim_plain` and the profile, many at once. Told are answers without a
parsed outline of 2 to 8 parts, titles that come twice, parts with marker text, and how parts ended.
`--samples FILE` writes four answers that are drawn by `--seed`, as a page."""

import argparse
from collections import Counter
from pathlib import Path
from random import Random

import torch

from specsot.engine.prepare.inputs import Prompt, read_file
from specsot.engine.run.api import open_session
from specsot.states.phases.merge import Answer

from ..bench.make_samples import shown

COUNT = 4  # answers on the page
HEAD = r"""# Four answers of SmolLM2-135M-Instruct

The answers show the form; what a small model says is often wrong. The questions are drawn from the
files below with seed {seed} and not chosen. The graph is `bim_plain`, greedy, with the profile
`smollm2`, {dtype} and `skeleton.part: {part}`. Two parts of each answer are shown.

<!-- not run: checkout -->
```sh
python -m tools.smollm2.outlined {files} --part {part} --tokens {tokens} --seed {seed} \
    --samples docs/samples_smollm2.md
```
"""


def faults(answer: Answer, markers: list[str]) -> list[str]:
    """What is wrong with an answer, by name."""
    points = answer.outline.points if answer.outline is not None else ()
    titles = [point.title.casefold() for point in points]
    texts = [section.text for section in answer.sections]
    found = {
        "no outline of 2 to 8 parts": not 2 <= len(points) <= 8,
        "an outline read in part": answer.outline is not None and answer.outline.status != "ok",
        "a title twice": len(set(titles)) < len(titles),
        "marker text": any(mark in text for text in (*titles, *texts) for mark in markers),
        "an empty part": not all(text.strip() for text in texts),
    }
    return [name for name, there in found.items() if there]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--profile", default="smollm2")
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--part", default="paragraph")
    parser.add_argument("--samples", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    room = [f"layout.max_num_branches={args.at_once}", f"layout.kv_slots={args.at_once * 900}"]
    room.append(f"skeleton.part={args.part}")
    session = open_session(
        "bim_plain",
        profile=args.profile,
        model=args.model,
        dtype=args.dtype,
        max_new_tokens=args.tokens,
        sets=room,
    )
    asked = [(file, item) for file in args.prompts for item in read_file(file).items]
    prompts = [Prompt(f"{n}", item.text) for n, (_, item) in enumerate(asked)]
    run = session.start(prompts, lambda event: None)
    with torch.inference_mode():
        while not run.finished:
            run.advance()
    answers: list[Answer] = sorted(run.board["answers"], key=lambda answer: int(answer.key))
    markers = [str(token) for token in session.models.tokenizer.all_special_tokens]
    for file in args.prompts:
        own = [a for a in answers if asked[int(a.key)][0] == file]
        told = Counter(name for a in own for name in faults(a, markers))
        parts = Counter(len(a.sections) for a in own)
        ends = Counter(section.finish for a in own for section in a.sections)
        print(
            f"{file.name}: {len(own)} answers, faults {dict(told)}, parts {sorted(parts.items())},"
        )
        print(f"  parts ended by {dict(ends)}", flush=True)
    if args.samples is not None:
        drawn = Random(args.seed).sample(answers, COUNT)
        files = " ".join(f"--prompts {file.name}" for file in args.prompts)
        head = HEAD.format(files=files, **vars(args))
        pages = [shown(number, answer) for number, answer in enumerate(drawn, 1)]
        args.samples.write_text("\n\n".join([head.strip(), *pages]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
