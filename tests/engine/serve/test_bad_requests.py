"""Every bad request gets its status, OpenAI's shape and the field to blame; the server lives."""

import json
import random
import re
import time
from typing import Any

import pytest
from helpers.servers import Served, said

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DEEP = b'{"messages":' + b"[" * 100_000
NUMBER = b'{"model":"dflash","prompt":"a","seed":' + b"9" * 5000 + b"}"
LONG = "x" * 65
FUNCTION = {"type": "function", "function": {"name": "f"}}
ANSWER = {"role": "assistant", "content": "b"}
JSON = {"type": "json_object"}
NO_TYPE = {**FUNCTION, "function": {"name": "f", "parameters": {"type": 1}}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "dflash", "messages": said("Hi"), "max_tokens": 2, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "dflash", "prompt": "Hi", "max_tokens": 2, **fields}


# By field: values that are refused. `BAD_CHAT` and `BAD_TEXT` set that field alone.
BAD_CHAT: dict[str, tuple[Any, ...]] = {
    "n": (True, "5", 1000, 1.5, 0),
    "seed": (10**26, -(2**63) - 1, True),
    "max_tokens": (0, -1, 10**9),
    "min_tokens": (3,),
    "temperature": (-1, 3, "0"),
    "top_p": (0, -1, 1.1),
    "top_k": (-2,),
    "min_p": (2,),
    "presence_penalty": (3,),
    "frequency_penalty": (-3,),
    "repetition_penalty": (0,),
    "stop": ([""], ["a"] * 1000, LONG, 7),
    "stop_token_ids": ([10**6],),
    "logprobs": (1,),
    "prompt_logprobs": (1,),
    "top_logprobs": (2,),
    "logit_bias": (
        *({"999999": 1}, {"a": 1}, {"5": 1e9}, [1], {"9" * 5000: 1}, {"": 1}),
        {str(i): 0 for i in range(10_000)},
    ),
    "stream_options": ({"include_usage": True},),
    "stream": ("yes",),
    "tools": ([{"type": "function"}], [{**FUNCTION, "function": {"name": "a b"}}]),
    "tool_choice": ("required", {"type": "function", "function": {"name": "f"}}),
    "parallel_tool_calls": ("no",),
    "guided_regex": ("(", "", "x" * 20_000),
    "guided_choice": ([], [""]),
    "guided_json": ({"type": "object"},),
    "guided_grammar": ("x",),
    "structured_outputs": ({"choice": ["a"]},),
    "modalities": (["audio"],),
    "cache_salt": (5,),
    "chat_template": ("{{ 7 * 7 }}",),
    "chat_template_kwargs": ({"tokenize": True},),
    "response_format": ({"type": "grammar"}, {"type": "json_schema"}),
    "specsot": ({"trace": "yes"}, {"skeletn": False}),
    "messages": (
        [],
        [{"role": "pirate", "content": "a"}],
        [*said("a"), {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
        [{"role": "system", "content": "a"}, {"role": "assistant", "content": "a"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user"}],
        said("a") * 10_000,
        [{"role": "assistant", "content": "a"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        said("word " * 3000),
    ),
}
BAD_TEXT: dict[str, tuple[Any, ...]] = {
    "prompt": ("", [], [[]], None, [1, "a"], [999_999], [-1], ["a"] * 33),
    "max_tokens": (0,),
    "logprobs": (10**6, -2),
    "best_of": (3,),
    "suffix": ("x",),
    "prompt_embeds": ("AAAA",),
}
USER = b'{"messages":[{"role":"user","content":"a"}],'
# path, request, the status that is expected, the field that is named
ROWS: list[tuple[str, Any, int, str | None]] = [
    *((CHAT, chat(**{name: value}), 400, name) for name in BAD_CHAT for value in BAD_CHAT[name]),
    *((TEXT, text(**{name: value}), 400, name) for name in BAD_TEXT for value in BAD_TEXT[name]),
    (CHAT, USER + b'"temperature":NaN}', 400, "temperature"),
    (CHAT, USER + b'"temperature":1e999}', 400, "temperature"),
    (CHAT, USER + b'"top_p":Infinity}', 400, "top_p"),
    *((CHAT, body, 400, None) for body in (b"[1,2]", b"42", b"null", b"", b"{bad", DEEP)),
    (CHAT, b'{"messages":"\xff\xfe"}', 400, None),
    (TEXT, NUMBER, 400, None),
    (TEXT, b'{"prompt":"\\ud800"}', 400, "prompt"),
    (CHAT, b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400, "messages"),
    (CHAT, USER + b'"\\ud800":1}', 400, None),
    (CHAT, USER + b'"model":"\\udfff"}', 400, "model"),
    (CHAT, USER + b'"specsot":{"documents":["\\ud800"]}}', 400, "specsot"),
    (CHAT, USER + b'"specsot":{"documents":["\xed\xa0\x80"]}}', 400, "specsot"),
    ("/tokenize", b'{"prompt":"a\\ud800"}', 400, "prompt"),
    (CHAT, chat(model="nobody"), 404, "model"),
    *((CHAT, chat(messages=said(content)), 400, None) for content in ("", " \n", "a\x00b")),
    (TEXT, text(prompt="word " * 50_000), 400, None),
    (CHAT, chat(max_tokens=5000), 400, "messages"),
    (CHAT, chat(logprobs=True, top_logprobs=10**6), 400, "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=-2), 400, "top_logprobs"),
    (CHAT, chat(response_format=JSON, top_p=0.5), 400, "top_p"),
    (CHAT, chat(tools=[FUNCTION], tool_choice="required", top_p=0.5), 400, "top_p"),
    (CHAT, chat(continue_final_message=True), 400, "messages"),
    (CHAT, chat(add_generation_prompt=False), 400, "messages"),
    (CHAT, chat(response_format=JSON, guided_regex="a"), 400, "response_format"),
    (CHAT, chat(response_format=JSON, tools=[FUNCTION]), 400, "tools"),
    (CHAT, chat(tools=[FUNCTION], specsot={"stream": "multiplexed"}), 400, "specsot"),
    (
        CHAT,
        chat(tools=[{**FUNCTION, "function": {"name": "f", "parameters": NO_TYPE}}]),
        400,
        "tools",
    ),
    (CHAT, chat(messages=[*said("a"), ANSWER], response_format=JSON), 400, "response_format"),
    (CHAT, chat(specsot={"stream": "multiplexed"}, stop=["a"], stream=True), 400, "stop"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"messages": [*said("a"), ANSWER]}, 400, "messages"),
    ("/detokenize", {"tokens": [10**8]}, 400, "tokens"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ("/v1/embeddings", {"model": "dflash", "input": "a"}, 400, "model"),
    ("/v1/responses", {"input": []}, 400, "input"),
    ("/v1/responses", {"input": [{"role": "user", "content": 5}]}, 400, "input"),
    ("/v1/responses", {"input": "a", "previous_response_id": "r"}, 400, "previous_response_id"),
    ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, 400, "tools"),
    ("/v1/responses", {"input": "a", "max_output_tokens": 5000}, 400, "input"),
    ("/v1/responses", {"input": "a", "max_tokens": 0, "guided_choice": [""]}, 400, None),
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


def test_the_length_error_is_openais_with_numbers_that_add_up(served: Served) -> None:
    for got, part in (
        (served.chat(max_tokens=5000), "messages"),
        (served.chat("word " * 3000, max_tokens=5), "messages"),
        (served.chat("word " * 500, "bim_dflash", max_tokens=1800), "messages"),
        (served.complete("word " * 3000, max_tokens=5), "prompt"),
    ):
        error = got.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", part)
        longest, asked, prompt, answer = map(int, re.findall(r"\d+", error["message"]))
        assert error["message"] == (
            f"This model's maximum context length is {longest} tokens. However, you requested "
            f"{asked} tokens ({prompt} in the {part}, {answer} in the completion). "
            f"Please reduce the length of the {part} or completion."
        )
        assert longest == 2048 < asked == prompt + answer and prompt > 5


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


def test_strange_hosts_origins_and_request_ids(served: Served) -> None:
    assert served.http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    got = served.http.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert not [name for name in got.headers if name.startswith("access-control")]
    asked = served.http.options(CHAT, headers={"Origin": "https://evil.example"})
    assert asked.status_code == 405 and "access-control-allow-origin" not in asked.headers

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
