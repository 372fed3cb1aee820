"""Every example of docs/serving.md runs against a server, as it is printed."""

import json
import re
import shutil
import subprocess

import pytest
from helpers.commands import CommandLine
from helpers.pages import blocks_of, text_of
from helpers.servers import Served

PAGE = "docs/serving.md"
PYTHON = re.findall(r"^```python\n(.*?)^```", text_of(PAGE), re.M | re.S)
CURL = [one.commands for one in blocks_of(PAGE) if one.commands.startswith("curl")]


def here(text: str, served: Served) -> str:
    return text.replace("http://127.0.0.1:8000", served.url)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("commands", CURL)
def test_curl(commands: str, served: Served) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", here(commands, served)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    if done.stdout.startswith("data: "):
        assert done.stdout.endswith("data: [DONE]\n\n")
    else:
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("code", PYTHON)
def test_python(code: str, served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(here(code, served), PAGE, "exec"), {"__name__": "__main__"})
    out = capsys.readouterr().out
    assert "specsot/bim_dflash" in out and re.search(r"\d+ tokens", out)


def test_the_pages_options_and_routes_are_there(
    served: Served, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli("serve", "--help") == 0
    text = text_of(PAGE)
    table = text.partition("## Operation")[2].partition("\n\nThe engine")[0]
    options = re.findall(r"`(--[a-z-]+)", table)
    assert len(options) > 8 and [one for one in options if one not in cli.out] == []
    routes = served.http.get("/openapi.json").json()["paths"]
    named = set(re.findall(r"`(/[a-z0-9/]+)`", text)) - {"/openapi.json"}
    assert named and named <= set(routes)


def test_the_schema_says_what_is_answered(served: Served) -> None:
    document = served.http.get("/openapi.json").json()
    paths = document["paths"]
    posts = [paths[f"/v1/{name}"]["post"] for name in ("chat/completions", "completions")]
    bodies = [post["requestBody"]["content"]["application/json"]["schema"] for post in posts]
    defined = document["components"]["schemas"]
    references = set(re.findall(r'"\$ref": "([^"]*)"', json.dumps(document)))
    assert references == {f"#/components/schemas/{name}" for name in defined}
    schemas = [defined[body["$ref"].rpartition("/")[2]] for body in bodies]
    assert schemas[0]["required"] == ["messages"] and posts[0]["requestBody"]["required"]
    assert {"400", "401", "404", "413", "415", "503"} <= set(posts[0]["responses"])
    described = text_of(PAGE).partition("## Fields")[2].split("What means")[0]
    fields = set(re.findall(r"`(\w+)`", described))
    known = {name for schema in schemas for name in schema["properties"]}
    assert {"temperature", "min_tokens", "response_format", "echo"} <= fields & known
