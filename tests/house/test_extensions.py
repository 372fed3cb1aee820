"""An extension takes few files and no change to the code: each one is added, runs, and is counted.

Families of models have a test of their own: tests/models/test_config.py."""

import asyncio
import importlib
from pathlib import Path

import httpx
import pytest
from helpers.toy_graph import Write, install

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.prepare.options import ServeOptions
from specsot.engine.record.metrics import Meter
from specsot.engine.run.api import open_session, token_digest
from specsot.engine.run.session import perform
from specsot.engine.serve.app import Api, build_app
from specsot.engine.serve.metrics import ServerMetrics
from specsot.engine.workers.link import WorkerHost, WorkerSource
from specsot.engine.workers.router import Router

ROOT = Path(__file__).parents[2]
MACHINE = (ROOT / "graphs" / "machines" / "decode.yaml").read_text(encoding="utf-8")
EAGLE = "drafter: {kind: eagle3, num_draft_tokens: 4, draft_depth: 3, top_k: 2}"
QUESTIONS = ("Tell me about honey bees.", "Why?", "How do volcanoes work, and why do they erupt?")


def added(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.rglob("*") if file.suffix in (".py", ".yaml"))


def decoded(graph: str, *sets: str, questions: tuple[str, ...] = QUESTIONS) -> tuple[str, Meter]:
    session = open_session(graph, sets=sets, threads=1, max_new_tokens=12)
    prompts = [Prompt(str(place), question) for place, question in enumerate(questions)]
    run, recorder, _ = perform(session, prompts)
    digest = token_digest(run.answers)
    run.close()
    return digest, recorder.meter


def machine(*changes: tuple[str, str]) -> str:
    text = MACHINE
    for old, new in (("drafter: {kind: none}", EAGLE), *changes):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


