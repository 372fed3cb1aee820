"""Answers that call functions or have a given form, over a real server and in pieces of text."""

import json
from typing import Any, Literal

import openai
import pytest
from helpers.servers import BEES, RAIN, Served, said
from pydantic import BaseModel

from specsot.engine.serve.forms import CallReader

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "enum": ["Rome", "Oslo"]},
                "days": {"$ref": "#/$defs/Days"},
            },
            "required": ["town", "days"],
            "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = {"tools": [WEATHER, CLOCK], "max_tokens": 400}
NAMED = {"type": "function", "function": {"name": "clock"}}
CALLS = (("f", '{"a":"}],{\\"name"}'), ("g", "{}"), ("f", '{"a":[{"b":2}]}'))


def read_in_pieces(text: str, size: int) -> tuple[CallReader, list[dict[str, Any]]]:
    reader = CallReader()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    deltas = [delta for piece in pieces for delta in reader.feed(piece)]
    return reader, [*deltas, *reader.feed("", final=True)]


def joined(deltas: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Names and arguments, as clients put them together."""
    calls: list[list[str]] = []
    for delta in deltas:
        for part in delta["tool_calls"]:
            if part["index"] == len(calls):
                assert part["id"] and part["type"] == "function"
                calls.append([part["function"]["name"], ""])
            calls[part["index"]][1] += part["function"]["arguments"]
    return [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_are_read_however_their_text_is_cut(size: int) -> None:
    texts = [f'{{"name":"{name}","arguments":{arguments}}}' for name, arguments in CALLS]
    whole = f"[{','.join(texts)}]"
    reader, deltas = read_in_pieces(whole, size)
    assert joined(deltas) == [*CALLS] and reader.complete and reader.content == ""
    assert [call["function"]["arguments"] for call in reader.calls] == [a for _, a in CALLS]
    reader, deltas = read_in_pieces(whole[:-4], size)
    assert joined(deltas)[-1] == ("f", '{"a":[{"b":2}') and not reader.complete
    for text in (" [x] [{", "[", "Rain.", "[{"[:1] + '"a"]'):
        reader, deltas = read_in_pieces(text, size)
        content = "".join(delta["content"] for delta in deltas)
        assert content == reader.content == text.lstrip() and not reader.calls


@pytest.mark.parametrize(
    ("model", "choice"),
    [("bim_dflash", "required"), *(("dflash", choice) for choice in (NAMED, "auto", "none"))],
)
def test_tools_are_called_as_clients_read_it(served: Served, model: str, choice: Any) -> None:
    asked = {**TOOLS, "tool_choice": choice}
    got = served.chat("The weather in Rome?", model, **asked).json()["choices"][0]
    calls = got["message"].get("tool_calls", [])
    assert bool(calls) == (got["finish_reason"] == "tool_calls")
    assert bool(calls) != bool(got["message"]["content"])
    assert calls if choice in ("required", NAMED) else choice == "auto" or not calls
    for call in calls:
        assert call["type"] == "function" and call["id"].startswith("call_")
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "clock":
            assert arguments == {}
        else:
            assert arguments["town"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 9
            assert len(arguments) == 2
    if choice == NAMED:
        assert [call["function"]["name"] for call in calls] == ["clock"]
    body = {"model": model, "messages": said("The weather in Rome?"), **asked}
    chunks = [chunk["choices"][0] for chunk in served.stream(**body)[:-1]]
    assert chunks[-1]["finish_reason"] == got["finish_reason"]
    streamed = joined([one["delta"] for one in chunks if "tool_calls" in one["delta"]])
    assert streamed == [(c["function"]["name"], c["function"]["arguments"]) for c in calls]
    text = "".join(one["delta"].get("content") or "" for one in chunks)
    assert text == (got["message"]["content"] or "")


def test_one_call_where_several_are_not_wanted_and_calls_that_are_cut_off(served: Served) -> None:
    one_call = {**TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    assert len(served.chat(**one_call).json()["choices"][0]["message"]["tool_calls"]) == 1
    asked = {**TOOLS, "tools": [WEATHER], "tool_choice": "required"}
    for size, calls in ((4, 0), (28, 1)):
        choice = served.chat(**{**asked, "max_tokens": size}).json()["choices"][0]
        found = choice["message"].get("tool_calls", [])
        assert choice["finish_reason"] == "length" and len(found) == calls
        assert bool(choice["message"]["content"]) != bool(calls)
        assert all('"days"' not in call["function"]["arguments"] for call in found)


def test_settings_that_exclude_a_grammar_and_the_tools_in_a_prompt(served: Served) -> None:
    got = served.chat(**TOOLS, top_p=0.5, seed=1).json()["choices"][0]
    assert got["message"]["content"] and "tool_calls" not in got["message"]
    assert served.chat(**TOOLS, top_p=1, frequency_penalty=0).status_code == 200

    def tokens(**fields: Any) -> int:
        return int(served.chat(RAIN, **fields).json()["usage"]["prompt_tokens"])

    bare = tokens()
    assert tokens(**TOOLS) > bare + 50 and tokens(**TOOLS, tool_choice="none") == bare
    assert bare < tokens(**TOOLS, tool_choice=NAMED) < tokens(**TOOLS)


def test_calls_and_results_are_turns_of_a_prompt(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    turns = [
        *said("The time?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Noon."},
    ]
    ids = served.http.post("/tokenize", json={"messages": turns}).json()["tokens"]
    text = served.decoded(ids)
    places = [
        text.index(one)
        for one in ("The time?", '[{"name":"clock","arguments":{}}]', "Result of clock: Noon.")
    ]
    assert places == sorted(places)
    body = {"model": "dflash", "messages": turns, "max_tokens": 4, "tool_choice": "none"}
    for tools in ({}, {"tools": [CLOCK]}):
        got = served.http.post("/v1/chat/completions", json={**body, **tools}).json()
        assert got["choices"][0]["message"]["content"]


def test_forms_of_vllm(served: Served) -> None:
    for fields, texts in (
        ({"guided_choice": [" yes", "no"]}, (" yes", "no")),
        ({"guided_regex": "[12]{3}/x"}, [f"{n}/x" for n in ("111", "112", "222", "121", "122")]),
    ):
        chat = served.chat(**fields, max_tokens=40).json()["choices"][0]
        assert chat["message"]["content"] in texts and chat["finish_reason"] == "stop"
        plain = served.complete("A bee", max_tokens=40, **fields).json()["choices"][0]
        assert plain["text"] in texts


def test_the_official_client_parses_a_model_class(served: Served) -> None:
    class Colour(BaseModel):
        name: Literal["red", "blue"]
        dark: bool

    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    got = client.chat.completions.parse(
        model="dflash",
        messages=[{"role": "user", "content": "A colour?"}],
        response_format=Colour,
        max_tokens=200,
    )
    assert isinstance(got.choices[0].message.parsed, Colour)


def test_a_last_message_of_the_assistant_is_continued(served: Served) -> None:
    start = "Bees are insects that"
    turns = [*said(BEES), {"role": "assistant", "content": start}]
    body = {"model": "bim_dflash", "messages": turns, "max_tokens": 8}
    got = served.http.post("/v1/chat/completions", json=body).json()
    prompt = served.http.post("/tokenize", json={"messages": said(BEES)}).json()["tokens"]
    ids = [*prompt, *served.ids(start)]
    plain = served.complete(ids, max_tokens=8).json()
    assert got["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert got["usage"] == plain["usage"]
    as_vllm = {"continue_final_message": True, "add_generation_prompt": False}
    again = served.http.post("/v1/chat/completions", json={**body, **as_vllm}).json()
    assert again["choices"][0]["message"] == got["choices"][0]["message"]
    chunks = served.stream(**body)[:-1]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == got["choices"][0]["message"]["content"]
