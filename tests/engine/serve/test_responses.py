"""The Responses API with the official client, over a real server."""

import json
from typing import Any

import openai
import pytest
from helpers.servers import BEES, RAIN, Served


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("model", ["dflash", "bim_dflash"])
def test_a_response_is_the_chats_answer(served: Served, client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "input": BEES, "max_output_tokens": 12, "temperature": 0}
    got = client.responses.create(**asked)
    chat = served.chat(BEES, model, max_tokens=12).json()
    assert got.output_text == chat["choices"][0]["message"]["content"]
    assert got.usage is not None
    counts = (got.usage.input_tokens, got.usage.output_tokens, got.usage.total_tokens)
    assert counts == tuple(
        chat["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")
    )
    assert got.status == "incomplete" and got.incomplete_details is not None
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    ends = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[-4:] == ends
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == got.output_text
    assert [event.sequence_number for event in events] == [*range(len(events))]
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.output_text == got.output_text
    assert last.response.usage == got.usage


def test_a_response_to_a_conversation_in_a_form(client: openai.OpenAI, served: Served) -> None:
    said: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": RAIN}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "W"}]},
        {"role": "user", "content": "A number?"},
    ]
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    asked: Any = {"model": "dflash", "input": said, "text": form, "max_output_tokens": 40}
    got = client.responses.create(**asked)
    assert json.loads(got.output_text)["n"] in (1, 2) and got.status == "completed"
    ruled = client.responses.create(**asked, instructions="Be brief. " * 20)
    assert got.usage is not None and ruled.usage is not None
    assert ruled.usage.input_tokens > got.usage.input_tokens + 30
