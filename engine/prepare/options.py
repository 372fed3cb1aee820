"""What the command line of `specsot run` asked for, as plain data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run; None means not given, so that the configuration decides.

    graph: a shipped graph, a path, or a run.yaml to repeat.
    argv: the command line, for the manifest.
    """

    graph: str | None = None
    prompt: str | None = None
    prompts: Path | None = None
    documents: tuple[Path, ...] = ()
    cache_dir: Path | None = None
    as_json: bool = False
    no_tui: bool = False
    model: str | None = None
    drafter_model: str | None = None
    seed: int | None = None
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    max_new_tokens: int | None = None
    outline: Path | None = None
    step: bool = False
    sets: tuple[str, ...] = ()
    expect_digest: str | None = None
    runs_dir: Path = Path("runs")
    trace: str | None = None
    quiet: bool = False
    explain_rounds: bool = False
    probe_blend: bool = False
    argv: tuple[str, ...] = ()

    @property
    def configured(self) -> dict[str, Any]:
        """The options that specsot.yaml has keys for."""
        return {
            "graph": self.graph,
            "model": self.model,
            "drafter_model": self.drafter_model,
            "seed": self.seed,
            "device": self.device,
            "dtype": self.dtype,
            "threads": self.threads,
            "max_new_tokens": self.max_new_tokens,
        }

    @property
    def changes_a_run(self) -> bool:
        """Whether anything is given that may change the tokens of a repeated run."""
        given = (self.model, self.drafter_model, self.seed, self.dtype, self.device)
        return any(v is not None for v in (*given, self.max_new_tokens, self.outline)) or bool(
            self.sets or self.documents or self.prompt is not None or self.prompts is not None
        )
