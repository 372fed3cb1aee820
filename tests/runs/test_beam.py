"""Beam search: the tokens and scores of transformers, few rows, and nothing copied."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers import support
from helpers.pools import permute_, watched
from helpers.support import tokens_of
from helpers.tiny import likely_ids, write_tiny_target
from safetensors.torch import load_file, save_file

from specsot.engine.models import Models
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.record.recorder import Recorder
from specsot.engine.record.run_view import BRANCH, TREE, slot_codes
from specsot.engine.run.core import EngineCore
from specsot.ops.kv.pool import FREE
from specsot.states import beam
from specsot.states.request import Finish, Stage

FLATTER = 0.2  # by so much the head is scaled: several continuations are likely everywhere
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {}, "mistral": {"sliding_window": 11}}
LAYOUTS = ("bim", "batching", "paged")
PROMPTS = {"a": 1, "b": 9, "c": 24}  # prompts by their lengths


@dataclass
class Rig:
    """A tiny model in float64 with its prompts, and what transformers makes of them."""

    models: Models
    reference: support.Reference
    likely: list[int]  # tokens that the model writes; the first of them serve as stop ids

    def prompt(self, key: str) -> list[int]:
        draw = np.random.default_rng(len(key) + ord(key[0]))
        return [int(one) for one in draw.choice(self.likely, PROMPTS.get(key, 6))]

    def start(self, texts: Sequence[str | Prompt], **case: Any) -> EngineCore:
        """A run over prompts; `case` are settings of the graph, `stops` and `budget`."""
        stop_ids, budget = self.likely[: case.pop("stops", 3)], case.pop("budget", 20)
        prompts = [t if isinstance(t, Prompt) else Prompt(t, t) for t in texts]
        book = support.FixedBook({p.text: self.prompt(p.text) for p in prompts}, stop_ids)
        sets = [f"{_path(key)}={_yaml(value)}" for key, value in case.items()]
        made = support.graphs.session("beam", self.models, book, budget=budget, sets=sets)
        return support.start(made, prompts)

    def expected(self, text: str, **case: Any) -> tuple[list[int], float]:
        """What transformers finds: tokens with the stop token, and the score of beam search."""
        ids = torch.tensor([self.prompt(text)])
        with torch.inference_mode():
            found = self.reference.model(torch.float64).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=case["num_beams"],
                length_penalty=case["length_penalty"],
                early_stopping=case["early_stopping"],
                max_new_tokens=case["budget"],
                eos_token_id=self.likely[: case["stops"]] or None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        tokens = found.sequences[0, ids.shape[1] :].tolist()
        if case["num_beams"] > 1:
            return tokens, float(found.sequences_scores[0])
        logits_QV = self.reference.logits([*ids[0].tolist(), *tokens], torch.float64)
        log_QV = logits_QV[ids.shape[1] - 1 : -1].log_softmax(-1)
        total = float(log_QV.gather(1, torch.tensor(tokens)[:, None]).sum())
        return tokens, total / len(tokens) ** case["length_penalty"]


def _path(key: str) -> str:
    if key == "layout":
        return "layout.kind"
    if key == "max_num_batched_tokens":
        return f"scheduler.{key}"
    return f"layout.{key}" if key in ("kv_slots", "max_num_branches") else f"beam.{key}"


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Rig]:
    """rig(family, max_positions): each made once."""

    @cache
    def make(family: str = "llama", max_positions: int = 1024) -> Rig:
        folder = tmp_path_factory.mktemp(family) / "target"
        settings = {"restrict": 12, "max_positions": max_positions, "extra": FAMILIES[family]}
        write_tiny_target(folder, family, **settings)
        file = folder / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        likely = likely_ids(tensors["lm_head.weight"]).tolist()
        tensors["lm_head.weight"] *= FLATTER
        save_file(tensors, file, metadata={"format": "pt"})
        models = support.tiny_models(folder, None, (), "float64")
        return Rig(models, support.Reference(folder, torch.float64), likely)

    return make


def check_beams(run: EngineCore) -> None:
    book, pool = run.manager, run.manager.kv
    pool.check_integrity()
    assert set(book.beams.searches) == {b.owner for b in book.active}
    if run.state not in ("select_beams", "merge", "done"):
        return
    rows: dict[int, int] = {}
    for branch in book.active:
        search = book.beams.searches[branch.owner]
        width, length = search.tokens_Wn.shape
        assert width == len(search.ended) == book.beams.width
        assert search.owners_Wm.shape == (width, length - 1)
        rows |= dict.fromkeys(np.unique(search.owners_Wm).tolist(), 1)
        rows[branch.owner] = branch.length - branch.start
        if branch.start:  # its prompt was read in chunks
            rows[branch.request.prefix_owner] = branch.start
        assert rows[branch.owner] == len(branch.prompt) + beam._agreed(search.owners_Wm)
        assert len({tuple(one) for one in search.tokens_Wn.tolist()}) == width, "beams differ"
        for owner, tokens in zip(search.owners_Wm.T, search.tokens_Wn.T[:-1], strict=True):
            pairs = set(zip(owner.tolist(), tokens.tolist(), strict=True))
            assert len(pairs) == len(set(owner.tolist())), "two tokens in one row"
    reading = {r.prefix_owner for r in support.requests_of(run) if r.stage is Stage.PREFILL}
    owners = set(np.unique(pool.owner).tolist()) - reading - {FREE}
    assert {o: int((pool.owner == o).sum()) for o in owners} == rows
    assert pool.committed[np.isin(pool.owner, [*owners])].all()


def finish(run: EngineCore) -> EngineCore:
    return support.drive(run, check=False, until=lambda run: check_beams(run) is not None)


FACTORS: dict[str, Sequence[Any]] = {
    "family": tuple(FAMILIES),
    "layout": LAYOUTS,
    "num_beams": (1, 2, 3, 4, 5),
    "length_penalty": (0.0, 0.7, 1.0, 2.0, 3.0, -1.0),
    "early_stopping": (False, True, "never"),
    "stops": (0, 1, 2, 4),
    "budget": (1, 2, 3, 7, 12, 20),
    "max_num_batched_tokens": (11, 1024),
}
CASES = support.pairwise(FACTORS, support.SEED)
CASES += [  # where every setting of early_stopping leads elsewhere
    {"family": "llama", "layout": "bim", "num_beams": 4, "length_penalty": penalty}
    | {"early_stopping": early, "stops": 2, "budget": 20, "max_num_batched_tokens": 1024}
    for penalty in (1.0, 2.0)
    for early in FACTORS["early_stopping"]
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_scores_are_those_of_transformers(case: dict[str, Any], rig: Any) -> None:
    case = dict(case)
    made: Rig = rig(case.pop("family"))
    layout = case.pop("layout")
    run = finish(made.start(list(PROMPTS), layout=layout, **case))
    assert run.manager.kv.needed_length == 0 and not run.manager.kv.ledger.bytes
    for branch, text in zip(support.branches_of(run), PROMPTS, strict=True):
        tokens, score = made.expected(text, **case)
        stopped = tokens[-1] in made.likely[: case["stops"]]
        assert branch.tokens == tokens[: len(tokens) - stopped]
        assert branch.finish is (Finish.STOP if stopped else Finish.LENGTH)
        assert branch.score is not None and branch.note == f"score {branch.score:.6g}"
        assert branch.score == pytest.approx(score, rel=1e-6, abs=1e-6)


# -- several requests ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_are_what_they_are_alone(layout: str, rig: Any) -> None:
    made: Rig = rig()
    prompts = [Prompt(text, text, max_new_tokens=5 + 3 * i) for i, text in enumerate("abcdef")]
    run, seen = made.start(prompts, layout=layout, max_num_branches=3), set()
    support.drive(run, check=False, until=lambda run: bool(seen.add(run.state)) or check_beams(run))
    assert "continuous_decode" in seen
    alone = [finish(made.start([prompt], layout=layout)) for prompt in prompts]
    for one, other in zip(map(support.branches_of, alone), support.branches_of(run), strict=True):
        assert [(b.tokens, b.finish, b.score) for b in one] == [
            (other.tokens, other.finish, other.score)
        ]
    for state in ("expand_beams", "select_beams", "merge"):  # and if one of them comes late
        run = made.start(prompts[:1], layout=layout)
        (late,) = support.requests_of(made.start(prompts[1:2], layout=layout))
        support.drive(run, check=False, until=lambda run, state=state: run.state == state)
        run.manager.lifecycle.submit(late)
        assert tokens_of(finish(run)) == tokens_of(alone[0]) | tokens_of(alone[1])


def test_what_is_shown_while_it_runs_is_never_taken_back(rig: Any) -> None:
    made: Rig = rig()
    run, before, early = made.start(list("abcdef"), stops=1), {}, 0
    while not run.finished:
        run.advance()
        for branch in support.branches_of(run):
            known = before.get(branch.name, [])
            assert branch.tokens[: len(known)] == known
            early += branch.stage is Stage.RUNNING and len(branch.tokens) > len(known)
            before[branch.name] = list(branch.tokens)
    assert early > 5, "some tokens are known before the end"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cancelled_search_gives_everything_back(layout: str, rig: Any) -> None:
    made: Rig = rig()
    run = made.start(["a", "b"], layout=layout, stops=0)
    support.drive(run, check=False, until=lambda run: run.steps == 17)
    book = run.manager
    known = list(support.branches_of(run)[0].tokens)
    book.table.cancel("a")
    finish(run)
    first, second = support.branches_of(run)
    assert first.finish is Finish.CANCELLED and first.tokens[: len(known)] == known
    assert second.finish is Finish.LENGTH and len(second.tokens) == 20
    assert run.manager.kv.needed_length == 0 and not book.beams.searches


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_copied_and_slot_order_never_matters(layout: str, rig: Any) -> None:
    made: Rig = rig()
    plain = made.start(["a", "b", "c"], layout=layout, stops=1)
    watch = watched(plain)
    assert not watch.copied and watch.attended and not plain.manager.kv.ledger.bytes
    for every in (1, 4):
        run = made.start(["a", "b", "c"], layout=layout, stops=1)
        while not run.finished:
            run.advance()
            check_beams(run)
            if run.steps % every == 0 and run.state == "select_beams":
                permute_(run.manager.kv, run.steps)
        assert tokens_of(run) == tokens_of(plain)


def test_dead_beams_give_their_rows_back(rig: Any) -> None:
    run = finish(rig().start(["c"], stops=0, budget=60, num_beams=5))
    rows = run.manager.kv.peak_length - PROMPTS["c"]
    assert 60 < rows < 5 * 60 / 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pool_that_is_just_large_enough(layout: str, rig: Any) -> None:
    made: Rig = rig()
    needed = PROMPTS["b"] + 3 * 10 + 1
    case = {"layout": layout, "num_beams": 3, "budget": 10, "stops": 0}
    run = finish(made.start(["b"], kv_slots=needed, **case))
    assert len(support.branches_of(run)[0].tokens) == 10
    run = finish(made.start(["b"], kv_slots=needed - 1, **case))
    (branch,) = support.branches_of(run)
    assert branch.finish is Finish.REFUSED
    assert branch.note == f"needs {needed} slots, the pool has {needed - 1}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_searches_that_do_not_fit_side_by_side_wait(layout: str, rig: Any) -> None:
    made: Rig = rig()
    case = {"layout": layout, "num_beams": 3, "budget": 10, "stops": 0}
    both = PROMPTS["b"] + PROMPTS["c"] + 2 * (3 * 10 + 1)
    for capacity, together in ((both, 2), (both - 1, 2 if layout == "batching" else 1)):
        run, most = made.start(["b", "c"], kv_slots=capacity, **case), set()
        while not run.finished:
            run.advance()
            most.add(len(run.branches))
        assert max(most) == together
        assert [len(branch.tokens) for branch in support.branches_of(run)] == [10, 10]


def test_a_search_at_the_models_last_position(rig: Any) -> None:
    made: Rig = rig(max_positions=30)
    run = finish(made.start(["c"], stops=0))
    (branch,) = support.branches_of(run)
    assert len(branch.tokens) == 6 and branch.finish is Finish.LENGTH
    assert branch.note.startswith("cut to the model's 30; score -")
    case = {"num_beams": 4, "length_penalty": 1.0, "early_stopping": False, "stops": 0}
    assert branch.tokens == made.expected("c", budget=6, **case)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_live_view_tells_what_is_shared(layout: str, rig: Any) -> None:
    run, seen = rig().start(["a", "b"], layout=layout, stops=0), set()
    while not run.finished:
        run.advance()
        pool, requests = run.manager.kv, support.requests_of(run)
        used = slot_codes(pool, requests)[pool.owner >= 0].tolist()
        seen |= set(used)
        assert used.count(BRANCH) + used.count(TREE) == len(used)
    assert seen == {BRANCH, TREE}


def test_what_is_counted_is_what_was_answered(rig: Any) -> None:
    run = rig().start(["a", "b", "c"], stops=2, length_penalty=2.0)
    recorder = Recorder(str)
    run.sink = recorder
    recorder.attach(run)
    while not run.finished:
        run.advance()
        recorder.snapshot_requested = True
    meter, branches = recorder.meter, support.branches_of(run)
    assert meter.tokens == sum(len(branch.tokens) for branch in branches)
    assert min(meter.lengths) == 0 and meter.accepted == meter.drafted == 0
    assert meter.forwards == run.board["host"].reads == meter.rounds + 1
    assert recorder.snapshot is not None and recorder.snapshot.state == "done"
    assert [view.tokens for view in recorder.snapshot.branches] == [len(b.tokens) for b in branches]
