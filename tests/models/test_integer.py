"""Products of integers: one model in compiled kernels, in torch and in transformers, bit by bit."""

import subprocess
import sys
from ctypes import CFUNCTYPE, c_int64, c_void_p, cast
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest
import torch
from helpers.tiny import write_tiny_target
from torch import Tensor

from specsot.engine.models import prepare_
from specsot.engine.run.scoring import full_prefill
from specsot.models.codes import INT4_GROUP, MAX_STEP, Int4, Int8, codes_of, quantised
from specsot.models.decoder import Decoder
from specsot.models.files import ModelError
from specsot.models.integer import IntegerWeight
from specsot.models.linear import Linear
from specsot.models.load.reference import as_reference
from specsot.models.load.weights import load_target
from specsot.models.packed import Memory, PackedWeight, Team, compiles, integer_product

CPU = torch.device("cpu")
IDS = list(range(3, 40))
compiled = pytest.mark.skipif(not compiles(8), reason="no numba, or no AVX-512 VNNI")


def in_codes(
    folder: Path, dtype: torch.dtype, kind: str = "int8", *, compiled: bool = True
) -> Decoder:
    target = load_target(folder, dtype)
    full = load_target(folder, dtype)
    prepare_(target, kind, CPU)
    if not compiled:
        target.compiled = None
        for name, module in target.named_modules():
            if isinstance(module, Linear):
                weight = full.get_parameter(f"{name}.weight")
                module.kernel = IntegerWeight(codes_of(name, weight, kind))
    return target


