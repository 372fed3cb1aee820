"""What kind of model a checkpoint is, by the names and shapes of its tensors."""

from .checkpoint import Stored

KINDS = {
    "target": "a language model",
    "eagle": "an EAGLE-1 or EAGLE-2 drafter",
    "eagle3": "an EAGLE-3 drafter",
    "dflash": "a DFlash drafter",
}


def kind_of(stored: Stored) -> str:
    """A key of KINDS, or an empty string.

    EAGLE-3's attention reads embeddings beside features: twice the width. DFlash norms queries, and
    what it reads of the target.
    """
    joined = stored.get("fc.weight")
    first = "layers.0.self_attn.q_proj.weight"
    if joined is None:
        return "target" if f"model.{first}" in stored else ""
    if any(name.startswith("midlayer.") for name in stored):
        return "eagle3"
    if first not in stored:
        return ""
    if stored[first].shape[1:] == (2 * joined.shape[0],):
        return "eagle3"
    norms = "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"
    return "dflash" if any(name in stored for name in norms) else "eagle"
