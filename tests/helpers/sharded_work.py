"""Process groups over gloo, one thread each, and the work of their ranks in the tests."""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroupGloo

from helpers.embedded import Embedded
from helpers.sequences import Pooled
from helpers.support import tokens_of
from specsot.engine.models import Models, load_models, with_drafter
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.job import embedded_folder
from specsot.engine.run.api import Engine, Session
from specsot.models.files import ModelError
from specsot.models.load.weights import load_target
from specsot.models.sharded import RankLost, Ranks, ShardedDecoder

LIMIT = 240  # seconds after which a test's ranks are given up
QUESTIONS = ("Make a plan for a weekend camping trip.", "How should I prepare a home office?")
BUDGET = 12


def run_ranks(count: int, folder: Path, *works: tuple[Any, ...]) -> list[list[Any]]:
    """What each `work(rank, *args)` returns in each of so many processes, by rank. works: functions
    of a module that can be imported, so of `helpers`, with args; folder: for the rendezvous."""
    rows = [(rank, count, folder / "meeting", works) for rank in range(count)]
    with get_context("spawn").Pool(count) as pool:
        return pool.starmap_async(_rank, rows, chunksize=1).get(LIMIT)


def _rank(rank: int, count: int, meeting: Path, works: Sequence[tuple[Any, ...]]) -> list[Any]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{meeting}", limit, rank=rank, world_size=count)
    return [work(rank, *args) for work, *args in works]


def tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def copied(shard: nn.Module, replica: nn.Module) -> list[tuple[int, ...]]:
    lent = {one.untyped_storage().data_ptr() for one in tensors(replica)}
    own = [one for one in tensors(shard) if one.numel() and one.is_floating_point()]
    parts = [part for one in shard.modules() for part in getattr(one, "parts", ())]
    own += [weight for one in parts for weight in tensors(one)]
    assert not any(one.is_meta for one in own), "a weight that was never lent"
    return [tuple(w.shape) for w in own if w.untyped_storage().data_ptr() not in lent]


def forwards(rank: int, folders: Sequence[Path], ids: Tensor) -> list[dict[str, Any]]:
    found, calls, collective = [], Counter[str](), Ranks._run

    def counted(ranks: Ranks, what: str, call: Any) -> None:
        calls[what] += 1
        collective(ranks, what, call)

    Ranks._run = counted  # type: ignore[method-assign]
    for folder in folders:
        replica = load_target(folder)
        shard = ShardedDecoder(replica, Ranks(None, rank, dist.get_world_size()))
        taps = tuple(range(shard.num_layers + 1))
        slots = torch.randperm(2 * len(ids), generator=torch.Generator().manual_seed(2))
        run = Pooled(shard, slots[: len(ids)])
        calls.clear()
        outs = [run.forward(ids[:9], 0, taps), run.forward(ids[9:], 9, taps)]
        assert shard.ranks is not None
        none = run.model.logits(torch.zeros(0, shard.hidden_size))
        found.append(
            {
                "logits": torch.cat([one.logits_RV for one in outs]),
                "taps": torch.cat([one.taps_QF for one in outs if one.taps_QF is not None]),
                "copied": copied(shard, replica),
                "heads": shard.kv_heads,
                "calls": dict(calls),
                "none": none.shape,
            }
        )
    return found


def from_shares(rank: int, folder: Path, ids: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Logits with weights of which every rank loaded its share only, by a group of their own."""
    held = load_target(folder, dtype, part=(rank, dist.get_world_size()))
    store = dist.FileStore(str(folder / f"own{dist.get_world_size()}"), dist.get_world_size())
    group = ProcessGroupGloo(store, rank, dist.get_world_size(), timedelta(seconds=30))
    shard = ShardedDecoder(held, Ranks(group, rank, dist.get_world_size()))
    out = Pooled(shard, torch.arange(len(ids)), dtype).forward(ids, 0)
    return {"logits": out.logits_RV, "copied": copied(shard, held)}


def refused(call: Callable[[], object]) -> str:
    """Why something cannot be; empty if it can."""
    try:
        call()
    except (ModelError, ValueError) as error:
        return str(error)
    return ""


def unlike(rank: int, folder: Path) -> str:
    replica = load_target(folder, torch.float64 if rank else torch.float32)
    return refused(lambda: ShardedDecoder(replica, Ranks(None, rank, 2)))


def late(rank: int) -> tuple[float, list[str]]:
    ranks = Ranks(dist.new_group(timeout=timedelta(seconds=1.5)), rank, 2)
    ranks.sum_(torch.ones(3))
    said, began = list[str](), time.monotonic()
    for _ in range(0 if rank else 2):
        try:
            ranks.sum_(torch.ones(3))
        except RankLost as error:
            said.append(str(error))
    took = time.monotonic() - began
    dist.barrier()  # nobody leaves before the other
    return took, said


def models_of(kind: str, rank: int | None) -> Models:
    """The embedded target, shared by all ranks or of one process (rank None), and a drafter."""
    models = load_models(embedded_folder("target"), None, packed=rank is None)
    models = with_drafter(models, embedded_folder(kind), kind) if kind else models
    if rank is None:
        return models
    ranks = Ranks(None, rank, dist.get_world_size())
    return replace(models, target=ShardedDecoder(models.target, ranks))


def runs(rank: int | None, cases: Sequence[tuple[str, str, tuple[str, ...]]]) -> dict[str, Any]:
    """Token ids of whole runs of (graph, drafter, settings)."""
    models, found = dict[str, Models](), dict[str, Any]()
    for graph, kind, sets in cases:
        if kind not in models:
            models[kind] = models_of(kind, rank)
        run = Embedded(models=models[kind]).run(graph, QUESTIONS, sets=sets, budget=BUDGET)
        found[" ".join((graph, *sets))] = tokens_of(run)
    return found


def engine(rank: int | None) -> list[list[list[int]]]:
    """What an engine of each rank answers, the same requests having been given to all."""
    session = Session(open_graph("bim_eagle"), models_of("eagle3", rank), max_new_tokens=BUDGET)
    with Engine(session, threaded=False) as served:
        handles = [served.submit(text) for text in QUESTIONS]
        while served.step():
            pass
        answers = [one.result() for one in handles]
    return [[[*part.tokens] for part in answer.sections] for answer in answers]


def measured(rank: int) -> str:
    program = open_graph("eagle", sets=("drafter.num_draft_tokens=auto",))
    return refused(Session(program, models_of("eagle3", rank)).board)


def greedy(rank: int | None, folder: Path, ids: Tensor) -> tuple[list[int], int]:
    model = load_target(folder)
    if rank is not None:
        model = ShardedDecoder(model, Ranks(None, rank, dist.get_world_size()))
    run = Pooled(model, torch.arange(len(ids) + 24))
    run.forward(ids[:-1], 0)
    tokens = [ids[-1]]
    for at in range(len(ids) - 1, len(ids) + 23):
        tokens.append(run.forward(tokens[-1].view(1), at).logits_RV[-1].argmax())
    return [int(token) for token in tokens[1:]], model.kv_heads
