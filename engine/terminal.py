"""What kind of terminal there is."""

from rich.console import Console


def usable(console: Console, environ: dict[str, str]) -> bool:
    """Whether a live view makes sense: a real terminal that nobody asked to be kept plain."""
    plain = environ.get("NO_COLOR") or environ.get("CI", "").lower() not in ("", "0", "false")
    return console.is_terminal and not console.is_dumb_terminal and not plain
