"""What a server does when too many come, when they leave, when its engine dies, when it is told to
end: whoever is concerned is told at once, and nobody else notices."""

import asyncio
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.commands import CommandLine, ended
from helpers.servers import RAIN, Served, Visit, said, serving

from specsot.engine.prepare.options import ServeOptions
from specsot.engine.serve.server import listen

KEY = "a-secret"
JSON = {"content-type": "application/json"}
LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("strict")
    words = ("autoregressive", "--max-queue", "3", "--timeout", "60", "--shutdown-timeout", "60")
    words += ("--read-timeout", "3", "--max-tokenize", "2")
    with serving(folder, *words, SPECSOT_API_KEY=KEY) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": said(RAIN), **fields}


def ended_by(served: Served, reason: str) -> float:
    text = served.http.get("/metrics").text
    name = 'specsot:request_success_total{finished_reason="' + reason
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def idle(served: Served) -> bool:
    counts = [served.metric(f"specsot:{name}") for name in ("requests_running", "requests_waiting")]
    return sum(counts) == 0 and served.metric("specsot:kv_slots_used") == 0


def test_without_the_key_nothing_is_told(strict: Served) -> None:
    paths = ["/v1/models", "/metrics", "/ready", "/version", "/openapi.json", "/specsot/about"]
    for own in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
        with httpx.Client(base_url=strict.url, headers=own) as stranger:
            for path in (*paths, "/specsot/pictures", "/nothing"):
                got = stranger.get(path)
                assert got.status_code == 401, path
                assert got.json()["error"]["type"] == "authentication_error"
            assert stranger.post("/v1/chat/completions", json=body()).status_code == 401
            assert stranger.get("/health").status_code == 200
            assert stranger.get("/").status_code == 200
    assert [strict.http.get(path).status_code for path in paths] == [200] * len(paths)


def test_a_full_queue_says_so_at_once_and_those_inside_go_on(strict: Served) -> None:
    with ThreadPoolExecutor(3) as pool:
        inside = [
            pool.submit(strict.chat, model="autoregressive", **(LONG | {"max_tokens": 150}))
            for _ in range(3)
        ]
        strict.until(lambda: strict.metric("specsot:requests_running") == 3)
        began = time.monotonic()
        turned = strict.chat(model="autoregressive")
        assert turned.status_code == 503 and time.monotonic() - began < 2
        assert int(turned.headers["retry-after"]) > 0
        assert turned.json()["error"]["code"] == "server_overloaded"
        unread = strict.http.post("/v1/completions", content=b"{", headers=JSON)
        assert unread.status_code == 503, "nobody reads what cannot be answered"
        answers = [one.result() for one in inside]
    assert [one.json()["usage"]["completion_tokens"] for one in answers] == [150] * 3
    assert strict.chat(model="autoregressive").status_code == 200
    got = strict.chat(model="autoregressive", n=16)
    assert got.status_code == 400 and got.json()["error"]["param"] == "n", "more than have room"


def test_texts_to_tokenize_have_a_limit_of_their_own(strict: Served) -> None:
    text = {"prompt": "Honey bees live in large families. " * 5000}
    with ThreadPoolExecutor(6) as pool:
        texts = [pool.submit(strict.http.post, "/tokenize", json=text) for _ in range(6)]
        strict.until(lambda: any(one.done() for one in texts))
        assert strict.chat(model="autoregressive").status_code == 200
        responses = [one.result() for one in texts]
    assert {one.status_code for one in responses} == {200, 503}
    for refused in (one for one in responses if one.status_code == 503):
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "server_overloaded"


@pytest.mark.parametrize("part", ["head", "body"])
def test_who_sends_slowly_is_turned_away(strict: Served, part: str) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    if part == "body":
        head += "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    began = time.monotonic()
    with socket.create_connection(strict.address) as pipe:
        pipe.sendall(head.encode())
        pipe.settimeout(0.2)
        got = b""
        while not got and time.monotonic() - began < 15:
            pipe.sendall(b"a")
            with suppress(TimeoutError):
                got = pipe.recv(4096)
        pipe.settimeout(5)
        while more := pipe.recv(4096):  # the head and the body need not come together
            got += more
    assert got.startswith(b"HTTP/1.1 408 ") and time.monotonic() - began < 10
    assert json.loads(got.rpartition(b"\r\n\r\n")[2])["error"]["message"]
    assert strict.http.get("/ready").status_code == 200


def test_who_leaves_is_cancelled_and_leaves_nothing(strict: Served) -> None:
    before = ended_by(strict, "stop") + ended_by(strict, "length")
    with pytest.raises(httpx.ReadTimeout):
        strict.http.post("/v1/chat/completions", json=body(**LONG), timeout=0.4)
    strict.until(lambda: idle(strict), 10)
    assert ended_by(strict, "stop") + ended_by(strict, "length") == before
    with strict.http.stream("POST", "/v1/chat/completions", json=body(**LONG, stream=True)) as one:
        next(one.iter_lines())
    strict.until(lambda: idle(strict), 10)


