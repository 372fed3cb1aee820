"""Two ranks compute what one process does, with views of its weights."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.decoders import CASES, LAYERS, SHAPE, UNEVEN, save
from helpers.sequences import Pooled
from helpers.sharded_work import forwards, from_shares, late, run_ranks, unlike
from safetensors.torch import load_file, save_file

from specsot.engine.models import prepare_
from specsot.models.decoder import Share, part
from specsot.models.families import decoder_config
from specsot.models.files import ModelError
from specsot.models.linear import pack_
from specsot.models.load.weights import load_target, window
from specsot.models.sharded import Ranks, ShardedDecoder, place

ALIKE = (
    "smollm3-interval-untied",
    "gemma3-pattern-untied-linear",
    "llama-biases-head_dim",
    "mistral-window",
    "qwen2-tied-theta",
    "qwen3-biases-layer_types",
)
SOME = {
    "uneven": ("llama", UNEVEN),
    **{name: CASES[name] for name in ALIKE},
    "one-head": CASES["llama-one-kv-head-tied"],
}
IDS = torch.randint(SHAPE["vocab_size"], (16,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, case in SOME.items():
        made[name] = tmp_path_factory.mktemp(name)
        save(made[name], *case)
    return made


@pytest.fixture(scope="module")
def found(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder, every = tmp_path_factory.mktemp("ranks"), list(folders.values())
    uneven = folders["uneven"]
    works = (forwards, every, IDS), (from_shares, uneven, IDS, torch.float64), (unlike, uneven)
    both = run_ranks(2, folder, *works, (late,))
    return [(dict(zip(folders, one, strict=True)), *others) for one, *others in both]


@pytest.mark.parametrize("name", SOME)
def test_the_same_logits_and_taps(name: str, folders: dict[str, Path], found: Any) -> None:
    run = Pooled(load_target(folders[name]), torch.arange(len(IDS)))
    alone = run.forward(IDS, 0, tuple(range(LAYERS + 1)))
    first, second = (one[0][name] for one in found)
    assert torch.equal(first["logits"], second["logits"]), "the same bits on every rank"
    assert torch.equal(first["taps"], second["taps"])
    torch.testing.assert_close(first["logits"], alone.logits_RV, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(first["taps"], alone.taps_QF, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", SOME)
def test_views_and_two_sums_a_layer(name: str, found: Any) -> None:
    ranks = [one[0] for one in found]
    for rank in ranks:
        assert rank[name]["copied"] == []
        assert rank[name]["calls"] == {"all_reduce": 2 * 2 * LAYERS, "all_gather": 2}
        assert rank[name]["none"] == (0, SHAPE["vocab_size"])
    heads = [rank[name]["heads"] for rank in ranks]
    assert heads == {"uneven": [2, 1], "one-head": [1, 0]}.get(name, [1, 1])


@pytest.mark.parametrize("name", ["uneven", "qwen2-tied-theta"])
def test_a_rank_loads_only_its_share(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Everything outside a share is NaN in the file: a scan would find it."""
    config = decoder_config(folders[name])
    for index in range(2):
        share = Share.of(config, index, 2)
        if config.tied:
            share = share._replace(vocabulary=range(config.vocab_size))
        weights = load_file(folders[name] / "model.safetensors")
        poor = {key: torch.full_like(value, torch.nan) for key, value in weights.items()}
        for key, value in weights.items():
            cut = window(key, config, share)
            poor[key][cut] = value[cut]
        assert any(value.isnan().any() for value in poor.values())
        place = tmp_path / f"{index}"
        place.mkdir()
        save_file(poor, place / "model.safetensors")
        (place / "config.json").write_text((folders[name] / "config.json").read_text())
        held = load_target(place, part=(index, 2))
        kept = {one.data_ptr(): one.numel() for one in held.parameters()}
        asked = {key: value[window(key, config, share)].numel() for key, value in weights.items()}
        assert sum(kept.values()) == sum(asked.values()) < sum(w.numel() for w in weights.values())
        with pytest.raises(ModelError, match="not finite"):
            load_target(place, part=(1 - index, 2))


def test_shares_from_files_compute_together(folders: dict[str, Path], found: Any) -> None:
    both = [one[1] for one in found]
    run = Pooled(load_target(folders["uneven"], torch.float64), torch.arange(16), torch.float64)
    assert torch.equal(both[0]["logits"], both[1]["logits"]) and both[0]["copied"] == []
    torch.testing.assert_close(both[0]["logits"], run.forward(IDS, 0).logits_RV)


def test_ranks_do_not_share_rows_of_codes(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="int8 quantises whole rows"):
        prepare_(load_target(folders["uneven"]), "int8", torch.device("cpu"), packed=False)


def test_what_cannot_be(folders: dict[str, Path], found: Any) -> None:
    replica, nobody = load_target(folders["uneven"]), Ranks(None, 0, 2)
    with pytest.raises(ModelError, match="were not loaded here"):
        ShardedDecoder(load_target(folders["uneven"], part=(1, 2)), nobody)
    with pytest.raises(ValueError, match="part 2 of 2 does not exist"):
        load_target(folders["uneven"], part=(2, 2))
    with pytest.raises(ModelError, match=r"config.json: packed weights .* packed=False"):
        pack_(replica)
        ShardedDecoder(replica, nobody)
    assert all("the ranks are not alike" in one[2] for one in found)


@pytest.mark.parametrize(
    ("name", "what"),
    [("phi3", "fused projections"), ("olmo2", "norms over"), ("qwen3_moe", "experts")],
)
def test_layers_without_parts_are_refused(name: str, what: str, tmp_path: Path) -> None:
    save(tmp_path, *CASES[name])
    for build in (partial(load_target, tmp_path, part=(0, 2)), partial(sharded, tmp_path)):
        with pytest.raises(ModelError, match=f"{what}.* cannot be divided among ranks"):
            build()


def sharded(folder: Path) -> ShardedDecoder:
    return ShardedDecoder(load_target(folder), Ranks(None, 0, 2))


def test_a_late_rank_is_an_error_after_the_deadline(found: Any) -> None:
    took, said = found[0][3]
    assert 1 < took < 10 and len(said) == 2 and said[0] == said[1]
    assert said[0].startswith("rank 0 of 2: all_reduce failed: ")


def test_a_finer_share_lies_inside_a_coarser_one(folders: dict[str, Path]) -> None:
    config = decoder_config(folders["uneven"])
    for size in (1, 3, 4, 61):
        for count in (1, 2, 3, 8):
            parts = [part(size, i, count) for i in range(count)]
            assert [n for one in parts for n in one] == list(range(size))
    for ranks, before, after in ((4, 4, 2), (8, 8, 2), (8, 4, 2), (12, 6, 2), (4, 2, 1), (6, 6, 1)):
        for rank in range(ranks):
            fine, coarse = (place(rank, ranks, tp) for tp in (before, after))
            assert coarse.members[coarse.number] == rank
            own = Share.of(config, coarse.number, after)
            assert Share.of(config, fine.number, before).within(own) is not None
    for wrong in ((0, 4, 3), (4, 4, 2), (0, 4, 0)):
        with pytest.raises(ValueError, match="come out even"):
            place(*wrong)
