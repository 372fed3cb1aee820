"""The digest of a run: equal if and only if its tokens are."""

import hashlib
from collections.abc import Mapping, Sequence


def digest(token_ids: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """sha256 over the token ids of each request's branches in reading order."""
    lines = [
        f"{key}:{';'.join(' '.join(map(str, branch)) for branch in branches)}"
        for key, branches in token_ids.items()
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
