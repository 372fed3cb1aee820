"""The packages of examples/, drafters and an op, installed as a user would."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specsot.states.graph.plugins import PLUG_INS

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_drafter"
EAGLE1 = ROOT / "examples" / "eagle1"
LEFT_OUT = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
RUN = """
import sys
from specsot.engine.cli.main import main
words = " ".join(sys.argv[1:])
for command in words.split(" then "):
    try:
        main(command.split())
    except SystemExit as ended:
        if ended.code:
            raise
"""
LOADED = """
import sys
from specsot.engine.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("loaded:", sorted({"torch", "own_drafter", "own_drafter.ops"} & sys.modules.keys()))
"""
SPECSOT = [place for place in sys.path if (Path(place) / "specsot").is_dir()]
ECHO = ("--set", "drafter.kind=echo")
LENGTHS = ROOT / "examples" / "draft_lengths"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("examples")
    examples = (EXAMPLE, EAGLE1, LENGTHS)
    sources = [work / example.name for example in examples]
    for example, source in zip(examples, sources, strict=True):
        shutil.copytree(example, source, ignore=LEFT_OUT)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    target = work / "site"
    subprocess.run([*pip, *offline, "--target", str(target), *map(str, sources)], check=True)
    return target


def call(site: Path, program: str, *words: str, code: int = 0) -> str:
    path = os.pathsep.join([str(site), *SPECSOT])
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=site.parent,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_its_code_fits_on_a_screen() -> None:
    lines = [
        line
        for path in (EXAMPLE / "src").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    assert sum(bool(line.strip()) for line in lines) <= 50


@pytest.mark.parametrize(
    "graph", [(str(EXAMPLE / "echo.yaml"),), ("bim_plain", *ECHO)], ids=["own", "shipped"]
)
def test_check_imports_its_block_alone(graph: tuple[str, ...], site: Path) -> None:
    assert call(site, LOADED, "check", *graph).endswith("loaded: ['own_drafter']\n")


def test_check_of_what_ships_imports_nothing_of_it(site: Path) -> None:
    assert call(site, LOADED, "check").endswith("loaded: []\n")


def test_show_says_where_its_functions_stand(site: Path) -> None:
    text = call(site, RUN, "show", str(EXAMPLE / "echo.yaml"), "--resolved")
    assert "own_drafter.ops.count_drafts(" in text


def test_they_draft_and_change_no_token(site: Path) -> None:
    """Without a drafter, then with the example's, in runs of one process."""
    echo = str(EXAMPLE / "echo.yaml")
    cases = [(echo, "none", "bim"), (echo, "echo", "bim"), (echo, "echo", "batching")]
    cases += [("eagle2", "none", "bim"), ("eagle2", "eagle1", "bim")]
    cases += [("bim_vanilla", "none", "bim"), ("bim_vanilla", "adaptive", "bim")]
    words = "--no-tui --threads 1 --max-new-tokens 24 --set drafter.kind={} --set layout.kind={}"
    runs = [f"run {graph} {words.format(kind, layout)}" for graph, kind, layout in cases]
    text = call(site, RUN, " then ".join(runs))
    digests = re.findall(r"digest (\w+)", text)
    assert len(digests) == 7
    assert len({*digests[:3]}) == len({*digests[3:5]}) == len({*digests[5:]}) == 1
    accepted = [int(share) > 0 for share in re.findall(r"acceptance (\d+) %", text)]
    assert accepted == [kind != "none" for _, kind, _ in cases]
    manifests = sorted((site.parent / "runs").glob("*/manifest.json"), key=os.path.getmtime)
    versions = [json.loads(manifest.read_text())["versions"] for manifest in manifests]
    assert versions[2]["own-drafter"] and versions[4]["specsot-eagle1"]
    assert versions[6]["specsot-draft-lengths"]


@pytest.mark.parametrize(("kind", "folder"), PLUG_INS.items())
def test_a_graph_of_a_plug_in_without_its_package_names_it(
    kind: str, folder: str, tmp_path: Path
) -> None:
    empty = tmp_path / "site"
    empty.mkdir()
    text = call(empty, RUN, "check", "eagle2", "--set", f"drafter.kind={kind}", code=3)
    message = f"the drafter '{kind}' is a plug-in: pip install ./{folder} [G106]"
    assert f"--set drafter.kind={kind}: drafter: {message}" in text


def test_the_op_and_the_policy_of_the_page_run_as_printed(site: Path) -> None:
    page = (ROOT / "docs" / "adding.md").read_text()
    op, policy = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert '@op("mask.count"' in op and "policy = Policy(" in policy
    package = site / "my_package"
    package.mkdir()
    for name, source in (("__init__", ""), ("masks", op), ("policies", policy)):
        (package / f"{name}.py").write_text(source)
    info = site / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    points = re.findall(r'^(\[project.entry-points."specsot.policies"\])\n(.*)$', page, re.M)
    (line,) = [line.replace('"', "") for _, line in points]
    (info / "entry_points.txt").write_text(f"[specsot.policies]\n{line}\n")
    (named,) = re.findall(r"^    (ops: \[mask.build, my_package.*?\])", page, re.M)
    graph = (ROOT / "graphs" / "machines" / "decode.yaml").read_text()
    ops = named.removeprefix("ops: [").removesuffix("]")
    (site.parent / "counting.yaml").write_text(graph.replace("mask.build, plan", f"{ops}, plan"))
    words = ("run", "counting.yaml", "--no-tui", "--threads", "1", "--max-new-tokens", "2", "Hi")
    text = call(site, RUN, *words, "--set", "scheduler.policy=shortest_prompt")
    assert "answer: 2 tokens" in text


def test_its_fault_is_its_own(site: Path) -> None:
    (site / "broken_op.py").write_text(
        "from specsot.ops.registry import op\n\n"
        '@op("broken.op")\ndef fail(kv: object) -> None:\n    raise ZeroDivisionError("oh")\n'
    )
    graph = (ROOT / "graphs" / "machines" / "decode.yaml").read_text()
    graph = graph.replace("ops: [answer.merge]", "ops: ['broken_op:fail', answer.merge]")
    (site.parent / "broken.yaml").write_text(graph)
    words = ("run", "broken.yaml", "--no-tui", "--threads", "1", "--max-new-tokens", "2", "Hi")
    text = call(site, RUN, *words, code=1)
    assert "in op 'broken.op' of state 'merge': ZeroDivisionError: oh" in text
    assert f"this is a fault of broken_op ({site / 'broken_op.py'}:5); see" in text
    assert "Traceback" not in text


def test_a_fault_of_a_drafter_is_its_own(site: Path, tmp_path: Path) -> None:
    source = (EXAMPLE / "src" / "own_drafter" / "drafter.py").read_text().split("\n")
    at = next(number for number, line in enumerate(source) if "def grow(" in line) + 1
    source.insert(at, "        len(3)")
    own = tmp_path / "site"
    shutil.copytree(site, own)
    file = own / "own_drafter" / "drafter.py"
    file.write_text("\n".join(source))
    words = ("run", "bim_plain", *ECHO, "--no-tui", "--threads", "1", "--max-new-tokens", "2", "Hi")
    text = call(own, RUN, *words, code=1)
    assert "of state 'grow_tree': TypeError: object of type 'int' has no len()" in text
    assert f"this is a fault of own_drafter ({file}:{at + 1}); see" in text
