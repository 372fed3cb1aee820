"""Other programs as sides: `generate` of transformers, and llama.cpp (llama-cpp-python, optional),
for which the weights are written into a GGUF file. Their answers become requests of ours."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Stored
from transformers import GenerationConfig

from ...models.codes import FULL
from ...models.files import ModelError
from ...models.load.reference import as_reference
from ...models.load.weights import load_target
from ...states.request import Branch, Finish, Request, move
from ..errors import UsageError
from ..prepare.inputs import Prompt
from ..prepare.job import model_folders
from ..record.metrics import Marks, Meter
from ..run.writer import answers_of, output_digest
from ..signals import ending_with
from .experiment import ASSISTED, LLAMA_CPP, LOOKUP
from .sides import Peer, Side, SideRun


@dataclass
class Steps:
    """A streamer of transformers: when tokens came, and how many at once."""

    start_time: int = field(default_factory=perf_counter_ns)
    times: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    _prompt: bool = True

    def put(self, value: Any) -> None:
        if not self._prompt:
            self.times.append(perf_counter_ns() - self.start_time)
            self.counts.append(value.numel())
        self._prompt = False

    def end(self) -> None:
        """Required by transformers."""


# Decodes a request after these ids, up to a number of tokens, and reports its steps.
Generate = Callable[[Request, list[int], int, Steps], list[int]]


def _run(decode: Generate, drafts: bool, side: Side, prompt: Prompt, most: int | None) -> SideRun:
    """One prompt, without the stop token; drafts: its first forward proposes tokens, too."""
    request = side.session.request(prompt)
    most = most or request.budget
    steps = Steps()
    tokens = decode(request, [*request.prefix, *request.tail], most, steps)
    whole = perf_counter_ns() - steps.start_time
    stopped = bool(tokens) and tokens[-1] in request.stop_ids
    branch = Branch(request, 0, 0, most, prompt=request.tail)
    branch.tokens = tokens[:-1] if stopped else tokens
    branch.end(Finish.STOP if stopped else Finish.LENGTH)
    request.branches = [branch]
    move(request, "run")
    move(request, "finish")
    counts = steps.counts
    counts[-1] -= stopped
    lengths = Counter(counts if drafts else counts[1:])
    meter = Meter(forwards=len(counts), rounds=lengths.total(), tokens=sum(counts), lengths=lengths)
    meter.in_run = meter.in_ops = whole
    meter.marks[request.key] = Marks(steps.times[0], None, steps.times[-1])
    return SideRun(
        meter,
        first_token=steps.times[0],
        last_token=steps.times[-1],
        decoded=sum(counts[1:]),
        digest=output_digest(answers_of([request], side.session.prompts)),
        requests=(request,),
    )


Generation: Any = GenerationConfig  # its constructor has no types
DRAWN = ("temperature", "top_k", "top_p")  # settings of `sampling` that both have


def with_peers(sides: Sequence[Side], names: Sequence[str]) -> list[Side]:
    """The sides, with their peers; models are loaded once. Raises UsageError."""
    load = cache(_load)
    pairs = zip(sides, names, strict=True)
    return [replace(side, peer=_peer(name, side, load)) if name else side for side, name in pairs]


def _peer(name: str, side: Side, load: Callable[..., Any]) -> Peer:
    graph = side.job.program.graph
    sampling = graph.sampling
    options = side.job.options
    if sampling.model_dump(exclude_defaults=True).keys() - {*DRAWN, "accept", "rule"}:
        raise UsageError(f"{name}: of `sampling` it knows {', '.join(DRAWN)} only")
    target, drafter = model_folders(side.job)
    if name == LLAMA_CPP:
        if sampling.temperature > 0:
            raise UsageError(f"{name}: it is measured without a temperature only")
        return _llama_cpp(side, target)
    model = load(target, options.dtype, options.device, options.weights)
    extra: dict[str, Any] = {}
    if name == LOOKUP:
        extra = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}
    elif name == ASSISTED and drafter is not None:
        assistant = load(drafter, options.dtype, options.device)
        config = assistant.generation_config
        config.num_assistant_tokens = getattr(graph.drafter, "gamma", None)
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        extra = {"assistant_model": assistant}
    arguments: dict[str, Any] = {"do_sample": sampling.temperature > 0}
    if sampling.temperature > 0:
        arguments |= {setting: getattr(sampling, setting) for setting in DRAWN}

    def generate(request: Request, ids: list[int], most: int, steps: Steps) -> list[int]:
        ids_1Q = torch.tensor([ids], device=model.device)
        stops = sorted(request.stop_ids)
        config = Generation(max_new_tokens=most, eos_token_id=stops, pad_token_id=0, **arguments)
        with torch.inference_mode(), torch.random.fork_rng():
            torch.manual_seed(request.seed)
            out = model.generate(
                ids_1Q,
                attention_mask=torch.ones_like(ids_1Q),
                generation_config=config,
                streamer=steps,
                **extra,
            )
        return [*out[0, len(ids) :].tolist()]

    return Peer(name, partial(_run, generate, bool(extra)))


def _load(folder: Path, dtype: str, device: str, weights: str = "full") -> Any:
    model = as_reference(folder, getattr(torch, dtype), weights)
    model.generation_config = Generation()  # not what a checkpoint suggests
    return model.to(device)


KINDS = {"int8": Stored.Q8_0, "int4": Stored.Q4_0}
DTYPES = {"float32": Stored.F32, "bfloat16": Stored.BF16, "float16": Stored.F16}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
BLOCK = 32  # numbers of a row that llama.cpp's codes share a scale


def _llama_cpp(side: Side, folder: Path) -> Peer:
    try:
        binding: Any = import_module("llama_cpp")
    except ImportError as error:
        raise UsageError(f"{LLAMA_CPP}: llama-cpp-python cannot be imported: {error}") from None
    options = side.job.options
    full = options.weights == FULL
    stored = DTYPES.get(options.dtype) if full else KINDS[options.weights]
    if stored is None or options.device != "cpu":
        raise UsageError(f"{LLAMA_CPP}: not in {options.dtype} on {options.device}")
    temporary = TemporaryDirectory(prefix="specsot-gguf-")
    with ending_with(temporary.cleanup), temporary as made:
        model: Any = binding.Llama(  # maps the file, which can be removed then
            str(write_gguf(Path(made) / "model.gguf", folder, stored)),
            verbose=False,
            n_ctx=min(side.session.models.target.config.rope.limit, 4096),
            n_threads=options.threads,
            n_threads_batch=options.threads,
        )

    def generate(request: Request, ids: list[int], most: int, steps: Steps) -> list[int]:
        tokens = list[int]()
        steps.put(ids)
        model.reset()
        for token in model.generate(ids, temp=0.0, reset=True):
            tokens.append(int(token))
            steps.put(torch.tensor(tokens[-1:]))
            if token in request.stop_ids or len(tokens) == most:
                break
        return tokens

    return Peer(LLAMA_CPP, partial(_run, generate, False), "" if full else stored.name)


def write_gguf(file: Path, folder: Path, stored: Stored) -> Path:
    """A checkpoint's weights as llama.cpp reads them, without a tokenizer; raises ModelError."""
    target = load_target(folder, torch.float32)
    config = target.config
    arch = ARCHITECTURES.get(config.family)
    if arch is None or config.rope.kind != "default" or config.window:
        what = "a family, positions or windows"
        raise ModelError(config.path, f"{what} that are not written as GGUF here")
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(config.rope.limit)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(config.head_dim)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_layers)
    for name, value in target.published().items():
        stem, _, suffix = name.rpartition(".")
        if config.tied and stem == "lm_head":
            continue
        values = value.detach().numpy()
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            # llama.cpp keeps the two numbers of a rotated pair side by side.
            halves = values.reshape(-1, 2, config.head_dim // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        kind = stored if values.ndim == 2 and values.shape[1] % BLOCK == 0 else Stored.F32
        data = gguf.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
