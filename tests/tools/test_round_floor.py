"""The floor of a round: the bytes that it must read."""

from pathlib import Path

import torch
from safetensors import safe_open

from specsot.engine.run.session import open_session
from tools.bench.round_floor import rounds_of, weight_bytes, write_random


def test_a_round_reads_all_weights_but_the_embedding(tmp_path: Path) -> None:
    target, head = write_random(tmp_path, "tiny", torch.float32)
    session = open_session(
        "eagle", model=str(target), drafter_model=str(head), threads=1, max_new_tokens=8
    )
    with safe_open(target / "model.safetensors", "pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    read = [size for name, size in sizes.items() if "embed" not in name and len(size) == 2]
    assert weight_bytes(session.models.target) == 4 * sum(torch.Size(one).numel() for one in read)
    assert 0 < weight_bytes(session.models.drafter) < weight_bytes(session.models.target)
    seconds, drafts, tau = rounds_of(session)
    assert len(seconds) >= 5 and min(seconds) > 0 and drafts >= 1 and tau >= 1
