"""Every bad request gets its status, OpenAI's shape and the field to blame; the server lives."""

import json
import random
import time
from typing import Any

import pytest
from helpers.servers import Served, said

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DEEP = b'{"messages":' + b"[" * 100_000
NUMBER = b'{"model":"dflash","prompt":"a","seed":' + b"9" * 5000 + b"}"
LONG = "x" * 65


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "dflash", "messages": said("Hi"), "max_tokens": 2, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "dflash", "prompt": "Hi", "max_tokens": 2, **fields}


# request, the status that is expected, the field that is named
ROWS: list[tuple[str, Any, int, str | None]] = [
    (CHAT, b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}', 400, "temperature"),
    (CHAT, b'{"messages":[{"role":"user","content":"a"}],"temperature":1e999}', 400, "temperature"),
    (CHAT, b'{"messages":[{"role":"user","content":"a"}],"top_p":Infinity}', 400, "top_p"),
    (CHAT, chat(n=True), 400, "n"),
    (CHAT, chat(n="5"), 400, "n"),
    (CHAT, chat(n=1000), 400, "n"),
    (CHAT, chat(n=1.5), 400, "n"),
    (CHAT, chat(n=0), 400, "n"),
    (CHAT, chat(seed=10**26), 400, "seed"),
    (CHAT, chat(seed=-(2**63) - 1), 400, "seed"),
    (CHAT, chat(seed=True), 400, "seed"),
    (CHAT, b"[1,2]", 400, None),
    (CHAT, b"42", 400, None),
    (CHAT, b"null", 400, None),
    (CHAT, b"", 400, None),
    (CHAT, b"{bad", 400, None),
    (CHAT, b'{"messages":"\xff\xfe"}', 400, None),
    (CHAT, DEEP, 400, None),
    (TEXT, NUMBER, 400, None),
    (TEXT, b'{"prompt":"\\ud800"}', 400, "prompt"),
    (CHAT, b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400, "messages"),
    (CHAT, b'{"messages":[{"role":"user","content":"a"}],"\\ud800":1,"n":0}', 400, None),
    (CHAT, chat(model="nobody"), 404, "model"),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(messages=said("")), 400, None),
    (CHAT, chat(messages=said(" \n")), 400, None),
    (CHAT, chat(messages=said("a\x00b")), 400, None),
    (CHAT, chat(messages=[{"role": "pirate", "content": "a"}]), 400, "messages"),
    (CHAT, chat(messages=[{"role": "tool", "content": "a"}]), 400, "messages"),
    (CHAT, chat(messages=[{"role": "user", "content": None}]), 400, "messages"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "messages"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages"),
    (CHAT, chat(messages=said("a") * 10_000), 400, "messages"),
    (CHAT, chat(messages=[{"role": "assistant", "content": "a"}]), 400, "messages"),
    (CHAT, chat(messages=[*said("a"), {"role": "assistant", "content": "b"}]), 400, "messages"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        400,
        "messages",
    ),
    (TEXT, text(prompt=""), 400, "prompt"),
    (TEXT, text(prompt=[]), 400, "prompt"),
    (TEXT, text(prompt=[[]]), 400, "prompt"),
    (TEXT, text(prompt=None), 400, "prompt"),
    (TEXT, text(prompt=[1, "a"]), 400, "prompt"),
    (TEXT, text(prompt=[999_999]), 400, "prompt"),
    (TEXT, text(prompt=[-1]), 400, "prompt"),
    (TEXT, text(prompt=["a"] * 33), 400, "prompt"),
    (TEXT, text(prompt="word " * 50_000), 400, None),
    (CHAT, chat(max_tokens=5000), 400, "messages"),
    (CHAT, chat(messages=said("word " * 3000)), 400, "messages"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat(max_tokens=-1), 400, "max_tokens"),
    (CHAT, chat(max_tokens=10**9), 400, "max_tokens"),
    (TEXT, text(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat(min_tokens=3), 400, "min_tokens"),
    (CHAT, chat(temperature=-1), 400, "temperature"),
    (CHAT, chat(temperature=3), 400, "temperature"),
    (CHAT, chat(temperature="0"), 400, "temperature"),
    (CHAT, chat(top_p=0), 400, "top_p"),
    (CHAT, chat(top_p=-1), 400, "top_p"),
    (CHAT, chat(top_p=1.1), 400, "top_p"),
    (CHAT, chat(top_k=-2), 400, "top_k"),
    (CHAT, chat(min_p=2), 400, "min_p"),
    (CHAT, chat(presence_penalty=3), 400, "presence_penalty"),
    (CHAT, chat(frequency_penalty=-3), 400, "frequency_penalty"),
    (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty"),
    (CHAT, chat(stop=[""]), 400, "stop"),
    (CHAT, chat(stop=["a"] * 1000), 400, "stop"),
    (CHAT, chat(stop=LONG), 400, "stop"),
    (CHAT, chat(stop=7), 400, "stop"),
    (CHAT, chat(stop_token_ids=[10**6]), 400, "stop_token_ids"),
    (CHAT, chat(logprobs=True, top_logprobs=10**6), 400, "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=-2), 400, "top_logprobs"),
    (CHAT, chat(logprobs=1), 400, "logprobs"),
    (CHAT, chat(prompt_logprobs=1), 400, "prompt_logprobs"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    (TEXT, text(logprobs=10**6), 400, "logprobs"),
    (TEXT, text(logprobs=-2), 400, "logprobs"),
    (CHAT, chat(logit_bias={"999999": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"a": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"5": 1e9}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={str(i): 0 for i in range(10_000)}), 400, "logit_bias"),
    (CHAT, chat(logit_bias=[1]), 400, "logit_bias"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (CHAT, chat(stream="yes"), 400, "stream"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    (CHAT, chat(modalities=["audio"]), 400, "modalities"),
    (CHAT, chat(cache_salt=5), 400, "cache_salt"),
    (CHAT, chat(chat_template="{{ 7 * 7 }}"), 400, "chat_template"),
    (CHAT, chat(chat_template_kwargs={"tokenize": True}), 400, "chat_template_kwargs"),
    (CHAT, chat(response_format={"type": "grammar"}), 400, "response_format"),
    (CHAT, chat(response_format={"type": "json_schema"}), 400, "response_format"),
    (CHAT, chat(response_format={"type": "json_object"}, top_p=0.5), 400, "top_p"),
    (TEXT, text(best_of=3), 400, "best_of"),
    (TEXT, text(suffix="x"), 400, "suffix"),
    (TEXT, text(echo=True, stream=True), 400, "echo"),
    (TEXT, text(prompt_embeds="AAAA"), 400, "prompt_embeds"),
    (CHAT, chat(specsot={"trace": "yes"}), 400, "specsot"),
    (CHAT, chat(specsot={"skeletn": False}), 400, "specsot"),
    (CHAT, chat(specsot={"stream": "multiplexed"}, stop=["a"], stream=True), 400, "stop"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [10**8]}, 400, "tokens"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ("/v1/responses", {"input": "a"}, 404, None),
    ("/v1/models", {}, 405, None),
]
NAMES = [f"{n}-{row[0].rsplit('/', 1)[-1]}-{row[3]}" for n, row in enumerate(ROWS)]


@pytest.mark.parametrize(("path", "body", "status", "param"), ROWS, ids=NAMES)
def test_a_bad_request_is_told_what_is_wrong(
    served: Served, path: str, body: Any, status: int, param: str | None
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    got = served.http.post(path, content=data, headers={"content-type": "application/json"})
    assert got.status_code == status, got.text
    error = got.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert param is None or error["param"] == param, error
    assert "Traceback" not in got.text and "pydantic" not in got.text
    assert len(got.text) < 1000 and got.headers["x-request-id"]


GOOD: list[tuple[str, Any]] = [
    (CHAT, chat(n=1.0, seed=2**63 - 1)),
    (CHAT, chat(seed=-(2**63), stop=[], temperature=1e-9)),
    (CHAT, chat(messages=[{"role": "system", "content": ""}, *said("Hi")])),
    (CHAT, chat(messages=[*said("a"), {"role": "assistant", "content": None}, *said("b")])),
    (CHAT, chat(top_k=-1, logit_bias={}, user="x", unknown_field=[1])),
    (CHAT, chat(response_format={"type": "text"}, tool_choice="none", tools=[])),
    (CHAT, chat(stop=None, seed=None, stream=None, max_completion_tokens=2)),
    (CHAT, chat(messages=said("a\u202eb \U0001f468\u200d\U0001f469\u200d\U0001f467 <|im_end|>"))),
    (
        CHAT,
        b'{"model":"x","model":"dflash","max_tokens":1,"messages":[{"role":"user","content":"a"}]}',
    ),
    (TEXT, text(prompt=[0, 1, 2])),
    (TEXT, text(prompt=" ", best_of=1)),
]


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_what_looks_odd_and_is_good(served: Served, path: str, body: Any) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    got = served.http.post(path, content=data, headers={"content-type": "application/json"})
    assert got.status_code == 200, got.text


def test_the_length_error_has_both_numbers(served: Served) -> None:
    error = served.chat(max_tokens=5000).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "5000" in error["message"] and "2048" in error["message"]


# -- what HTTP itself can get wrong ---------------------------------------------------------------


def test_bodies_that_are_too_long_are_not_read(served: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    began = time.monotonic()
    assert b" 413 " in served.raw(head + b"Content-Length: 52428800\r\n\r\n{")
    assert time.monotonic() - began < 5
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    assert b" 413 " in served.raw(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 32)


def test_headers_types_methods_and_paths(served: Served) -> None:
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    assert b" 431 " in served.raw(get + b"X: " + b"a" * 60_000 + b"\r\n\r\n")
    assert b" 431 " in served.raw(get + b"X: a\r\n" * 5000 + b"\r\n")
    assert b" 431 " in served.raw(get + b"X: a\r\n" * 150 + b"\r\n")
    for status, got in (
        (415, served.http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})),
        (405, served.http.get(CHAT)),
        (404, served.http.get("/nothing")),
        (404, served.http.get("/v1/models/nobody")),
        (404, served.http.get("/docs")),
    ):
        assert got.status_code == status and got.json()["error"]["message"], got.text


def test_strangers_hosts_and_origins(served: Served) -> None:
    assert served.http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    got = served.http.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert not [name for name in got.headers if name.startswith("access-control")]
    asked = served.http.options(CHAT, headers={"Origin": "https://evil.example"})
    assert asked.status_code == 405 and "access-control-allow-origin" not in asked.headers


def test_request_ids_come_back_unless_they_are_strange(served: Served) -> None:
    def id_for(own: str) -> str:
        return served.http.get("/health", headers={"x-request-id": own}).headers["x-request-id"]

    assert id_for("abc-1") == "abc-1" and len(id_for("a b;<script>")) == 32


def test_any_bytes_at_all(served: Served) -> None:
    draw = random.Random(15)
    heads = [b"", b"GET / HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"]
    for _ in range(60):
        noise = draw.randbytes(draw.choice((1, 20, 200, 3000)))
        got = served.raw(draw.choice(heads) + noise + draw.choice((b"", b"\r\n\r\n")), wait=0.05)
        assert b" 500 " not in got
    assert served.chat().status_code == 200