def test_an_abort_storm_leaves_nothing(served: Served) -> None:
    draw = random.Random(7)

    def storm(number: int) -> None:
        fields = {"model": draw.choice(("bim_dflash", "dflash")), **LONG, "stream": True}
        data = json.dumps(body(**fields)).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
        )
        with socket.create_connection(served.address) as pipe:
            pipe.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + data)
            time.sleep(draw.random() * 0.3)

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(storm, range(24)))
    served.until(lambda: idle(served), 30)
    assert served.chat().status_code == 200


def test_a_request_whose_time_is_up_ends(strict: Served) -> None:
    soon = {"specsot": {"timeout": 0.3}}
    got = strict.chat(model="autoregressive", **LONG, **soon)
    assert got.status_code == 504 and got.json()["error"]["type"] == "timeout_error"
    chunks = strict.stream(**body(**LONG, **soon))
    assert chunks[-2]["error"]["type"] == "timeout_error" and chunks[-1] == "[DONE]"


def test_the_page_asks_for_the_key(browser: Any, strict: Served) -> None:
    visit = Visit(browser, strict.url, 800, 600, "light")
    visit.page.wait_for_selector("#keyfield:not([hidden])")
    visit.page.fill("#key", KEY)
    visit.page.keyboard.press("Tab")
    visit.until("document.getElementById('graph').options.length == 1")
    visit.page.fill("#budget", "8")
    visit.page.click("#go")
    visit.until("document.querySelectorAll('.branch .t').length > 3")
    assert visit.strangers == []
    visit.page.close()


def test_nothing_waits_for_acknowledgements() -> None:
    listener = listen(ServeOptions(port=0))
    listener.listen()

    async def set_on_ours() -> int:
        ours: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda _, pipe: ours.set_result(pipe), sock=listener)
        async with server:
            _, theirs = await asyncio.open_connection(*listener.getsockname())
            pipe = (await ours).get_extra_info("socket")
            found = pipe.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            theirs.close()
            (await ours).close()
        return int(found)

    with ThreadPoolExecutor(1) as pool:  # a browser has a loop in this thread
        assert pool.submit(asyncio.run, set_on_ours()).result(10) == 1


def test_a_killed_engine_is_told_of_at_once_and_comes_back(strict: Served) -> None:
    text = strict.chat(model="autoregressive").json()["choices"]
    told: list[Any] = []
    threads = [
        threading.Thread(target=lambda: told.append(strict.stream(**body(**LONG)))),
        threading.Thread(target=lambda: told.append(strict.chat(**LONG, model="autoregressive"))),
    ]
    for one in threads:
        one.start()
    strict.until(lambda: strict.metric("specsot:requests_running") == 2)
    os.kill(strict.engine_pid(), signal.SIGKILL)
    began = time.monotonic()
    for one in threads:
        one.join(5)
        assert not one.is_alive(), "nobody waits for what is gone"
    assert time.monotonic() - began < 3
    stream = next(one for one in told if isinstance(one, list))
    assert stream[-2]["error"]["code"] == "engine_dead" and stream[-1] == "[DONE]"
    whole = next(one for one in told if not isinstance(one, list))
    assert whole.status_code == 503 and whole.headers["retry-after"]
    meanwhile = strict.chat(model="autoregressive")
    assert meanwhile.status_code == 503 and strict.http.get("/ready").status_code == 503
    strict.until(lambda: strict.http.get("/ready").status_code == 200, 60)
    assert strict.http.get("/health").status_code == 200
    assert strict.chat(model="autoregressive").json()["choices"] == text


def test_sigterm_lets_open_requests_end(strict: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        fields = body(max_tokens=250, ignore_eos=True, stream_options={"include_usage": True})
        open_one = pool.submit(strict.stream, **fields)
        strict.until(lambda: strict.metric("specsot:requests_running") == 1)
        engine = strict.engine_pid()
        strict.process.send_signal(signal.SIGTERM)
        strict.until(lambda: strict.http.get("/ready").json()["status"] == "draining")
        assert strict.chat(model="autoregressive").status_code == 503
        chunks = open_one.result(60)
    assert chunks[-2]["usage"]["completion_tokens"] == 250
    assert strict.process.wait(15) == 0 and "Traceback" not in strict.told
    strict.until(lambda: not Path(f"/proc/{engine}").exists(), 5)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("nobody",), 3, "nobody"),
        (("dflash", "dflash"), 2, "named twice"),
        (("dflash", "--set", "drafter.block_sze=4"), 3, "block_sze"),
        (("dflash", "--host", "0.0.0.0"), 2, "--api-key"),
        (("dflash", "--metrics-compat", "sglang"), 2, "vllm"),
    ],
)
def test_what_cannot_be_served_is_told_in_a_line(
    words: tuple[str, ...], code: int, said: str, here: Path, cli: CommandLine
) -> None:
    assert cli("serve", *words) == code and said in cli.err


