"""Families of decoders, a file each: what differs between them over one `Decoder`; without torch.

A new family is a subclass of `Family` in a file here, or in any module that is imported before."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, ClassVar

from ..config import THETA, DecoderConfig, check_supported, layer_types, shape_fields
from ..files import Fields, inside, read_fields, read_json

DTYPES = ("", "float32", "bfloat16", "float16", "float64")
CUSTOM_CODE = {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
ATTENTION = "attention_bias"
Values = Mapping[str, Any]


class Family:
    """One family; the defaults are those of a plain Llama.

    name: `model_type` in config.json. max_positions, head_dim, theta: where config.json is silent;
    a head_dim of 0 is hidden size / heads. activation: of the MLP's gate, a function of
    torch.nn.functional. qk_norm: queries and keys have norms. qkv_bias, o_bias, mlp_bias: whether
    these projections have a bias, or the key of config.json that says so. window_switch: the key
    that turns on windows. partial: RoPE may rotate a part of a head. renamed: keys with other names
    than Llama's -> Llama's names. defaults: of keys that a file may lack, if other than Llama's.
    own_code: its files name code of their own, which is not executed; the family `like` computes
    the same in transformers. gguf: its architecture in GGUF files, "" if they have none.
    gguf_pairs: in them the two numbers of a rotated pair are adjacent, not half a head apart."""

    name: ClassVar[str]
    max_positions: ClassVar[int]
    head_dim: ClassVar[int] = 0
    theta: ClassVar[float] = THETA
    activation: ClassVar[str] = "silu"
    qk_norm: ClassVar[bool] = False
    qkv_bias: ClassVar[str | bool] = False
    o_bias: ClassVar[str | bool] = False
    mlp_bias: ClassVar[str | bool] = False
    window_switch: ClassVar[str] = ""
    partial: ClassVar[bool] = False
    renamed: ClassVar[Mapping[str, str]] = {}
    defaults: ClassVar[Values] = {}
    own_code: ClassVar[bool] = False
    like: ClassVar[str] = ""
    gguf: ClassVar[str] = ""
    gguf_pairs: ClassVar[bool] = False

    @staticmethod
    def gguf_keys(fields: Fields, rope: Values) -> Values:
        """Further keys of config.json that a GGUF file gives, and those that differ from Llama's.
        fields: of its architecture; rope: `rope_parameters` of config.json."""
        return {}

    def llama_fields(self, fields: Fields) -> Fields:
        """config.json with Llama's keys."""
        renamed = {self.renamed.get(key, key): value for key, value in fields.values.items()}
        return Fields(fields.path, {**self.defaults, **renamed})

    def windows(self, fields: Fields, layers: int) -> tuple[int, tuple[bool, ...]]:
        """The sliding window, and for each layer whether it has one, as transformers reads them."""
        window = window_size(fields) if fields.flag(self.window_switch) else 0
        return window, layer_types(fields, layers) if window else (False,) * layers

    def own(self, fields: Fields, shape: Values, sliding: tuple[bool, ...]) -> Values:
        """Further fields of `DecoderConfig`. shape: those of `DecoderShape`."""
        return {}

    def config(self, fields: Fields) -> DecoderConfig:
        """A config.json of this family, checked; ModelError names the key that is wrong."""
        fields = self.llama_fields(fields)
        check_supported(fields, fields, self.activation)
        shape = shape_fields(
            fields, self.max_positions, self.head_dim, self.theta, partial=self.partial
        )
        layers = fields.integer("num_hidden_layers")
        window, sliding = self.windows(fields, layers)
        own = self.own(fields, shape, sliding)
        if window >= shape["rope"].limit:  # reaches back over every possible sequence
            sliding = (False,) * layers
        # `dtype` in files of transformers 5, `torch_dtype` before
        key = "torch_dtype" if fields.get("dtype") is None else "dtype"
        dtype = str(fields.get(key) or "").removeprefix("torch.")
        if dtype not in DTYPES:
            raise fields.wrong(f"`{key}` {dtype!r} is not supported ({', '.join(DTYPES[1:])})")
        # `generate` stops at the ids of generation_config.json where that file exists
        path = fields.path.with_name("generation_config.json")
        stops = fields
        if path.is_symlink() or path.exists():
            generation = Fields(inside(path.parent, path.name), read_json(path))
            stops = generation if generation.ids("eos_token_id") else fields
        eos_ids = stops.ids("eos_token_id")
        if eos_ids and max(eos_ids) >= shape["vocab_size"]:
            size = shape["vocab_size"]
            raise stops.wrong(f"`eos_token_id` is {max(eos_ids)}, the vocabulary has {size}")
        keys = {"qkv_bias": self.qkv_bias, "o_bias": self.o_bias, "mlp_bias": self.mlp_bias}
        shape |= {n: fields.flag(k) if isinstance(k, str) else k for n, k in keys.items()}
        return DecoderConfig(
            **{**shape, **own},
            family=self.name,
            activation=self.activation,
            num_layers=layers,
            qk_norm=self.qk_norm,
            tied=fields.flag("tie_word_embeddings"),
            window=window,
            sliding=sliding,
            eos_ids=eos_ids,
            pad_ids=_other_ids(fields, "pad_token_id"),
            bos_ids=_other_ids(fields, "bos_token_id"),
            dtype=dtype,
        )


def window_size(fields: Fields) -> int:
    """`sliding_window`, by default Hugging Face's 4096; 0 where it is null."""
    if "sliding_window" in fields.values and fields.get("sliding_window") is None:
        return 0
    return fields.integer("sliding_window", 4096)


def families() -> dict[str, type[Family]]:
    """All families by name: those of this package, and other subclasses of `Family`."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    classes = sorted(Family.__subclasses__(), key=lambda family: family.name)
    return {family.name: family for family in classes}


def decoder_config(folder: Path) -> DecoderConfig:
    """The target's config.json, checked; ModelError names the key that is wrong."""
    fields = read_fields(folder)
    name = fields.get("model_type")
    if any(module.name == name for module in iter_modules(__path__)):
        import_module(f"{__name__}.{name}")  # the other families stay unread
    loaded = {family.name: family for family in Family.__subclasses__()}
    by_name = loaded if isinstance(name, str) and name in loaded else families()
    custom = sorted(CUSTOM_CODE & set(fields.section("auto_map").values))
    family = by_name.get(name) if isinstance(name, str) else None
    if family is None or (custom and not family.own_code):
        what = f"`auto_map` for {', '.join(custom)}" if custom else f"model_type {name!r}"
        reason = f"{what} is not supported ({', '.join(families())})"
        raise fields.wrong(f"{reason}; remote code is never executed")
    return family().config(fields)


def _other_ids(fields: Fields, key: str) -> tuple[int, ...]:
    """Ids that do not end decoding; old files write -1 for none."""
    return () if fields.get(key) == -1 else fields.ids(key)
