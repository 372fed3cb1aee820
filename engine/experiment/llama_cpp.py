"""llama.cpp on a side's prompts and the same weights, by llama-cpp-python, which is optional.

It is given token ids and gives token ids: its own tokenizer takes no part. The weights are written
into a GGUF file first: those of a quantised side in llama.cpp's own codes, Q8_0 or Q4_0, which are
not ours.
"""

from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Stored

from ...models.config import DecoderConfig
from ...models.files import ModelError
from ...models.load.weights import load_target
from ...models.quantise import FULL, Weights
from ..bench.sides import Side, SideRun
from ..errors import UsageError
from ..prepare.inputs import Prompt
from ..record.report import answers_of, output_digest
from ..run.runner import Status
from .peer_answers import Steps, answered, cost_of
from .peer_names import LLAMA_CPP

KINDS = {"int8": Stored.Q8_0, "int4": Stored.Q4_0}
DTYPES = {"float32": Stored.F32, "bfloat16": Stored.BF16, "float16": Stored.F16}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
BLOCK = 32  # numbers of a row that llama.cpp's codes share a scale


class LlamaCppPeer:
    """A peer: greedy decoding of one sequence by llama.cpp. codes: of its own weights, if any."""

    name = LLAMA_CPP
    codes = ""

    def __init__(self, side: Side, folder: Path) -> None:
        try:
            binding: Any = import_module("llama_cpp")
        except ImportError as error:
            raise UsageError(f"{LLAMA_CPP}: llama-cpp-python cannot be imported: {error}") from None
        options = side.job.options
        config = side.session.models.target.config
        kind = Weights.of(options.weights).kind
        stored = DTYPES.get(options.dtype) if kind == FULL else KINDS[kind]
        if stored is None or options.device != "cpu":
            raise UsageError(f"{LLAMA_CPP}: not in {options.dtype} on {options.device}")
        self.codes = "" if kind == FULL else stored.name
        self._kept = TemporaryDirectory(prefix="specsot-gguf-")
        file = write_gguf(Path(self._kept.name) / "model.gguf", folder, stored)
        size = min(config.rope.limit, 4096)
        threads = options.threads
        given = {"n_ctx": size, "n_threads": threads, "n_threads_batch": threads}
        self._model: Any = binding.Llama(str(file), verbose=False, **given)

    def answer(self, side: Side, prompt: Prompt, budget: int | None) -> SideRun:
        """One prompt; at most `budget` tokens, if there is one."""
        request = side.session.request(prompt)
        ids = [*request.prefix, *request.tail]
        most = budget or request.budget
        steps = Steps()
        written = list[int]()
        steps.put(ids)
        began = perf_counter_ns()
        self._model.reset()
        for token in self._model.generate(ids, temp=0.0, reset=True):
            written.append(int(token))
            steps.put(torch.tensor(written[-1:]))
            if token in request.stop_ids or len(written) == most:
                break
        whole = perf_counter_ns() - began
        answered(request, written, most)
        digest = output_digest(answers_of([request], side.session.prompts))
        return SideRun(Status.OK, cost_of(steps, whole, request, False), (), request, digest)


def write_gguf(file: Path, folder: Path, stored: Stored) -> Path:
    """A checkpoint's weights as llama.cpp reads them, without a tokenizer.

    Raises:
        ModelError: of a family or a scaling of positions that is not written here.
    """
    target = load_target(folder, torch.float32)
    config = target.config
    if config.rope.kind != "default" or config.window:
        raise ModelError(config.path, "positions or windows that are not written as GGUF here")
    arch = ARCHITECTURES[config.family]
    writer = gguf.GGUFWriter(file, arch)
    _describe(writer, config)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_layers)
    for name, value in target.published().items():
        stem, _, suffix = name.rpartition(".")
        if config.tied and stem == "lm_head":
            continue
        values = value.detach().numpy()
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            values = _paired(values, config.head_dim)
        kind = stored if values.ndim == 2 and values.shape[1] % BLOCK == 0 else Stored.F32
        data = gguf.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _describe(writer: Any, config: DecoderConfig) -> None:
    writer.add_context_length(config.rope.limit)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _paired(values: Any, head_dim: int) -> Any:
    """The two numbers of a rotated pair side by side, as llama.cpp has them for Llama."""
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
