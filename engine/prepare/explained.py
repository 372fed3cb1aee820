"""The pages of `specsot explain`, read from explained.yaml."""

from pathlib import Path
from typing import Literal

from ...states.yaml.source import ProblemCode, Source
from ...states.yaml.spec import Spec, Text, validated

FILE = Path(__file__).with_name("explained.yaml")


class ExplainedProblem(Spec):
    """A problem's code; the words of its keys are at the top of the file."""

    title: Text
    means: Text
    mend: Text
    when: Literal["check", "run"] = "check"
    kind: Literal["block", "machine", "file", "own", "name", "set", "template", "experiment"]
    base: str = ""
    encoding: str = "utf-8"
    wrong: Text
    right: Text
    module: str = ""
    module_right: str = ""

    @property
    def place(self) -> str:
        """The context of the example."""
        return {
            "block": f"In a graph with `extends: {self.base}`",
            "machine": f"In a copy of graphs/machines/{self.base}.yaml",
            "file": "A whole graph file",
            "own": "As an op of a state, with own_ops.py beside it",
            "name": "specsot check",
            "set": f"specsot check {self.base} --set",
            "template": f"In a copy of the template `{self.base}`",
            "experiment": "In an experiment's file, `specsot bench`",
        }[self.kind]


class ExplainedExit(Spec):
    """An exit code. command: one that ends with it."""

    title: Text
    means: Text
    mend: Text
    command: str


class Explanations(Spec):
    """The whole file."""

    problems: dict[ProblemCode, ExplainedProblem]
    exits: dict[int, ExplainedExit]


def explanations() -> Explanations:
    """What can be explained."""
    return validated(Explanations, Source(FILE.read_text(encoding="utf-8"), FILE.name))
