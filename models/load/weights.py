"""Checkpoint folders: weight files listed, checked by their headers and hashed; and models filled
from them, targets and drafters that fit one, after all names, shapes and dtypes have been compared.
Every tensor of a drafter's file must be known and every parameter filled: a forgotten norm would
cost most of the acceptance without failing any test of the output."""

import hashlib
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..config import DecoderConfig
from ..decoder import Decoder, Share
from ..drafters.config import MEDUSA_BLOCK, dflash_config, eagle3_config, eagle_config
from ..drafters.dflash import DFlashDraftModel, TargetEnds
from ..drafters.eagle import EMBEDDING, LM_HEAD, Eagle, Eagle3, EagleHead
from ..families import decoder_config
from ..files import MODEL_FILES, Fields, ModelError, cause_of, inside, read_json
from ..linear import replace_
from .tokenizer import check_same_tokens

if TYPE_CHECKING:
    from ..drafters.medusa import Medusa
    from ..drafters.mtp import Mtp

SINGLE = "model.safetensors"
SINGLES = (SINGLE, "medusa_lm_head.safetensors")
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FLOATS = {"F64", "F32", "F16", "BF16"}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MAX_NAMES = 8  # in one message
PIECE = 1 << 18  # values copied at once
DERIVED = ".rotary_emb.inv_freq"  # in old Llama files; follows from config.json
KINDS = {
    "target": "a language model",
    "eagle": "an EAGLE-1 or EAGLE-2 drafter",
    "eagle3": "an EAGLE-3 drafter",
    "dflash": "a DFlash drafter",
    "medusa": "heads of Medusa",
}
# Between vocabularies; all else is floats.
MAPS = {"d2t": {"I64", "I32"}, "t2d": {"BOOL"}, "token_map": {"I64", "I32"}}

Window = tuple[slice, ...]
"""The part of a stored tensor: of its rows, and of its columns if it has any."""

EVERYTHING = slice(None)
MTP = "model.mtp_layers."  # drafters inside a target, which `load_mtp` reads
LAYER = re.compile(r"(?:model\.)?layers\.(\d{1,6})\.")

