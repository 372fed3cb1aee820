"""Documents through the target, chunk by chunk, into a folder."""

from collections.abc import Iterable
from pathlib import Path

from ...models.load.checkpoint import model_hash
from ...states.prompt_builder import chunks_of
from ..chunks.files import ChunkFiles, ChunkInfo
from ..chunks.store import ChunkMaker, ChunkStore, chunk_maker
from ..errors import UsageError
from ..prepare.environment import model_folders
from ..prepare.inputs import read_documents
from ..prepare.job import prepare
from ..prepare.options import RunOptions
from .opening import load

AddedChunk = tuple[ChunkInfo, bool]  # one that is in the folder now, and whether it is new


def add_documents(
    files: Iterable[Path], options: RunOptions, folder: Path, max_bytes: int, most: int
) -> list[AddedChunk]:
    """Keep the chunks, of at most ``most`` tokens, of all documents in the files.

    Raises:
        UsageError, PromptError, GraphError, ModelError: what cannot be used, and where.
    """
    documents = read_documents(files)
    job = prepare(options)
    session = load(job)
    store = ChunkStore(max_bytes, folder)
    maker = chunk_maker(store, session.models, model_hash(model_folders(job)[0]))
    return [
        _add(folder, maker, name, ids)
        for document in documents
        for name, ids in chunks_of(document, session.prompts, most)
    ]


def _add(folder: Path, maker: ChunkMaker, name: str, ids: tuple[int, ...]) -> AddedChunk:
    store = maker.store
    chunk, is_new = maker.chunk(ids, name)
    if chunk.bytes > store.max_bytes:
        raise UsageError(f"--max-bytes {store.max_bytes}: {name} needs {chunk.bytes}")
    try:
        return ChunkFiles(folder).read_info(maker.key(ids).digest), is_new
    except FileNotFoundError:
        why = store.notes[-1] if store.notes else f"--max-bytes {store.max_bytes} is too little"
        raise UsageError(f"{name} could not be kept: {why}") from None