DRAFTER = (ROOT / "examples/own_drafter/src/own_drafter/drafter.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("layout", ["bim", "batching"])
def test_a_drafter_is_one_file_and_a_graph(layout: str, write: Write) -> None:
    folder = write({"own_toy": DRAFTER.replace("echo", "toy")})
    install(folder, "specsot.drafters", "own_toy:EchoDrafter", point="toy")
    graph = folder / "toy.yaml"
    graph.write_text("extends: bim_plain\nname: toy\ndoc: A toy drafts.\ndrafter: {kind: toy}\n")
    assert added(folder) == ["own_toy.py", "toy.yaml"]
    kind = f"layout.kind={layout}"
    digest, meter = decoded(str(graph), kind)
    assert meter.accepted > 0
    plain, none = decoded("bim_plain", kind, "drafter.kind=none")
    assert (digest, 0) == (plain, none.accepted)


def test_a_drafter_without_grow_is_an_error_and_not_plain_decoding(write: Write) -> None:
    folder = write({"own_mute": DRAFTER[: DRAFTER.index("    def grow")].replace("echo", "mute")})
    install(folder, "specsot.drafters", "own_mute:EchoDrafter", point="mute")
    with pytest.raises(NotImplementedError, match="EchoDrafter has no method `tree_`"):
        decoded("bim_plain", "drafter.kind=mute")


ATTENTION = '''\
from specsot.ops.attention.backends import AttentionBackend

calls = []


class CountingBackend(AttentionBackend, name="counting"):
    """Every sequence by itself, and a record of the rows of each call."""

    def run(self, q_Nhd, keys_hKd, values_hKd, plan):
        calls.append(len(q_Nhd))
        return super().run(q_Nhd, keys_hKd, values_hKd, plan)
'''


def test_an_attention_backend_is_one_file(write: Write) -> None:
    folder = write({"own_attention": ATTENTION})
    install(folder, "specsot.attention", "own_attention:CountingBackend", point="counting")
    assert added(folder) == ["own_attention.py"]
    digest, meter = decoded("eagle", "attention=counting")
    assert len(importlib.import_module("own_attention").calls) >= meter.forwards > 0
    assert digest == decoded("eagle", "attention=dense")[0]


POLICY = '''\
from specsot.states.policies import Policy

ranked = []


def shortest_prompt(candidate):
    """The request with the fewest prompt tokens starts first."""
    ranked.append(candidate.prompt)
    return (candidate.prompt, candidate.arrival, candidate.place)


policy = Policy(shortest_prompt, overtakes=True)
'''


def test_a_scheduler_policy_is_one_file(write: Write) -> None:
    folder = write({"own_policy": POLICY})
    install(folder, "specsot.policies", "own_policy:policy", point="shortest_prompt")
    assert added(folder) == ["own_policy.py"]
    digest, _ = decoded("eagle", "scheduler.policy=shortest_prompt", "layout.max_num_branches=1")
    ranked = importlib.import_module("own_policy").ranked
    assert len(set(ranked)) == len(QUESTIONS), "every prompt was ranked by its length"
    assert digest == decoded("eagle", "layout.max_num_branches=1")[0]


RULE = '''\
from dataclasses import replace

import torch

from specsot.ops.registry import op
from specsot.ops.types import Proposal, Rows
from specsot.ops.verify.verify import Accepted, accept


@op("own.accept_one", writes="accepted")
def accept_one(rows: Rows, logits: torch.Tensor, proposal: Proposal) -> Accepted:
    """Accepts one draft at most: the first node of the path that matches."""
    accepted = accept(rows, logits, proposal)
    depth_ST = torch.nn.functional.pad(proposal.depths_SN, (1, 0))
    path_ST = accepted.path_ST & (depth_ST <= 1)
    node_T = torch.arange(path_ST.shape[1], device=path_ST.device)
    last_S1 = (path_ST * node_T).argmax(1, keepdim=True)
    bonus_S = accepted.drawn_ST.gather(1, last_S1).squeeze(1)
    return replace(accepted, path_ST=path_ST, bonus_S=bonus_S)
'''


def test_a_verification_rule_is_one_file_and_a_graph(write: Write) -> None:
    folder = write({"own_rule": RULE})
    graph = folder / "own_rule.yaml"
    # `continuous_decode` verifies too
    text = machine().replace("      - verify.accept\n", "      - own_rule:accept_one\n")
    graph.write_text(text, encoding="utf-8")
    assert added(folder) == ["own_rule.py", "own_rule.yaml"]
    digest, meter = decoded(str(graph))
    shipped, longer = decoded("eagle")
    assert digest == shipped
    assert set(meter.lengths) == {1, 2}, "at most one draft, and the target's own token"
    assert max(longer.lengths) > 2


PHASE = '''\
from specsot.ops.registry import guard, op
from specsot.states.manager import BranchStateManager
from specsot.states.round import RoundSummary

rounds = []


@op("own.note")
def note(branches: BranchStateManager, committed: RoundSummary) -> None:
    """Keeps the numbers of tokens that a round committed."""
    rounds.append(sum(committed.committed))


@guard("own_committed")
def committed_many(committed: RoundSummary) -> bool:
    """Whether a round committed more than one token."""
    return sum(committed.committed) > 1
'''


def test_a_phase_is_one_file_and_a_graph(write: Write) -> None:
    """A state behind `verify` with an op and a guard of its own."""
    folder = write({"own_phase": PHASE})
    graph = folder / "own_phase.yaml"
    text = machine(
        (
            "  merge:\n",
            "  note:\n    doc: Keeps what was committed.\n    ops: ['own_phase:note']\n  merge:\n",
        ),
        (
            "  - {from: [prefill, verify, continuous_decode, merge], to: schedule}\n",
            "  - {from: verify, to: note, when: 'own_phase:committed_many'}\n"
            "  - {from: [prefill, verify, continuous_decode, merge, note], to: schedule}\n",
        ),
    )
    graph.write_text(text, encoding="utf-8")
    assert added(folder) == ["own_phase.py", "own_phase.yaml"]
    digest, meter = decoded(str(graph), questions=QUESTIONS[:1])
    rounds = importlib.import_module("own_phase").rounds
    assert 0 < len(rounds) <= meter.rounds and min(rounds) > 1
    assert digest == decoded("eagle", questions=QUESTIONS[:1])[0]


ENDPOINT = '''\
from starlette.responses import JSONResponse


def add_routes(app, api):
    """`GET /queue`: the number of open requests and their limit."""

    async def queue(request):
        return JSONResponse({"open": api.router.open, "limit": api.options.max_queue})

    app.add_route("/queue", queue, methods=["GET"])
'''


def _no_worker(number: int, part: int) -> WorkerHost:
    raise AssertionError("no worker is started")


def test_an_endpoint_of_the_server_is_one_file(write: Write) -> None:
    folder = write({"own_endpoint": ENDPOINT})
    assert added(folder) == ["own_endpoint.py"]

    async def fetched(path: str) -> httpx.Response:
        router = Router(WorkerSource(_no_worker))
        api = Api(router, ServerMetrics(router), ServeOptions(max_queue=7))
        app = build_app(api)
        importlib.import_module("own_endpoint").add_routes(app, api)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path)

    response = asyncio.run(fetched("/queue"))
    assert (response.status_code, response.json()) == (200, {"open": 0, "limit": 7})
    assert asyncio.run(fetched("/version")).status_code == 200, "the routes of specsot stay"