Device = torch.device | str
Place = tuple[torch.dtype, Device]
Built = TypeVar("Built", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One stored tensor; the dtype is safetensors' name."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


Stored = Mapping[str, StoredTensor]


def resolve(model: str | Path, patterns: Sequence[str] = MODEL_FILES) -> Path:
    """A local folder as it is, or these files of `org/name` on the Hub, cached; else ModelError."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(str(model)):
        raise ModelError(folder, "is not a folder")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(model), allow_patterns=list(patterns)))
    except Exception as error:  # the Hub client raises a dozen unrelated kinds
        reason = f"is not a folder, and it cannot be fetched from the Hub ({cause_of(error)})"
        raise ModelError(str(model), reason) from None


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, in the order of their names; nothing is opened but JSON."""
    if not folder.is_dir():
        raise ModelError(folder, "is not a folder")
    for name in SINGLES:
        if (folder / name).is_symlink() or (folder / name).exists():
            return [inside(folder, name)]
    if (folder / INDEX).exists():
        return [inside(folder, name) for name in sorted(set(_index(folder).values()))]
    if pickles := sorted(p for p in folder.iterdir() if p.suffix in PICKLES):
        reason = "pickled weights can run code and are never opened; convert them once"
        raise ModelError(pickles[0], f"{reason}: specsot models convert {folder} OUT")
    raise ModelError(folder, f"holds neither {SINGLE} nor {INDEX}")


def _index(folder: Path) -> dict[str, str]:
    path = inside(folder, INDEX)
    weight_map = Fields(path, read_json(path)).section("weight_map").values
    if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(path, "`weight_map` must give a file name for every tensor")
    return dict(weight_map)


def entries(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor, by the headers; ModelError for a missing or invalid file or a wrong index."""
    stored: dict[str, StoredTensor] = {}
    files = weight_files(folder)
    for path in files:
        if not path.is_file():
            raise ModelError(path, "is missing")
        header: dict[str, StoredTensor] = {}
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    header[name] = StoredTensor(path, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(path, f"is not a valid safetensors file: {error}") from None
        if again := sorted(header.keys() & stored.keys()):
            raise ModelError(path, f"holds `{again[0]}`, and so does {stored[again[0]].path.name}")
        stored |= header
    for name, file in _index(folder).items() if files[0].name not in SINGLES else ():
        if name not in stored or stored[name].path.name != file:
            raise ModelError(folder / INDEX, f"puts `{name}` into {file}, which does not hold it")
    return stored


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor of a file, on the CPU and as stored."""
    try:
        with safe_open(path, framework="pt") as file:
            value: Tensor = file.get_tensor(name)
            return value
    except (SafetensorError, OSError) as error:
        raise ModelError(path, f"cannot be read: {error}") from None


def model_hash(folder: Path) -> str:
    """sha256 over config.json and the weight files' bytes, in the order of their names."""
    digest = hashlib.sha256()
    for path in [inside(folder, "config.json"), *weight_files(folder)]:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def kind_of(stored: Stored) -> str:
    """A key of KINDS, or an empty string. EAGLE-3's attention reads embeddings and features: twice
    the width. DFlash normalises queries and the target's features."""
    if any(map(MEDUSA_BLOCK.fullmatch, stored)):
        return "medusa"
    joined = stored.get("fc.weight")
    first = "layers.0.self_attn.q_proj.weight"
    if joined is None:
        firsts = (f"model.{first}", f"model.{first.replace('q_proj', 'qkv_proj')}")
        return "target" if any(name in stored for name in firsts) else ""
    if any(name.startswith("midlayer.") for name in stored):
        return "eagle3"
    if first not in stored:
        return ""
    if stored[first].shape[1:] == (2 * joined.shape[0],):
        return "eagle3"
    norms = "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"
    return "dflash" if any(name in stored for name in norms) else "eagle"


def window(name: str, config: DecoderConfig, share: Share) -> Window:
    """The part of a tensor, by its name in a Hugging Face checkpoint, that a share holds."""
    layer, kind = name.split(".")[-2:]

    def cut(part: range, width: int = 1) -> slice:
        return slice(part.start * width, part.stop * width)

    keys = cut(share.kv_heads, config.head_dim)
    queries = cut(share.kv_heads, config.head_dim * (config.heads // config.kv_heads))
    inner = cut(share.columns)
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "lm_head": cut(share.vocabulary)}
    rows |= {"gate_proj": inner, "up_proj": inner}
    columns = {"o_proj": queries, "down_proj": inner}
    if layer in columns and kind == "weight":
        return EVERYTHING, columns[layer]
    return (rows.get(layer, EVERYTHING),)


def on_meta(path: Path, build: Callable[[], Built]) -> Built:
    """The module without memory, for its names and shapes."""
    try:
        with torch.device("meta"):
            return build()
    except Exception as error:  # torch and transformers, given sizes and settings of a file
        raise ModelError(path, f"describes an impossible model ({cause_of(error)})") from None


def compare(folder: Path, stored: Stored, views: Mapping[str, Tensor]) -> list[str]:
    """Raise ModelError for missing, misshapen and non-float tensors; return unexpected names."""
    missing = [name for name in views if name not in stored]
    if missing:
        count = "1 tensor is" if len(missing) == 1 else f"{len(missing)} tensors are"
        raise ModelError(folder, f"{count} missing: {listed(missing)}")
    for name, view in views.items():
        entry = stored[name]
        shape = tuple(view.shape)
        if entry.dtype not in MAPS.get(name, FLOATS):
            raise ModelError(entry.path, f"`{name}` is {entry.dtype}: unsupported quantisation")
        if entry.shape != shape:
            reason = f"`{name}` has shape {list(entry.shape)}, config.json makes it {list(shape)}"
            raise ModelError(entry.path, reason)
    return [n for n in stored if n not in views and not n.endswith(DERIVED)]


def materialise(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give a module built on `meta` real parameters, all NaN so that an unfilled one is seen."""
    for part in module.modules():
        for name, value in list(part.named_parameters(recurse=False)):
            if value.is_meta:  # others are borrowed from the target
                empty = torch.full(value.shape, torch.nan, dtype=dtype, device=device)
                setattr(part, name, nn.Parameter(empty, requires_grad=False))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device))


def fill(
    views: Mapping[str, Tensor], stored: Stored, windows: Mapping[str, Window], scan: bool = True
) -> None:
    """Copy the stored tensors into the views, a few rows at a time: nothing is in memory twice.
    windows: parts to copy, if any. scan: ModelError for NaN and infinity in the views' dtype."""
    filled = [name for name, view in views.items() if not view.is_meta]
    ordered = sorted(filled, key=lambda name: (stored[name].path, name))
    for path, names in groupby(ordered, lambda name: stored[name].path):
        try:
            with safe_open(path, framework="pt") as file, torch.no_grad():
                for name in names:
                    if bad := _copy(file.get_slice(name), views[name], scan, windows.get(name, ())):
                        raise ModelError(path, f"`{name}` holds {bad} values that are not finite")
        except (SafetensorError, OSError) as error:
            raise ModelError(path, f"cannot be read: {error}") from None


def _copy(part: Any, view: Tensor, scan: bool, window: Window = ()) -> int:
    """Fill a view from a stored tensor; returns how many values a scan finds not finite."""
    step = max(1, PIECE // max(view[:1].numel(), 1))
    bad = 0
    begin = window[0].start or 0 if window else 0
    for first in range(0, len(view) if view.numel() else 0, step):
        rows = view[first : first + step]
        rows.copy_(part[(slice(begin + first, begin + first + len(rows)), *window[1:])])
        if scan and not all(value.isfinite() for value in rows.aminmax()):  # both are NaN of one
            bad += rows.numel() - int(torch.isfinite(rows).sum())
    return bad


def listed(names: Iterable[str]) -> str:
    every = list(names)
    rest = len(every) - MAX_NAMES
    return ", ".join(every[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def load_target(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
    *,
    part: tuple[int, int] = (0, 1),
    scan: bool = True,
    whole_head: bool = False,
) -> Decoder:
    """A decoder from a Hugging Face folder (config.json and safetensors); `Decoder.notes` names
    unexpected tensors. On the device `meta` everything but values is checked.

    part: index and count: the part of as many ranks that `sharded` needs on one of them; nothing
        else is read. Embedding and norms are whole, and so is a tied head. ValueError if the index
        is out of range. scan: refuse values that are not finite. whole_head: the head is whole, for
        a drafter that may borrow it.
    Raises ModelError: the checkpoint is refused; the message names the file and the reason."""
    index, count = part
    config = decoder_config(folder)
    stored = _read(folder, "target")
    _check_layers(config.path, config.num_layers, stored)
    tied = (LM_HEAD,) if config.tied and LM_HEAD not in stored else ()
    share = Share.of(config, index, count)
    if tied or whole_head:
        share = share._replace(vocabulary=range(config.vocab_size))
    decoder = on_meta(config.path, lambda: Decoder(config, share))
    whole = decoder if count == 1 else on_meta(config.path, lambda: Decoder(config))
    extra = compare(folder, stored, _views(whole, tied))
    extra = [name for name in extra if not name.startswith(MTP)]
    if tied:  # empty until the embedding has memory, which the head then shares
        decoder.lm_head.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    materialise(decoder, dtype, device)
    if tied:
        decoder.lm_head.weight = decoder.embed
    views = _views(decoder, tied)
    fill(views, stored, {name: window(name, config, share) for name in views}, scan)
    ignored = (f"unexpected tensors ignored: {listed(extra)}",) if extra else ()
    decoder.notes = config.notes + ignored
    return decoder.eval()


def load_eagle3(
    folder: Path, target: Decoder, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> Eagle3:
    """An EAGLE-3 drafter, with the target's embedding unless it has its own; raises ModelError."""
    stored = _read(folder, "eagle3")
    config = eagle3_config(folder, target.config)
    _check_width(stored, config.taps, config.target_hidden_size)
    drafter = on_meta(config.path, lambda: Eagle3(config))
    same_vocabulary = config.draft_vocab_size == config.vocab_size
    absent = tuple(MAPS) if same_vocabulary and "d2t" not in stored else ()
    _complete_(drafter, stored, target, place=(dtype, device), absent=absent)
    if absent or drafter.d2t.is_meta:
        return drafter
    # d2t leads into the target's vocabulary, and t2d is its image
    path = stored["d2t"].path
    targets = drafter.to_target(torch.arange(config.draft_vocab_size, device=drafter.d2t.device))
    if outside := targets[(targets < 0) | (targets >= config.vocab_size)].tolist():
        reason = f"`d2t` leads to target id {outside[0]}"
        raise ModelError(path, f"{reason}; the vocabulary has {config.vocab_size}")
    if not torch.equal(targets.sort().values, drafter.t2d.nonzero().flatten()):
        raise ModelError(path, "`d2t` and `t2d` do not describe the same tokens")
    return drafter


def load_eagle(
    folder: Path, target: Decoder, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> Eagle:
    """An EAGLE-1 or EAGLE-2 drafter, with the target's ends unless it has its own; ModelError."""
    stored = _read(folder, "eagle")
    config = eagle_config(folder, target.config)
    drafter = on_meta(config.path, lambda: Eagle(config))
    return _complete_(drafter, stored, target, place=(dtype, device))


def load_vanilla(
    folder: Path, target: Decoder, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> Decoder:
    """A small language model with the target's tokens; raises ModelError."""
    check_same_tokens(decoder_config(folder), target.config)
    return load_target(folder, dtype, device)


def load_dflash(
    folder: Path, target: Decoder, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> DFlashDraftModel:
    """A DFlash drafter in z-lab's or speculators' layout, for one target, whose embedding and head
    it uses; copies of them in the file must be equal to them. Raises ModelError."""
    stored = dict(_read(folder, "dflash"))
    config = dflash_config(folder, target.config)
    if config.speculators:
        for name, original in ((EMBEDDING, target.embed), (LM_HEAD, target.lm_head.weight)):
            entry = stored.pop(name, None)
            if entry is None:
                continue
            shape = list(original.shape)
            if list(entry.shape) != shape:
                reason = f"`{name}` has shape {list(entry.shape)}, the target's is {shape}"
                raise ModelError(entry.path, reason)
            copy = read_tensor(entry.path, name)
            original = original.to_dense() if original.is_mkldnn else original
            if not original.is_meta and not torch.equal(copy, original.to(copy.device, copy.dtype)):
                raise ModelError(entry.path, f"`{name}` is not the target's")
    _check_layers(config.path, len(config.reaches), stored)
    _check_width(stored, config.layer_ids, config.hidden_size)
    if len(target.share.vocabulary) < target.vocab_size:
        raise ModelError(config.path, "drafts with the target's head: only a share of it is here")
    ends = TargetEnds(target.embed, target.lm_head.weight)
    drafter = on_meta(config.path, lambda: DFlashDraftModel(config, ends))
    return _complete_(drafter, stored, target, place=(dtype, device))


def load_medusa(
    folder: Path, target: Decoder, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> "Medusa":
    """Heads of Medusa for one target, each with the target's head unless it has its own."""
    from ..drafters.medusa import TOKEN_MAP, Medusa, medusa_config

    stored = dict(_read(folder, "medusa"))
    shapes = {name: entry.shape for name, entry in stored.items()}
    config = medusa_config(folder, shapes, target.config)
    drafter = on_meta(config.path, lambda: Medusa(config, (target.num_layers,)))
    if not config.draft_vocab:
        stored.pop(TOKEN_MAP, None)
    absent = [name for name in drafter.ends if name not in stored]
    drafter.borrow_(absent, target.lm_head.weight)
    _complete_(drafter, stored, target, place=(dtype, device))
    if config.shared:
        drafter.borrow_(absent, drafter.get_parameter(f"heads.0.{config.blocks}.weight"))
    ids_D = drafter.token_map
    if len(ids_D) and not ids_D.is_meta and not 0 <= ids_D.min() <= ids_D.max() < target.vocab_size:
        reason = f"`{TOKEN_MAP}` leads out of the vocabulary of {target.vocab_size}"
        raise ModelError(stored[TOKEN_MAP].path, reason)
    return drafter


def load_mtp(
    folder: Path, target: Decoder, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> "Mtp":
    """The first MTP layer in a target's own files; raises ModelError."""
    from ..drafters.mtp import FIRST, Mtp, mtp_config

    stored = {name: e for name, e in entries(folder).items() if name.startswith(FIRST)}
    if not stored:
        raise ModelError(folder, f"holds no MTP layer, `{FIRST}*`, as the targets of MiMo do")
    config = mtp_config(decoder_config(folder))
    drafter = on_meta(config.path, lambda: Mtp(config))
    return _complete_(drafter, stored, target, place=(dtype, device))


LOADERS: dict[str, Any] = {
    "eagle": load_eagle,
    "eagle3": load_eagle3,
    "dflash": load_dflash,
    "medusa": load_medusa,
}


def _views(module: Any, absent: Container[str]) -> dict[str, Tensor]:
    return {name: view for name, view in module.published().items() if name not in absent}


def _complete_(
    drafter: Built, stored: Stored, target: Decoder, place: Place, absent: tuple[str, ...] = ()
) -> Built:
    """Compare a drafter without memory with its target and its file, then fill it from the file; an
    EAGLE head shares the target's embedding and head where its file lacks them."""
    config: Any = drafter.config
    check_same_tokens(config, target.config, extra=True)
    if isinstance(drafter, EagleHead):
        drafter.owned = drafter.ends & stored.keys()
        ends = {EMBEDDING: target.embed, LM_HEAD: target.lm_head.weight}
        for name in drafter.ends - drafter.owned:
            module = name.partition(".")[0]
            needed = list(drafter.get_parameter(name).shape)
            shape = list(ends[name].shape)
            if needed != shape:
                reason = f"has no `{module}` of its own, and would need one of shape {needed}"
                raise ModelError(config.path, f"{reason}: the target's is {shape}")
            replace_(drafter.get_submodule(module), "weight", ends[name])
    if extra := compare(config.path.parent, stored, _views(drafter, absent)):
        raise ModelError(stored[extra[0]].path, f"unexpected tensors: {listed(extra)}")
    materialise(drafter, *place)
    fill(_views(drafter, absent), stored, {})
    return drafter.eval()


def _read(folder: Path, kind: str) -> Stored:
    """The tensors of a folder's files; ModelError if they are those of another kind of model: the
    tensors decide, as published configs name all kinds of architectures."""
    stored = entries(folder)
    if kind != "target":  # speculators keeps these of its target's
        stored = {n: e for n, e in stored.items() if not n.startswith("verifier_")}
    actual = kind_of(stored)
    if actual not in ("", kind):
        raise ModelError(next(iter(stored.values())).path, f"is {KINDS[actual]}, not {KINDS[kind]}")
    layers = _num_layers(stored)
    if kind.startswith("eagle") and layers > 1:
        raise ModelError(folder, f"{KINDS[kind]} has 1 layer here, this one has {layers}")
    return stored


def _check_width(stored: Stored, taps: tuple[int, ...], hidden: int) -> None:
    """Compare the number of taps with the width of `fc`, the only trace of it in the weights."""
    entry = stored.get("fc.weight")
    if entry is None or len(entry.shape) != 2 or entry.shape[1] == len(taps) * hidden:
        return
    reason = f"`fc.weight` takes {entry.shape[1]} features, and the {len(taps)} taps {taps} of a"
    raise ModelError(entry.path, f"{reason} target of width {hidden} are {len(taps) * hidden}")


def _check_layers(path: Path, count: int, stored: Stored) -> None:
    """Before a module is built for every layer that the config claims."""
    layers = _num_layers(stored)
    if count > layers:
        raise ModelError(path, f"`num_hidden_layers` is {count}, the weights hold {layers} layers")


def _num_layers(stored: Stored) -> int:
    return len({match[1] for name in stored if (match := LAYER.match(name))})
