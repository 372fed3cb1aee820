"""Weights that the compiled kernels multiply, and the threads that do it."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from threading import Lock, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .codes import BYTES, FOUR, GROUP, LANES, SUPPORTED, Int4, Int8
from .integer import IntegerWeight

# numba would colour its messages, for which it resets the terminal when Python ends.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
kernels: Any = None
if SUPPORTED and find_spec("numba") is not None:
    kernels = import_module(".kernels", __package__)


class Team:
    """The calling thread and others, which wait in compiled code for work and for each other. A
    thread has cells: address of what all share, number of the thread, number of threads, and
    barriers passed. What all share is in the last row, see `tiles`."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._begin, self._serve = kernels.team_functions()
        self._start()
        os.register_at_fork(after_in_child=self._start)  # a forked process has no other threads

    def _start(self) -> None:
        self._lock = Lock()
        self._cells_T8 = np.zeros((self._threads + 1, 8), np.int64)
        self._own = int(self._cells_T8.ctypes.data)
        self._cells_T8[:-1, 0] = self._own + 64 * self._threads
        self._cells_T8[:-1, 1] = range(self._threads)
        self._cells_T8[:-1, 2] = self._threads
        for thread in range(1, self._threads):
            Thread(target=self._serve, args=(self._own + 64 * thread,), daemon=True).start()

    def run(self, function: int, arguments: Any) -> None:
        """function: the address of one of two addresses, its arguments and the cells of its thread;
        it ends with a barrier. arguments: one row of numpy, with fields."""
        with self._lock:
            self._begin(function, arguments.ctypes.data, self._own)


@cache
def team_of(threads: int) -> Team:
    """Of this process: one for each number of threads, however many models there are."""
    return Team(threads)


def compiles(bits: int) -> bool:
    """Whether numba is installed and the processor can multiply weights of these bits."""
    return bits in SUPPORTED and kernels is not None


class Memory:
    """Memory of a model's weights, in pieces so large that the system gives them large pages."""

    PIECE = 64 << 20

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def take(self, shape: tuple[int, ...]) -> Any:
        """uint8 numbers that begin at a multiple of a vector's size."""
        size = int(np.prod(shape))
        if size + BYTES > self._free.size:
            self._free = np.empty(max(size + BYTES, self.PIECE), np.uint8)
        start = -self._free.ctypes.data % BYTES
        taken = self._free[start : start + size]
        self._free = self._free[start + size :]
        return taken.reshape(shape)


def pack_numbers(weight_OI: Any, memory: Memory) -> Any:
    """Blocks of float32 [O / 16, I, 16], of bfloat16, as int16, [O / 16, I / 2, 16, 2], or of uint8
    [O / 16, I / 4, 16, 4], 128 above the codes in int8."""
    padded = padded_rows(weight_OI, 0)
    each = 4 // padded.itemsize
    ordered = padded.reshape(-1, LANES, padded.shape[1] // each, each).transpose(0, 2, 1, 3)
    blocks = memory.take((*ordered.shape[:2], LANES * 4))
    blocks.view(padded.dtype).reshape(ordered.shape)[:] = ordered
    return np.bitwise_xor(blocks, 128, out=blocks) if padded.dtype == np.int8 else blocks


def pack_int4(codes_OI: Any, steps_OG: Any, offsets_OG: Any, memory: Memory) -> Any:
    """Blocks [O / 16, I / 64, 576] of uint8: two codes in a byte, for each 32 inputs 4 vectors of
    16 outputs; then a step and an offset for each 32 inputs and output."""
    padded = padded_rows(codes_OI, 8)
    blocks = padded.shape[0] // LANES
    groups = padded.shape[1] // GROUP
    pairs = np.zeros((blocks * LANES, 2 * groups, 2), np.int8)
    pairs[: len(steps_OG), : steps_OG.shape[1], 0] = steps_OG
    pairs[: len(steps_OG), : steps_OG.shape[1], 1] = offsets_OG
    nibbles = padded.reshape((blocks, LANES, groups, 2, 2, 4, FOUR))
    both = nibbles[:, :, :, :, 0] | nibbles[:, :, :, :, 1] << 4
    both = both.transpose((0, 2, 3, 4, 1, 5)).reshape(blocks, groups, -1)
    pairs = pairs.reshape((blocks, LANES, groups, 2, 2)).transpose((0, 2, 3, 1, 4))
    pairs = pairs.reshape(blocks, groups, -1).view(np.uint8)
    codes = both.shape[-1]
    packed = memory.take((blocks, groups, codes + pairs.shape[-1]))
    packed[..., :codes] = both
    packed[..., codes:] = pairs
    return packed


def padded_rows(codes_OI: Any, zero: int) -> Any:
    """Codes with whole blocks of outputs and whole groups of inputs."""
    more = (-codes_OI.shape[0] % LANES, -codes_OI.shape[1] % GROUP)
    return np.pad(codes_OI, ((0, more[0]), (0, more[1])), constant_values=zero)


class PackedWeight:
    """Weights as `kernels` multiplies them: codes, or float32 or bfloat16 [O, I]; their product."""

    def __init__(self, weight: Int8 | Int4 | Tensor, bits: int, memory: Memory) -> None:
        self._team = team_of(torch.get_num_threads())
        numbers = weight if isinstance(weight, Tensor) else weight.codes_OI
        numbers_OI = (numbers.view(torch.int16) if bits == 16 else numbers).numpy()
        self.scale_O = np.ones(len(numbers), np.float32)
        if not isinstance(weight, Tensor):
            self.scale_O[:] = weight.scale_O.numpy()
        if isinstance(weight, Int4):
            groups = (weight.steps_OG.numpy(), weight.offsets_OG.numpy())
            self.blocks = pack_int4(numbers_OI, *groups, memory)
        else:
            self.blocks = pack_numbers(numbers_OI, memory)
        # What `kernels.product` takes: addresses of blocks and scales, and a weight's bits.
        self.fields = [self.blocks.ctypes.data, self.scale_O.ctypes.data, bits]
        # bytes of a row, of memory for a product
        self.row_bytes: int = kernels.bytes_of_inputs(numbers.shape[1], bits)

    def product(
        self, x_NI: Tensor, added: Tensor | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """[N, I] -> [N, O] in float64 or float32, plus a residual [N, O] or a bias [O]."""
        rows, depth = x_NI.shape
        shape = (rows, self.scale_O.size)
        if added is None:
            out_NO = torch.empty(shape, dtype=dtype)
        else:
            out_NO = added.to(dtype).expand(shape).clone()
        x_NI = x_NI.double().contiguous()
        work = torch.empty(rows * self.row_bytes, dtype=torch.uint8)
        adds = int(added is not None)
        sizes = (rows, depth, self.scale_O.size)
        places = (x_NI.data_ptr(), out_NO.data_ptr(), work.data_ptr())
        call = np.array([(*self.fields, *sizes, *places, adds)], kernels.MULTIPLY)
        self._team.run(kernels.multiply_of(dtype), call)
        return out_NO


Product = IntegerWeight | PackedWeight


def integer_product(codes: Int8 | Int4, memory: Memory) -> Product:
    """By the compiled kernels where there are any."""
    bits = 8 if isinstance(codes, Int8) else 4
    packs = codes.scale_O.is_cpu and compiles(bits)
    return PackedWeight(codes, bits, memory) if packs else IntegerWeight(codes)


def can_compile(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels multiply plain weights of this dtype here."""
    floats = dtype in (torch.float32, torch.bfloat16) and device.type == "cpu"
    return floats and compiles(8 * dtype.itemsize)
