"""Loading a target takes the memory of its weights, and hardly any more."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny import write_tiny_target

LOAD = """
import sys, threading
from pathlib import Path
import torch, transformers
from specsot.models.load.weights import load_target

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

load_target(Path(sys.argv[3]))  # what torch itself keeps from its first use is not the model's
before, most, done = held(), [0], threading.Event()

def watch():
    while not done.wait(0.0005):
        most[0] = max(most[0], held())

thread = threading.Thread(target=watch)
thread.start()
model = load_target(Path(sys.argv[1]), getattr(torch, sys.argv[2]))
done.set()
thread.join()
own = {id(p): p.numel() * p.element_size() for p in model.parameters()}
print((most[0] - before) / sum(own.values()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_most_that_is_held_while_loading(dtype: str, tmp_path: Path) -> None:
    """Half of the weights are one tied embedding, as in small models; mapped files do not count."""
    extra = {"tie_word_embeddings": True, "intermediate_size": 2200}
    shape = {"vocab": 20000, "hidden": 512, "layers": 3}
    large = write_tiny_target(tmp_path / "large", **shape, extra=extra)
    small = write_tiny_target(tmp_path / "small", layers=1)
    command = [sys.executable, "-c", LOAD, str(large), dtype, str(small)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert float(out.stdout) < 1.15
