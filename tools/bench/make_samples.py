"""Writes docs/samples.md: answers to held-out questions, drawn by seed and not chosen.

python -m tools.bench.make_samples --seed 7"""

import argparse
from pathlib import Path

from specsot.engine.models import load_models
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.job import embedded_folder
from specsot.engine.run.session import Prompt, Session
from specsot.states.phases.merge import Answer

from ..embedded.heldout import probes

COUNT = 2  # answers on the page
SHOWN = 2  # parts of an answer on it
HEAD = """# Two answers of the embedded model

The questions are held out from the training, drawn with seed {seed} and not chosen. The graph is
`bim_eagle`, greedy, in float32. Two parts of each answer are shown. For questions in unfamiliar
words the model often writes a general plan ([results](results.md#the-embedded-target)).

<!-- not run: checkout -->
```sh
python -m tools.bench.make_samples --seed {seed}
```
"""


def shown(number: int, answer: Answer) -> str:
    """The question and the first parts, each with its reason to end."""
    parts = [f"## {number}. {answer.question}"]
    for section in answer.sections[:SHOWN]:
        title = f"**{section.title}.** " if section.title else ""
        parts.append(f"{title}{section.text} *({section.finish})*")
    if left := len(answer.sections[SHOWN:]):
        parts.append(f"*(parts not shown: {left})*")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=7)
    seed = parser.parse_args().seed
    session = Session(
        open_graph("bim_eagle"), load_models(embedded_folder("target"), embedded_folder("eagle3"))
    )
    questions = [p.question for p in probes("outline", COUNT, seed)]
    answers = []
    for number, question in enumerate(questions, 1):
        run = session.start([Prompt(str(number), question)], lambda event: None)
        while not run.finished:
            run.advance()
        answers.append(shown(number, run.board["answers"][0]))
        run.close()
    text = "\n\n".join([HEAD.format(seed=seed).strip(), *answers]) + "\n"
    (Path(__file__).parents[2] / "docs/samples.md").write_text(text)


if __name__ == "__main__":
    main()