def test_what_a_server_lacks_is_told_in_a_line(served: Served, tmp_path: Path) -> None:
    """In processes of their own: a browser has a loop in this thread."""
    words = ("serve", "autoregressive", "--model", "/nowhere", "--port", "0")
    assert "/nowhere" in ended(words, tmp_path, {}, code=4).stderr
    words = ("serve", "dflash", "--port", str(served.address[1]))
    assert "in use" in ended(words, tmp_path, {}, code=2).stderr


# -- a step of the engine fails, or its numbers are none -------------------------------------------

RAISES, NO_NUMBERS, HANGS, SEVERAL = 11, 13, 17, 5
BREAKING = f'''"""An op that breaks the first step of prompts with certain tokens."""

from time import sleep

from torch import Tensor

from specsot.ops.registry import op
from specsot.ops.types import Rows


@op("breaking.step_")
def step_(rows: Rows, logits: Tensor) -> None:
    """A prompt with several of one token raises, one with several of another has no numbers, and
    one of a third takes seconds."""
    if (rows.tokens_BQ == {RAISES}).sum() >= {SEVERAL}:
        raise RuntimeError("a step broke")
    if (rows.tokens_BQ == {NO_NUMBERS}).sum() >= {SEVERAL}:
        logits.fill_(float("nan"))
    if (rows.tokens_BQ == {HANGS}).sum() >= {SEVERAL}:
        sleep(4)
'''


@pytest.fixture(scope="module")
def breaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("breaking")
    machine = files("specsot").joinpath("graphs/machines/decode.yaml").read_text(encoding="utf-8")
    broken = machine.replace(
        "target.forward_, branch.root,", "target.forward_, breaking:step_, branch.root,"
    )
    assert broken != machine
    (folder / "fragile.yaml").write_text(broken.replace("name: decode", "name: fragile"))
    (folder / "breaking.py").write_text(BREAKING)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    words = ("fragile.yaml", "--hang", "3", "--step-limit", "1", "--shutdown-timeout", "0.5")
    with serving(folder, *words, PYTHONPATH=path) as server:
        yield server
        assert server.process.poll() in (None, 0) and "Traceback" not in server.told


@pytest.mark.parametrize(("token", "why"), [(RAISES, "a step broke"), (NO_NUMBERS, "not numbers")])
def test_who_fails_is_told_why_and_others_are_answered(
    breaking: Served, token: int, why: str
) -> None:
    wanted = breaking.chat(RAIN, "fragile").json()["choices"][0]["message"]["content"]
    prompt = [5, *[token] * SEVERAL, 6]
    response = breaking.complete(prompt, "fragile", max_tokens=4)
    assert response.status_code == 500, response.text
    error = response.json()["error"]
    assert why in error["message"] and "Traceback" not in response.text
    *chunks, last = breaking.stream("/v1/completions", model="fragile", prompt=prompt, max_tokens=4)
    assert last == "[DONE]" and why in chunks[-1]["error"]["message"]
    again = breaking.chat(RAIN, "fragile").json()["choices"][0]["message"]["content"]
    assert again == wanted and breaking.http.get("/health").status_code == 200


def test_a_step_that_hangs_is_noticed(breaking: Served) -> None:
    prompt = [5, *[HANGS] * SEVERAL, 6]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(breaking.complete, prompt, "fragile", max_tokens=4)
        breaking.until(lambda: breaking.http.get("/ready").json()["status"] == "hung")
        assert breaking.http.get("/health").status_code == 503
        assert breaking.chat(RAIN, "fragile").status_code == 503
        assert answer.result().status_code == 200
    breaking.until(lambda: breaking.http.get("/ready").status_code == 200)
    assert "has made no progress for" in breaking.told and "answers again" in breaking.told
    assert "has not answered" not in breaking.told, "heartbeats come during a step"
    assert "started again" not in breaking.told and breaking.chat(RAIN, "fragile").json()["choices"]


def test_answers_that_sighup_cuts_off_say_so(breaking: Served) -> None:
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(breaking.stream, **body(**LONG)) for _ in range(7)]
        whole = pool.submit(breaking.chat, model="fragile", **LONG)
        breaking.until(lambda: breaking.metric("specsot:requests_open") == 8)
        breaking.process.send_signal(signal.SIGHUP)
        for stream in streams:
            *_, last, end = stream.result()
            assert last["error"]["code"] == "shutting_down" and end == "[DONE]"
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "shutting_down"
    assert breaking.process.wait(15) == 0