@torch.inference_mode()
def logits(target: Decoder, dtype: torch.dtype) -> Tensor:
    return full_prefill(target, IDS, dtype, CPU)[0].logits_RV


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "smollm3", "gemma3_text"]
)
@pytest.mark.parametrize(("kind", "dtype"), [("int8", torch.float32), ("int4", torch.bfloat16)])
@torch.inference_mode()
def test_a_quantised_model_has_the_bits_of_transformers(
    family: str, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    slides = family in ("mistral", "gemma3_text")
    extra = {"sliding_window": 16} if slides else {"head_dim": 20}
    folder = write_tiny_target(tmp_path / "target", family, extra=extra)
    theirs = as_reference(folder, dtype, kind)
    expected_V = theirs(torch.tensor([IDS])).logits[0, -1].float()
    ours = logits(in_codes(folder, dtype, kind), dtype)[0]
    torch_only = logits(in_codes(folder, dtype, kind, compiled=False), dtype)[0]
    assert torch.equal(ours, torch_only) and torch.equal(ours, expected_V)
    full = load_target(folder, dtype)
    assert not torch.allclose(logits(full, dtype)[0], ours, atol=1e-3), "codes are no full weights"


def test_experts_are_not_quantised(tmp_path: Path) -> None:
    target = load_target(write_tiny_target(tmp_path / "target", "qwen3_moe"))
    with pytest.raises(ModelError, match="int8 experts are not supported: --weights full"):
        prepare_(target, "int8", CPU)


@pytest.mark.parametrize("shape", [(33, 40), (64, 96), (17, 5), (16, 1100)])
@pytest.mark.parametrize("form", [Int8, Int4])
def test_a_row_has_the_same_product_among_any_rows(
    shape: tuple[int, int], form: type[Int8 | Int4]
) -> None:
    outputs, depth = shape
    codes = form.of(torch.randn(outputs, depth))
    x_NI = torch.randn(21, depth, dtype=torch.float64)
    x_NI[3] = 0.0
    integers_NI, scale_N1 = quantised(x_NI)
    assert integers_NI.abs().max() == 127 * MAX_STEP
    assert ((integers_NI * scale_N1 - x_NI).abs() <= 0.5001 * MAX_STEP * scale_N1).all()
    sums_NO = integers_NI @ codes.integers().double().t()
    expected_NO = sums_NO * (scale_N1 * codes.scale_O.double())
    for compiled in (True, False):
        weight = integer_product(codes, Memory()) if compiled else IntegerWeight(codes)
        all_NO = weight.product(x_NI)
        assert torch.allclose(all_NO, expected_NO, rtol=1e-14)
        for rows in (1, 2, 3, 7, 8, 15):
            assert torch.equal(weight.product(x_NI[:rows]), all_NO[:rows])
        residual_NO = torch.randn(21, outputs, dtype=torch.float64)
        added_NO = weight.product(x_NI, residual_NO)
        assert torch.allclose(added_NO, all_NO + residual_NO, rtol=1e-14)


@pytest.mark.parametrize("shape", [(33, 40), (17, 5), (16, 1100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_product_of_floats_among_any_rows(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    bits = 8 * dtype.itemsize
    if not compiles(bits):
        pytest.skip("no numba, or no such instructions")
    weight_OI = torch.randn(shape).to(dtype)
    x_NI = torch.randn(21, shape[1], dtype=torch.float64)
    weight = PackedWeight(weight_OI, bits, Memory())
    all_NO = weight.product(x_NI)
    expected_NO = x_NI.to(dtype).double() @ weight_OI.double().t()
    assert torch.allclose(all_NO, expected_NO, rtol=1e-4, atol=1e-4)
    for rows in (1, 2, 3, 7, 8, 15):
        assert torch.equal(weight.product(x_NI[:rows]), all_NO[:rows])
    added_NO = weight.product(x_NI, expected_NO)
    assert torch.allclose(added_NO, all_NO + expected_NO, rtol=1e-12)


@pytest.mark.parametrize("form", [Int8, Int4])
def test_the_largest_numbers_do_not_overflow(form: type[Int8 | Int4]) -> None:
    weight_OI = torch.ones(16, 4096)
    x_NI = torch.ones(2, 4096, dtype=torch.float64)
    for compiled in (True, False):
        codes = form.of(weight_OI)
        weight = integer_product(codes, Memory()) if compiled else IntegerWeight(codes)
        out_NO = weight.product(x_NI)
        assert torch.allclose(out_NO, torch.tensor(4096.0, dtype=torch.float64), rtol=0.02)


@pytest.mark.parametrize("form", [Int8, Int4])
def test_a_code_is_the_nearest_one(form: type[Int8 | Int4]) -> None:
    weight_OI = torch.randn(64, 96)
    weight_OI[3] = 0.0
    codes = form.of(weight_OI)
    error_OI = codes.integers() * codes.scale_O[:, None] - weight_OI
    step_OI = codes.scale_O[:, None].expand(64, 96)
    if isinstance(codes, Int4):
        step_OI = step_OI * codes.steps_OG.repeat_interleave(INT4_GROUP, 1)
        assert codes.codes_OI.unique().tolist() == list(range(16))
    nearest_OI = error_OI.abs() <= 0.5001 * step_OI
    assert nearest_OI.float().mean() > 0.95 and (error_OI.abs() <= 1.1 * step_OI).all()
    assert not error_OI[3].any()
    parts = torch.cat([form.of(part).integers() for part in weight_OI.split((16, 48))])
    assert torch.equal(parts, codes.integers()), "rows are coded alike in any matrix"


@compiled
@pytest.mark.parametrize(
    ("family", "whole"),
    [
        ("llama", True),
        ("smollm3", True),
        ("olmo2", False),
        ("gemma3_text", False),
        ("qwen3_moe", False),
    ],
)
def test_tiny_models_run_in_compiled_layers(family: str, whole: bool, tmp_path: Path) -> None:
    target = load_target(write_tiny_target(tmp_path / "target", family))
    expected = logits(target, torch.float32)
    prepare_(target, "full", CPU)
    assert (target.compiled is not None) == whole
    assert torch.allclose(logits(target, torch.float32), expected, atol=1e-4)


@compiled
@pytest.mark.parametrize("kind", ["full", "int8", "int4"])
def test_any_number_of_threads_computes_the_same_bits(kind: str, tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path / "target", "qwen3")
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            target = load_target(folder, torch.float32)
            prepare_(target, kind, CPU, packed=True)
            assert target.compiled is not None
            found.append(logits(target, torch.float32))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@compiled
def test_every_thread_of_a_team_gets_its_cells() -> None:
    team = Team(3)
    seen = []

    @CFUNCTYPE(None, c_int64, c_int64)
    def note(arguments: int, cells: int) -> None:
        seen.append((arguments, list((c_int64 * 3).from_address(cells))[1:]))

    call_1 = np.zeros(1, np.int64)
    for _ in range(4):
        team.run(cast(note, c_void_p).value or 0, call_1)
    deadline = monotonic() + 30  # in compiled code the last barrier waits
    while len(seen) < 12 and monotonic() < deadline:
        sleep(0.001)
    assert {arguments for arguments, _ in seen} == {call_1.ctypes.data}
    assert sorted(cells for _, cells in seen) == sorted([[0, 3], [1, 3], [2, 3]] * 4)


INTERRUPTED = """
import random, signal, sys
import torch
from specsot.models.packed import Memory, PackedWeight
torch.set_num_threads(2)
torch.manual_seed(0)
weight = PackedWeight(torch.randn(256, 512), 32, Memory())
x_NI = torch.randn(5, 512)
expected_NO = weight.product(x_NI)
signal.signal(signal.SIGALRM, signal.default_int_handler)
count = 0
while count < 300:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 2e-3))
        while True:
            assert torch.equal(weight.product(x_NI), expected_NO)
    except KeyboardInterrupt:
        count += 1
"""
FORKED = """
import os, signal, sys
import torch
from specsot.models.packed import Memory, PackedWeight
torch.set_num_threads(2)
weight = PackedWeight(torch.randn(256, 512), 32, Memory())
x_NI = torch.randn(5, 512)
expected_NO = weight.product(x_NI)
if os.fork() == 0:
    signal.alarm(30)
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(weight.product(x_NI), expected_NO) else 1)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


ONE_CORE = """
import os, signal
from time import sleep
import torch
from specsot.models.packed import Memory, PackedWeight
signal.alarm(100)  # threads that do not wake
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
torch.set_num_threads(3)
weight = PackedWeight(torch.randn(256, 512), 32, Memory())
x_NI = torch.randn(5, 512)
expected_NO = weight.product(x_NI)
for _ in range(300):
    assert torch.equal(weight.product(x_NI), expected_NO)
while weight._team._cells_T8[-1, 1] < 2:  # all others sleep
    sleep(0.001)
assert torch.equal(weight.product(x_NI), expected_NO)  # and wake
"""


@compiled
@pytest.mark.parametrize(
    "program", [INTERRUPTED, FORKED, ONE_CORE], ids=["interrupted", "forked", "one_core"]
)
def test_a_team_survives(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], timeout=200, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
