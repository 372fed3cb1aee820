"""`specsot explain CODE`: what a problem's code or an exit code means, with an example mended."""

from pathlib import Path
from textwrap import fill, indent
from typing import Annotated, Any, Literal

import typer

from ...states.graph.schema import validated
from ...states.yaml.codes import ProblemCode
from ...states.yaml.source import Source, hint
from ...states.yaml.spec import Spec, Text
from ..errors import UsageError
from ..shell import print_json, put, user_errors
from .completing import codes_of
from .options import Json

FILE = Path(__file__).with_name("explained.yaml")
WIDTH = 90


class ExplainedProblem(Spec):
    """A problem's code; the words of its keys are at the top of the file."""

    title: Text
    means: Text
    mend: Text
    when: Literal["check", "run"] = "check"
    kind: Literal["block", "machine", "file", "own", "name", "set", "template"]
    base: str = ""
    encoding: str = "utf-8"
    wrong: Text
    right: Text
    module: str = ""
    module_right: str = ""

    @property
    def place(self) -> str:
        """Where the example stands."""
        return {
            "block": f"In a graph with `extends: {self.base}`",
            "machine": f"In a copy of graphs/machines/{self.base}.yaml",
            "file": "A whole graph file",
            "own": "As an op of a state, with own_ops.py beside it",
            "name": "specsot check",
            "set": f"specsot check {self.base} --set",
            "template": f"In a copy of the template `{self.base}`",
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


def explain(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE", help="G202, or an exit code; default: a list.", autocompletion=codes_of
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """What a problem's code or an exit code means: why, a failing example, the mending.

    Examples: `specsot explain G202`, `specsot explain 4`, `specsot explain`.
    """
    with user_errors():
        known: dict[str, Any] = {str(key): one for key, one in explanations().problems.items()}
        known |= {str(key): one for key, one in explanations().exits.items()}
        if code is None:
            if as_json:
                print_json(codes={key: one.title for key, one in known.items()})
            else:
                put("".join(f"{key:4}  {one.title}\n" for key, one in known.items()))
            return
        name = code.upper().strip("[]")
        if name not in known:
            raise UsageError(f"no code {code!r}{hint(name, known)}; `specsot explain` lists them")
        one = known[name]
        if as_json:
            print_json(code=name, **one.model_dump(mode="json", exclude_defaults=True))
        else:
            put(_page(name, one))


def _page(code: str, one: ExplainedProblem | ExplainedExit) -> str:
    parts = [f"{code}: {one.title}", fill(one.means, WIDTH)]
    if isinstance(one, ExplainedExit):
        parts += [f"For example:\n{_shown(one.command)}"] if one.command else []
    else:
        parts += [f"{one.place}, wrong:\n{_shown(one.wrong)}{_module(one.module)}"]
        if one.right != one.wrong or one.module_right:
            parts += [f"Right:\n{_shown(one.right)}{_module(one.module_right)}"]
        if one.when == "run":
            parts += ["`specsot check` does not see it: it shows when a run begins."]
    return "\n\n".join([*parts, fill(one.mend, WIDTH)]) + "\n"


def _shown(text: str) -> str:
    return indent(text.rstrip("\n"), "    ")


def _module(text: str) -> str:
    return f"\n\nown_ops.py:\n{_shown(text)}" if text else ""
