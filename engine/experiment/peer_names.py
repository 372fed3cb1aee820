"""Whom graphs can be measured against; read without torch."""

from collections.abc import Mapping
from importlib.util import find_spec

PLAIN = "autoregressive"
HF = "hf"
ASSISTED = "hf-assisted"
LOOKUP = "hf-lookup"
LLAMA_CPP = "llama-cpp"
PEERS: Mapping[str, tuple[str, ...]] = {  # settings of the plain graph, for the models to load
    HF: (),
    ASSISTED: ("drafter.kind=vanilla", "drafter.gamma=4"),
    LOOKUP: (),
    LLAMA_CPP: (),
}


def why_missing(peer: str) -> str:
    """Why a peer cannot be measured here; nothing if it can."""
    if peer == LLAMA_CPP and find_spec("llama_cpp") is None:
        return "llama-cpp-python is not installed (docs/cli.md)"
    return ""
