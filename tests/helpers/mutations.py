"""Model folders with something wrong in them, drawn at random; and who reads what he should not."""

import ctypes
import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from specsot.engine.models import Models, load_models, with_drafter
from specsot.models.files import ModelError
from specsot.models.load.inspect import inspect_model

from .tiny import (
    write_tiny_dflash,
    write_tiny_eagle,
    write_tiny_eagle3,
    write_tiny_target,
    write_tiny_tokenizer,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
KINDS = {"eagle": "eagle2", "eagle3": "eagle3", "dflash": "dflash", "vanilla": "vanilla"}
SECONDS = 20.0  # for one folder: templates that never end are stopped after 5 for each loader
IN_OPEN = 0x20  # of inotify
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ bos_token }}"
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 7, 64, 2**31, 10**30, -(10**30), 0.5, -1.5, 1e308, 1e-320),
    *("", "x", "default", "yarn", "dynamic", "longrope", "llama", "float16", "..", "../outside"),
    *("/etc/passwd", "{{ raise_exception('no') }}", "{% for i in range(9) %}", "\ud800", "é" * 300),
    *([], {}, [1], [None], ["x"], {"a": 1}, [[[]]], {"factor": 2}, [1, 2, 3], {"AutoModel": "m.M"}),
)
TEXTS = ("", "{", "[]", "null", "1", '{"a": NaN}', "[" * 5000, '{"a":' * 3000, "\x00", '"x"')


def write_good(root: Path) -> Path:
    """A target in two shards and a drafter of every kind for it, and `outside` beside them."""
    target = write_tiny_target(root / "target", layers=7)
    write_tiny_eagle(root / "eagle", target)
    write_tiny_eagle3(root / "eagle3", target)
    write_tiny_dflash(root / "dflash", target)
    write_tiny_tokenizer(target)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT}))
    (target / "generation_config.json").write_text('{"eos_token_id": [2]}')
    shutil.copytree(target, root / "vanilla")
    shutil.copytree(target, root / "outside")
    return root


