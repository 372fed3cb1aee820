"""Attacks on a real server: idle connections, floods of texts to tokenize, a stopped engine,
clients that read nothing. Another client's requests must go on."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from threading import Event
from time import monotonic

import httpx
from helpers.servers import RAIN, Served, said, serving

GRAPH = "autoregressive"
NUM_IDLE = 1_100
Report = Callable[[str], None]
OTHERS = 100  # seconds that an attack lasts at most


def _open_files(served: Served) -> int:
    return len(os.listdir(f"/proc/{served.process.pid}/fd"))


def _health(served: Served, patience: float = 60.0) -> float:
    """Seconds of `/health` over a new connection."""
    start = monotonic()
    assert httpx.get(f"{served.url}/health", timeout=patience).status_code == 200
    return monotonic() - start


def _connect(served: Served, stack: ExitStack) -> socket.socket:
    pipe = stack.enter_context(socket.socket())
    pipe.settimeout(10)
    pipe.connect(served.address)
    return pipe


def _under_idle_connections(folder: Path, descriptors: int, idle: int) -> tuple[float, int]:
    """The longest seconds of `/health` while there are idle connections, and bytes of the log."""
    with serving(folder, GRAPH, descriptors=descriptors) as served, ExitStack() as stack:
        for _ in range(idle):
            _connect(served, stack)
        longest = max(_health(served) for _ in range(5))
        assert served.chat(model=GRAPH).status_code == 200
        stack.close()
        assert served.chat(model=GRAPH).status_code == 200 and _health(served) < 2
        assert served.end() == 0
        return longest, served.log.stat().st_size


def test_1100_idle_connections(tmp_path: Path, report: Report) -> None:
    longest, size = _under_idle_connections(tmp_path, 1024, NUM_IDLE)
    report(f"1,100 idle connections, 1,024 descriptors: /health {longest:.2f} s, log {size} bytes")
    assert longest < 2 and size < 2_000


def test_idle_connections_with_few_descriptors(tmp_path: Path, report: Report) -> None:
    longest, size = _under_idle_connections(tmp_path, 64, 200)
    report(f"200 idle connections, 64 descriptors: /health {longest:.2f} s, log {size} bytes")
    assert longest < 2 and size < 2_000


def _first_token(served: Served) -> float:
    """Seconds until the first token of a stream."""
    body = {"model": GRAPH, "messages": said(RAIN), "max_tokens": 4, "stream": True}
    start = monotonic()
    with httpx.stream(
        "POST", f"{served.url}/v1/chat/completions", json=body, timeout=OTHERS
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if (
                line.startswith("data: {")
                and '"content": "' in line
                and '"content": ""' not in line
            ):
                break
    return monotonic() - start


@contextmanager
def _flood(served: Served, path: str, body: bytes, clients: int) -> Iterator[list[int]]:
    """Clients that send a body again and again; the statuses that they get."""
    statuses = list[int]()
    over = Event()

    def send() -> None:
        kind = {"content-type": "application/json"}
        with httpx.Client(base_url=served.url, timeout=OTHERS) as client:
            while not over.is_set():
                got = client.post(path, content=body, headers=kind)
                statuses.append(got.status_code)
                if got.status_code != 200:
                    assert got.headers["retry-after"]
                    over.wait(0.2)

    with ThreadPoolExecutor(clients) as pool:
        sending = [pool.submit(send) for _ in range(clients)]
        try:
            yield statuses
        finally:
            over.set()
    for one in sending:
        one.result()


def test_a_flood_of_texts_to_tokenize(tmp_path: Path, report: Report) -> None:
    text = ("Honey bees live in large families. " * 6_000)[:196_000]
    with serving(tmp_path, GRAPH, "--max-queue", "16") as served:
        _first_token(served)
        alone = median(_first_token(served) for _ in range(5))
        ids = served.ids(text[:20_000]) * 4
        for path, fields in (("/tokenize", {"prompt": text}), ("/detokenize", {"tokens": ids})):
            body = json.dumps(fields).encode()
            for clients in (4, 20):
                with _flood(served, path, body, clients) as statuses:
                    time.sleep(2)
                    flooded = sorted(_first_token(served) for _ in range(8))
                good = statuses.count(200)
                report(
                    f"{path}, {clients} clients of {len(body)} bytes: {good} of {len(statuses)} "
                    f"answered; first token {alone:.3f} s alone, {median(flooded):.3f} s median, "
                    f"{flooded[-1]:.3f} s at most"
                )
                assert set(statuses) <= {200, 503} and good
                assert median(flooded) < max(20 * alone, 1.0)
        assert "Traceback" not in served.told


def test_a_stopped_engine(tmp_path: Path, report: Report) -> None:
    words = ["--hang", "3", "--kill-after", "6"]
    with serving(tmp_path, GRAPH, *words) as served:
        before = served.chat(model=GRAPH).json()["choices"]
        first = served.engine_pid()
        os.kill(first, signal.SIGSTOP)
        start = monotonic()
        response = served.chat(model=GRAPH, specsot={"timeout": 2})
        answered = monotonic() - start
        assert response.status_code == 504, response.text
        served.until(lambda: served.http.get("/ready").status_code == 503)
        noticed = monotonic() - start
        assert served.http.get("/health").status_code == 503
        served.until(lambda: served.http.get("/ready").status_code == 200, OTHERS)
        back = monotonic() - start
        report(
            f"SIGSTOP: timeout 2 answered after {answered:.1f} s, 503 after {noticed:.1f} s, "
            f"ready again after {back:.1f} s"
        )
        assert answered < 5 and noticed < 8
        assert served.engine_pid() != first and served.chat(model=GRAPH).json()["choices"] == before
        # An engine that goes on in time is not killed.
        second = served.engine_pid()
        os.kill(second, signal.SIGSTOP)
        served.until(lambda: served.http.get("/ready").status_code == 503)
        os.kill(second, signal.SIGCONT)
        served.until(lambda: served.http.get("/ready").status_code == 200, 5)
        assert served.engine_pid() == second
        assert served.chat(model=GRAPH).json()["choices"] == before


def test_unread_whole_answers(tmp_path: Path, report: Report) -> None:
    fields = {"logprobs": True, "top_logprobs": 20, "n": 4, "max_tokens": 190, "ignore_eos": True}
    data = json.dumps({"model": GRAPH, "messages": said(RAIN), **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
    with serving(tmp_path, GRAPH, "--write-timeout", "5") as served, ExitStack() as stack:
        size = len(served.chat(model=GRAPH, **fields).content)
        idle = _open_files(served)
        for _ in range(20):
            pipe = stack.enter_context(socket.socket())
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            pipe.connect(served.address)
            pipe.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + data)
        served.until(lambda: _open_files(served) >= idle + 20)
        served.until(lambda: served.metric("specsot:requests_open") == 0, 300)
        start = monotonic()
        served.until(lambda: _open_files(served) <= idle, 60)
        seconds = monotonic() - start
        report(f"20 unread answers of {size} bytes: closed {seconds:.1f} s after the last one")
        assert seconds < 20 and served.chat(model=GRAPH).status_code == 200
