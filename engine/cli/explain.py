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
        pages: dict[str, Any] = {str(key): page for key, page in explanations().problems.items()}
        pages |= {str(key): page for key, page in explanations().exits.items()}
        if code is None:
            if as_json:
                print_json(codes={key: page.title for key, page in pages.items()})
            else:
                put("".join(f"{key:4}  {page.title}\n" for key, page in pages.items()))
            return
        name = code.upper().strip("[]")
        if name not in pages:
            raise UsageError(f"no code {code!r}{hint(name, pages)}; `specsot explain` lists them")
        page = pages[name]
        if as_json:
            print_json(code=name, **page.model_dump(mode="json", exclude_defaults=True))
        else:
            put(_page(name, page))


def _page(code: str, page: ExplainedProblem | ExplainedExit) -> str:
    parts = [f"{code}: {page.title}", fill(page.means, WIDTH)]
    if isinstance(page, ExplainedExit):
        parts += [f"For example:\n{_shown(page.command)}"] if page.command else []
    else:
        parts += [f"{page.place}, wrong:\n{_shown(page.wrong)}{_module(page.module)}"]
        if page.right != page.wrong or page.module_right:
            parts += [f"Right:\n{_shown(page.right)}{_module(page.module_right)}"]
        if page.when == "run":
            parts += ["`specsot check` does not see it: it shows when a run begins."]
    return "\n\n".join([*parts, fill(page.mend, WIDTH)]) + "\n"


def _shown(text: str) -> str:
    return indent(text.rstrip("\n"), "    ")


def _module(text: str) -> str:
    return f"\n\nown_ops.py:\n{_shown(text)}" if text else ""
