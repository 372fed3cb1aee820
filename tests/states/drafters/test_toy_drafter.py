"""A drafter that a package adds with one file and a graph: it drafts, and no token changes."""

import pytest
from helpers.toy_graph import Write, install

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.api import open_session, token_digest
from specsot.engine.run.runner import perform

PROMPT = Prompt("1", "Tell me about honey bees.")
DRAFTER = '''\
from typing import Literal

from specsot.states.drafter import Drafter
from specsot.states.graph.drafter_settings import DrafterSettings
from specsot.states.yaml.spec import Int


class ToySettings(DrafterSettings):
    kind: Literal["toy"]
    num_draft_tokens: Int = 3


class ToyDrafter(Drafter):
    """Drafts the tokens behind the last earlier occurrence of a branch's last token."""

    Settings = ToySettings

    def grow(self, frontier):
        from specsot.ops.draft.proposals import HostTree, pack

        trees = []
        for branch in frontier:
            ids = branch.context()
            places = [place for place, token in enumerate(ids[:-1]) if token == ids[-1]]
            count = self.settings.num_draft_tokens
            tokens = tuple(ids[places[-1] + 1 :][:count]) if places else ()
            depths = tuple(range(1, len(tokens) + 1))
            parents = tuple(depth - 2 for depth in depths)
            trees.append(HostTree(tokens, parents, depths, (0.0,) * len(tokens)))
        return pack(trees, self.context.layout.device)
'''
GRAPH = (
    "extends: bim_plain\nname: toy\ndoc: A toy drafts.\ndrafter: {kind: toy, num_draft_tokens: 4}\n"
)


def decoded(graph: str, *sets: str) -> tuple[str, int]:
    session = open_session(graph, sets=sets, threads=1, max_new_tokens=16)
    run, recorder, _ = perform(session, [PROMPT])
    return token_digest(run.answers), recorder.meter.accepted


@pytest.mark.parametrize("layout", ["bim", "batching"])
def test_a_drafter_is_one_file_and_a_graph(layout: str, write: Write) -> None:
    folder = write({"own_toy": DRAFTER})
    install(folder, "specsot.drafters", "own_toy:ToyDrafter", point="toy")
    graph = folder / "toy.yaml"
    graph.write_text(GRAPH)
    added = [file for file in folder.rglob("*") if file.suffix in (".py", ".yaml")]
    assert sorted(map(str, added)) == [str(folder / "own_toy.py"), str(folder / "toy.yaml")]
    kind = f"layout.kind={layout}"
    digest, accepted = decoded(str(graph), kind)
    assert accepted > 0
    assert (digest, 0) == decoded("bim_plain", kind, "drafter.kind=none")


def test_a_drafter_without_grow_is_an_error_and_not_plain_decoding(write: Write) -> None:
    text = DRAFTER[: DRAFTER.index("    def grow")].replace("toy", "mute")
    folder = write({"own_mute": text})
    install(folder, "specsot.drafters", "own_mute:ToyDrafter", point="mute")
    graph = folder / "mute.yaml"
    graph.write_text("extends: bim_plain\nname: mute\ndoc: No drafts.\ndrafter: {kind: mute}\n")
    with pytest.raises(NotImplementedError, match="ToyDrafter drafts, but has no method `grow`"):
        decoded(str(graph))
