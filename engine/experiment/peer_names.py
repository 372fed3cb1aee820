"""Whom graphs can be measured against; read without torch."""

from collections.abc import Mapping

PLAIN = "autoregressive"
HF, ASSISTED, LOOKUP = "hf", "hf-assisted", "hf-lookup"
PEERS: Mapping[str, tuple[str, ...]] = {  # settings of the plain graph, for the models to load
    HF: (),
    ASSISTED: ("drafter.kind=vanilla", "drafter.gamma=4"),
    LOOKUP: (),
}
