"""The pages of `specsot explain`, read from explained.yaml."""

from pathlib import Path
from typing import Literal

from ...states.yaml.source import Source
from ...states.yaml.spec import Spec, Text

FILE = Path(__file__).with_name("explained.yaml")


class Explanation(Spec):
    """A problem's code or an exit code; explained.yaml says what its keys mean."""

    title: Text
    means: Text
    mend: Text
    command: str | None = None
    when: Literal["check", "run"] = "check"
    kind: str = ""
    base: str = ""
    encoding: str = "utf-8"
    wrong: str = ""
    right: str = ""
    module: str = ""
    module_right: str = ""


def explanations() -> dict[str, Explanation]:
    """By code: problems, then exits."""
    pages = Source(FILE.read_text(encoding="utf-8"), FILE.name).data
    codes = {**pages["problems"], **pages["exits"]}
    return {str(code): Explanation(**page) for code, page in codes.items()}
