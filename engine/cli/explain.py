"""`specsot explain CODE`: what a problem's code or an exit code means, with an example mended."""

from textwrap import fill, indent
from typing import Annotated, Any

import typer

from ...states.yaml.source import hint
from ..errors import UsageError
from ..prepare.explained import ExplainedExit, ExplainedProblem, explanations
from ..shell import print_json, put, user_errors
from .completing import codes_of
from .options import Json

WIDTH = 90


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
