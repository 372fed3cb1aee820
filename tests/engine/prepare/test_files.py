"""Which file a name means, and what is said about files that are none."""

import os
import time
from pathlib import Path

import pytest
from helpers.toy_graph import told

from specsot.engine.prepare.files import graph_names, open_graph, open_source
from specsot.states.yaml.source import GraphError

pytestmark = pytest.mark.usefixtures("here")


def refused(ref: str) -> str:
    began = time.process_time()
    with pytest.raises(GraphError) as caught:
        open_graph(ref)
    assert time.process_time() - began < 1
    return told(caught.value)[0]


def own(path: Path, name: str) -> None:
    text = "version: 1\nname: x\nlayout: {kind: bim}\ndrafter: {kind: none}\ninitial: done\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}doc: {name}\nstates: {{done: {{final: true}}}}\n")


@pytest.mark.parametrize("ref", ["eagle", "eagle.yaml", "graphs/eagle.yaml", "graphs/eagle"])
def test_a_shipped_graph_has_four_names(ref: str) -> None:
    program = open_graph(ref)
    assert program.graph.name == "eagle"
    assert program.source.file == "graphs/eagle.yaml", "never a path of this machine"


@pytest.mark.parametrize("ref", ["eagle.yaml", "graphs/eagle.yaml", "eagle"])
def test_an_existing_file_wins(ref: str) -> None:
    own(Path(ref), "mine")
    program = open_graph(ref)
    assert program.graph.doc == "mine" and program.source.file == ref
    assert open_graph(str(Path(ref).absolute())).graph.doc == "mine"


def test_a_missing_file_names_what_there_is() -> None:
    message = refused("graphs/bim_eagel.yaml")
    assert message.startswith("graphs/bim_eagel.yaml: file: no such file or shipped graph")
    assert "; did you mean 'bim_eagle'?; shipped are: " + ", ".join(graph_names()) in message
    assert "did you mean" not in refused("nothing/like/that")


def test_a_folder_or_a_pipe_is_no_graph_and_does_not_block() -> None:
    Path("eagle").mkdir()
    assert open_graph("eagle").graph.name == "eagle"
    Path("mine.yaml").mkdir()
    assert refused("mine.yaml") == "mine.yaml: file: this is a directory, not a file"
    assert refused(".") == ".: file: this is a directory, not a file"
    os.mkfifo("pipe.yaml")
    assert refused("pipe.yaml") == "pipe.yaml: file: this is a pipe, not a file"
    assert refused("/dev/zero") == "/dev/zero: file: this is a device or socket, not a file"


def test_a_link_that_leads_nowhere_or_back() -> None:
    Path("a.yaml").symlink_to("b.yaml")
    assert refused("a.yaml").startswith("a.yaml: file: no such file")
    Path("b.yaml").symlink_to("a.yaml")
    assert refused("a.yaml") == "a.yaml: file: the symbolic link leads back to itself"
    Path("eagle").symlink_to("nowhere")
    assert refused("eagle").startswith("eagle: file: no such file"), "not the shipped one"
    own(Path("real.yaml"), "real")
    Path("link.yaml").symlink_to("real.yaml")
    assert open_graph("link.yaml").graph.doc == "real"


def test_a_file_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    own(Path("secret.yaml"), "secret")

    def forbidden(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    assert refused("secret.yaml") == "secret.yaml: file: permission denied"


def test_odd_names() -> None:
    assert "a path cannot hold a NUL character" in refused("a\0b")
    assert "file name too long" in refused("x" * 5000)
    assert refused("").startswith("'': file: no such file") or "directory" in refused("")
    assert refused("eagle/x").startswith("eagle/x: file: no such file")


def test_bytes_that_are_no_graph_and_some_that_are() -> None:
    Path("empty.yaml").write_bytes(b"")
    Path("huge.yaml").write_bytes(b"#" * 10_000_000)
    Path("utf16.yaml").write_bytes("a: 1".encode("utf-16"))
    assert refused("empty.yaml").startswith("empty.yaml:1:1: graph: the file is empty")
    assert "at most 262144 are read" in refused("huge.yaml")
    assert refused("utf16.yaml").startswith("utf16.yaml:1:1: yaml: UTF-16")
    own(Path("w.yaml"), "windows")
    data = Path("w.yaml").read_bytes().replace(b"\n", b"\r\n")
    Path("w.yaml").write_bytes(b"\xef\xbb\xbf" + data)
    assert open_graph("w.yaml").graph.doc == "windows"


def test_only_graphs_are_listed() -> None:
    assert {"autoregressive", "batching_eagle", "bim_eagle", "bim_plain"} <= set(graph_names())
    assert all(open_source(name).data["name"] == name for name in graph_names())
