"""The page in a real browser: an answer as it grows, two graphs in a race, a recorded run. The page
asks only its server, and the console is empty."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from helpers.servers import BEES, Served, Visit

from specsot.engine.cli.run_command import run_command
from specsot.engine.prepare.options import RunOptions
from specsot.engine.serve.app import add_error_handlers, add_page_routes, page_files


def test_the_files_ask_nobody_else() -> None:
    files = page_files()
    assert {"index.html", "style.css", "app.js"} <= set(files)
    for name, (body, _) in files.items():
        text = body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and "//cdn" not in text, name
        assert "innerHTML" not in text and "eval(" not in text, "texts are texts"
        assert " style=" not in text and " onclick=" not in text, "the policy forbids both"


def test_files_are_given_and_nothing_else(served: Served) -> None:
    page = served.http.get("/")
    assert (
        page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    )
    for name in ("app.js", "style.css", "icon.svg"):
        assert served.http.get(f"/page/{name}").status_code == 200
    for name in ("../app.py", "%2e%2e/routes.py", "..%2froutes.py", "nobody.js", "%00"):
        assert served.http.get(f"/page/{name}").status_code == 404


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    options = RunOptions("bim_dflash", prompt=BEES, max_new_tokens=24, quiet=True)
    assert run_command(replace(options, runs_dir=folder / "runs")) == 0
    return folder


@pytest.fixture(scope="module")
def viewer(kept: Path) -> Iterator[str]:
    """`specsot view` of that run."""
    process = subprocess.Popen(
        [sys.executable, "-m", "specsot", "view", "runs/latest", "--port", "0"],
        cwd=kept,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "is shown at http" in line, line
    yield line.split(" at ")[1].split()[0]
    process.terminate()
    process.wait(10)


def test_a_run_is_given_frame_by_frame(viewer: str, kept: Path) -> None:
    about = httpx.get(f"{viewer}/specsot/about").json()
    assert (about["live"], about["graphs"], len(about["runs"])) == (False, [], 1)
    run = httpx.get(f"{viewer}/specsot/runs/{about['runs'][0]}").json()
    frames = run["frames"]
    assert frames[0]["t"] <= frames[-1]["t"] and frames[-1]["state"] == "done"
    assert {one["state"] for one in frames} <= set(run["graph"]["states"])
    texts: dict[int, str] = {}
    titles: list[str] = []
    for frame in frames:
        for _, name, branch, more in frame["events"]:
            if name == "outline":
                titles = more
            if name == "wrote":
                texts[branch] = texts.get(branch, "") + "".join(piece for piece, _ in more)
    (folder,) = [one for one in (kept / "runs").iterdir() if not one.is_symlink()]
    text = json.loads((folder / "outputs.jsonl").read_text().splitlines()[0])["text"]
    assert any(event[1] == "rejected" for frame in frames for event in frame["events"])
    assert len(titles) > 1 and all(title in text for title in titles)
    assert all(texts[at].strip() in text for at in range(len(titles)))
    assert max(frame["used"] for frame in frames) > 0
    assert any(code >= 8 for frame in frames for code, _ in frame["runs"])
    assert httpx.get(f"{viewer}/specsot/runs/nobody").status_code == 404
    assert httpx.get(f"{viewer}/v1/models").status_code == 404


def test_a_run_folder_that_cannot_be_read_stops_no_request(kept: Path, tmp_path: Path) -> None:
    runs = shutil.copytree(kept / "runs", tmp_path / "runs", symlinks=True)
    (folder,) = [one for one in runs.iterdir() if not one.is_symlink()]
    (folder / "trace.jsonl").unlink()
    os.mkfifo(folder / "trace.jsonl")
    app = FastAPI()
    add_error_handlers(app)
    add_page_routes(app, None, runs)

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
            paths = (f"/specsot/runs/{folder.name}", "/specsot/about")
            return await asyncio.gather(*map(client.get, paths))

    broken, about = asyncio.run(ask())
    assert broken.status_code == 400 and "not a regular file" in broken.text
    assert about.json()["runs"] == [folder.name]
    (folder / "trace.jsonl").unlink()
    with (folder / "trace.jsonl").open("wb") as large:
        large.truncate(129 << 20)
    broken, _ = asyncio.run(ask())
    assert broken.status_code == 400 and "at most 128 MiB" in broken.text


@pytest.mark.parametrize(("width", "height", "scheme"), [(1280, 800, "light"), (390, 844, "dark")])
def test_two_graphs_race(
    browser: Any, served: Served, width: int, height: int, scheme: str
) -> None:
    visit = Visit(browser, served.url, width, height, scheme)
    page = visit.page
    visit.until("document.getElementById('status').textContent.includes('graphs')")
    assert "Every token is the model's own." in page.inner_text("#intro")
    assert page.input_value("#prompt") == BEES
    assert page.input_value("#graph") == "bim_dflash"
    assert page.input_value("#other") == "autoregressive"
    visit.shot(f"start_{width}")
    page.fill("#budget", "40")
    page.keyboard.press("Tab")
    page.select_option("#speed", "0.25")
    page.click("#go")
    visit.until("document.querySelectorAll('.outlined .part').length > 2")
    visit.until("[...document.querySelectorAll('.part del')].some((one) => one.offsetWidth)")
    assert page.locator(".plain .part").count() == 1, "both graphs decode at once"
    visit.until("document.querySelectorAll('svg.machine .lit').length == 1")
    titles = page.locator("ol.outline li").all_inner_texts()
    assert titles and not any("|" in title for title in titles)
    assert page.is_hidden(".raw") and "|" in str(page.text_content(".raw"))
    heights = "[...document.querySelectorAll('.part')].map((one) => one.offsetHeight).join()"
    begun = page.evaluate(heights)
    if width > 1000:
        for name in (".part", "#machine", "#strip", "#bar", "#striplegend", "#verdict"):
            box = page.locator(name).first.bounding_box()
            assert box is not None and box["y"] + box["height"] <= height, name
    else:
        scrolls = "[...document.querySelectorAll('main :not(textarea)')].filter((one) => "
        scrolls += "/auto|scroll/.test(getComputedStyle(one).overflow))"
        assert page.evaluate(f"{scrolls}.length") == 0
    visit.shot(f"live_{width}")
    counts = [page.locator(".outlined .t").count()]
    page.click("#play")
    page.wait_for_timeout(300)
    before = page.inner_text("#where").partition(" of ")[0]
    page.click("#forth")
    assert int(page.inner_text("#where").partition(" of ")[0]) == int(before) + 1
    visit.until("document.getElementById('status').textContent == 'answered'", 60)
    page.select_option("#speed", "4")
    page.click("#play")
    visit.until("/fast per token as .*; its answer is .* long/.test(verdict.textContent)")
    counts.append(page.locator(".outlined .t").count())
    assert counts[0] < counts[1], "it grew while it was looked at"
    assert page.locator(".raw .t.d").count() > 0
    assert page.locator(".part del:visible").count() == 0
    assert width < 1000 or page.evaluate(heights) == begun, "boxes keep their height"
    page.check("#rejects")
    assert page.locator(".part del:visible").count() > 0
    page.uncheck("#rejects")
    page.click("#numbers summary")
    assert page.locator("#table tr").count() == 8
    assert "slots in use" in page.inner_text("#memorytext")
    assert "0 running" in page.inner_text("#memorytext")
    visit.shot(f"answer_{width}")
    assert visit.layout_shift() < 0.1
    visit.clean()
    page.close()


def test_what_of_a_prompt_was_reused_is_seen(browser: Any, served: Served) -> None:
    visit = Visit(browser, served.url, 1280, 800, "light")
    page = visit.page
    visit.until("document.getElementById('status').textContent.includes('graphs')")
    page.click("#more summary")
    rain = "Rain falls from clouds. The water comes from the sea, and the wind carries it. " * 4
    bees = "A bee visits many flowers on a warm day. It carries nectar to the hive. " * 4
    page.fill("#documents", f"{rain}\n\n{bees}")
    page.fill("#prompt", "Where does rain come from?")
    page.select_option("#graph", "blend_eagle")
    page.select_option("#other", "")
    page.fill("#budget", "24")
    page.click("#go")
    visit.until("document.querySelectorAll('.read .r').length > 0")
    assert page.locator(".read .c").count() > 0 and "warm day" in page.inner_text(".read")
    visit.until("document.getElementById('status').textContent == 'answered'")
    visit.until("document.getElementById('memorytext').textContent.includes('0 running')", 5)
    visit.shot("reused")
    visit.clean()
    page.close()


def test_a_kept_run_is_scrubbed(browser: Any, viewer: str) -> None:
    visit = Visit(browser, viewer, 1280, 800, "dark")
    page = visit.page
    page.wait_for_selector("#at:not([disabled])")
    assert page.is_hidden("#ask")
    last = int(page.get_attribute("#at", "max"))
    page.evaluate(f"at.value = {last}; at.dispatchEvent(new Event('input'))")
    whole = page.inner_text("#answers")
    assert page.locator(".part del").count() > 0
    page.evaluate(f"at.value = {last // 2}; at.dispatchEvent(new Event('input'))")
    half = page.inner_text("#answers")
    assert len(half) < len(whole) and f"{last // 2 + 1} of {last + 1}" in page.inner_text("#where")
    visit.shot("playback")
    page.focus("#at")
    page.keyboard.press("ArrowRight")
    assert page.input_value("#at") == str(last // 2 + 1)
    page.click("#back")
    page.click("#back")
    page.click("#forth")
    assert page.inner_text("#answers") == half
    page.select_option("#speed", "4")
    page.click("#play")
    visit.until(f"document.getElementById('at').value == '{last}'")
    assert page.inner_text("#answers") == whole
    visit.clean()
    page.close()