class Outside:
    """Counts how often files of a folder are opened, by whomever in this process."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.inotify_init1(os.O_NONBLOCK)
        assert self._libc.inotify_add_watch(self._file, bytes(folder), IN_OPEN) >= 0

    def opened(self) -> bool:
        try:
            return bool(os.read(self._file, 1 << 16))
        except BlockingIOError:
            return False


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all members of a JSON document; of long ones the first few."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())[:60]
    elif isinstance(value, list):
        items = list(enumerate(value))[:10]
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def change_json(draw: Random, path: Path) -> None:
    """Another value at a place, a member less, or no JSON at all."""
    text = path.read_text()
    kind = draw.random()
    if kind < 0.1:
        path.write_bytes(draw.choice(TEXTS).encode())
        return
    if kind < 0.2:
        cut = draw.randrange(len(text) + 1)
        path.write_text(text[:cut] + draw.choice(["", "}", ",", "\\", "9"]) + text[cut + 1 :])
        return
    try:
        document = json.loads(text)
        *above, last = draw.choice(list(places(document)))
    except (ValueError, IndexError, RecursionError):  # changed before
        return
    inner = document
    for key in above:
        inner = inner[key]
    if draw.random() < 0.15:
        del inner[last]
    else:
        inner[last] = draw.choice(VALUES)
    path.write_text(json.dumps(document))


def change_weights(draw: Random, path: Path) -> None:
    """A header with other entries, bytes that are turned over, or an end that is missing."""
    data = bytearray(path.read_bytes())
    kind = draw.random()
    if kind < 0.15 or len(data) < 9:
        path.write_bytes(data[: draw.randrange(len(data) + 1)])
        return
    size = struct.unpack("<Q", data[:8])[0]
    if kind < 0.5:
        reach = len(data) if kind < 0.2 else min(len(data), size + 8)
        for _ in range(draw.choice([1, 3, 20])):
            data[draw.randrange(reach)] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        return
    try:
        header = json.loads(data[8 : 8 + size])
        name = draw.choice([name for name in header if name != "__metadata__"])
        entry = header[name]
    except (ValueError, IndexError, TypeError):
        return
    key = draw.choice(["dtype", "shape", "data_offsets", "name", "drop"])
    if key == "drop":
        del header[name]
    elif key == "name":
        header[draw.choice(["", "x", "d2t", "midlayer.x", "layers.9.x", "a" * 999])] = entry
    else:
        entry[key] = draw.choice([["I8"], "I8", "F64", "BOOL", [], [0], [2**40, 2], [1, 2], [0, 8]])
    new = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + bytes(data[8 + size :]))


def change_index(draw: Random, folder: Path) -> None:
    single = folder / SINGLE
    if not single.is_file():
        return
    single.rename(folder / "a.safetensors")
    names = ["a.safetensors"] * 4 + ["../outside/" + SINGLE, "/etc/passwd", "", "."]
    names += ["b.safetensors", str(folder.parent / "outside" / SINGLE)]
    names += ["..\\outside\\model.safetensors"]
    keys = ["model.norm.weight", "fc.weight", "lm_head.weight", "x"]
    document: Any = {"weight_map": {key: draw.choice(names) for key in keys}}
    (folder / INDEX).write_text(json.dumps(document))
    if draw.random() < 0.3:
        change_json(draw, folder / INDEX)


def change_file(draw: Random, path: Path) -> None:
    """A link that leads outside or to itself, a folder, or nothing where a file was."""
    kind, outside = draw.randrange(5), path.parent.parent / "outside" / path.name
    path.unlink()
    if kind == 0:
        path.symlink_to(f"../outside/{path.name}")
    elif kind == 1:
        path.symlink_to(outside)
    elif kind == 2:
        path.symlink_to(path.name)
    elif kind == 3:
        path.mkdir()


def mutate(draw: Random, folder: Path) -> list[str]:
    """Change one to three things; returns which files."""
    told = []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        files = sorted(p for p in folder.iterdir() if p.is_file() and not p.is_symlink())
        if not files:
            break
        path, kind = draw.choice(files), draw.random()
        if kind < 0.08:
            change_file(draw, path)
        elif kind < 0.16:
            change_index(draw, folder)
        elif path.suffix == ".json":
            change_json(draw, path)
        else:
            change_weights(draw, path)
        told.append(path.name)
    return told


@contextmanager
def a_bad_folder(draw: Random, good: Path, kind: str) -> Iterator[tuple[Path, list[str]]]:
    folder = good / "bad"
    shutil.copytree(good / kind, folder)
    try:
        yield folder, mutate(draw, folder)
    finally:
        shutil.rmtree(folder)


def faults_of(good: Path, models: Models, kind: str, seed: int, outside: Outside) -> list[str]:
    """What is wrong with how one drawn folder was dealt with: nothing, one should think."""
    faults: list[str] = []
    with a_bad_folder(Random(seed), good, kind) as (folder, changed):
        tries: list[Callable[[], object]] = [lambda: inspect_model(folder)]
        if kind == "target":
            tries.append(lambda: load_models(folder, None))
        else:
            tries.append(lambda: with_drafter(models, folder, KINDS[kind]))
        outside.opened()
        began = time.monotonic()
        for attempt in tries:
            try:
                attempt()
            except ModelError as error:
                if "\n" in str(error) or not str(error).strip():
                    faults.append(f"no line of its own: {error!r}")
            except BaseException as error:  # panics of Rust are no Exception
                faults.append(f"{type(error).__name__}: {error}")
        if time.monotonic() - began > SECONDS:
            faults.append(f"took {time.monotonic() - began:.1f} s")
        if outside.opened():
            faults.append("a file outside of the folder was opened")
    return [f"seed {seed}, {kind}, {changed}: {fault}" for fault in faults]


def check_folders(root: Path, kinds: Mapping[int, str]) -> None:
    """Spoiled folders, by the seeds that spoil them: each is refused, or loads."""
    good = write_good(root)
    models, outside = load_models(good / "target", None), Outside(good / "outside")
    found = [faults_of(good, models, kind, seed, outside) for seed, kind in kinds.items()]
    assert not any(found), "\n".join(fault for faults in found for fault in faults)
