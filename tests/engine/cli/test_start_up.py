"""What a start has no use for is not imported: each of these costs a second of CPU time or more."""

import subprocess
import sys
from pathlib import Path

USELESS = ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed.fsdp", "gguf")
ASK = """
import sys
from specsot.engine.cli.main import main
graphs, useless = (one.split() for one in sys.argv[1:])
for graph in graphs:
    try:
        main(["run", graph, "Why?", "--max-new-tokens", "1", "--no-tui", "--quiet"])
    except SystemExit as end:
        assert not end.code, graph
    print(graph, sorted(set(useless) & set(sys.modules)))
"""
GRAPHS = ("autoregressive", "eagle", "eagle2", "dflash", "speculative", "bim_eagle")


def test_models_are_loaded_without_torchs_compiler(tmp_path: Path) -> None:
    words = [sys.executable, "-c", ASK, " ".join(GRAPHS), " ".join(USELESS)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith(GRAPHS)]
    assert told == [f"{graph} []" for graph in GRAPHS]
