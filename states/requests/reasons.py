"""What an error says, for the request that it ends."""


def reason_of(error: BaseException) -> str:
    """In a line: the kind of error, and what it says."""
    said = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
