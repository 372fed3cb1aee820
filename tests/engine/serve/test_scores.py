"""Log-probabilities: the target's own behind each branch's context, streamed or not, in reading
order."""

from typing import Any

import pytest
from helpers.servers import BEES, RAIN, Served, said

from specsot.engine.models import load_models
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.prepare.job import embedded_folder
from specsot.engine.request_settings import RequestSettings
from specsot.engine.run.engine import Engine
from specsot.engine.run.scoring import Scorer
from specsot.engine.serve.answers import Scores
from specsot.engine.workers.process import Refusal, ServedGraph
from specsot.engine.workers.protocol import Submit, Wrote


def content_of(chunks: list[Any]) -> list[Any]:
    scores = [c["choices"][0]["logprobs"] for c in chunks if c != "[DONE]"]
    return [one for part in scores if part for one in part["content"]]


def test_scores_do_not_depend_on_how_tokens_come() -> None:
    models = load_models(embedded_folder("target"), None)
    ids = [5 + 7 * n % 900 for n in range(300)]  # more than one forward of ROWS
    whole = Scorer(models, 400).score(ids, 2)
    assert len(whole) == 299
    scorer, parts = Scorer(models, 400), []
    scorer.read(ids[:90])
    for start, stop in ((90, 91), (91, 99), (99, 99), (99, 300)):
        parts += scorer.score(ids[start:stop], 2)
    assert [one.token for one in parts] == ids[90:]
    assert [p.logprob for p in parts] == pytest.approx([w.logprob for w in whole[89:]], abs=1e-4)
    assert [p.top[0][0] for p in parts] == [w.top[0][0] for w in whole[89:]]


@pytest.mark.parametrize("model", ["dflash", "bim_dflash"])
@pytest.mark.parametrize("stream", ["ordered", "multiplexed"])
def test_a_stream_has_the_scores_of_the_whole_answer(
    served: Served, model: str, stream: str
) -> None:
    body = {"model": model, "messages": said(BEES), "max_tokens": 16}
    asked = {**body, "logprobs": True, "top_logprobs": 1}
    whole = served.http.post("/v1/chat/completions", json=asked).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"]
    branches = [one["branch"] for one in content]
    assert branches == sorted(branches) and (-1 in branches) == (model == "bim_dflash")
    chunks = served.stream(**asked, specsot={"stream": stream})
    parts = content_of(chunks)
    if stream == "multiplexed":
        parts.sort(key=lambda one: one["branch"])
    assert [one["token"] for one in parts] == [one["token"] for one in content]
    logprobs = [one["logprob"] for one in content]
    assert [one["logprob"] for one in parts] == pytest.approx(logprobs, abs=1e-4)
    assert all(one["top_logprobs"][0]["logprob"] == one["logprob"] for one in content)
    plain = served.stream(**body)
    texts = (
        "".join(c["choices"][0]["delta"].get("content") or "" for c in many[:-1])
        for many in (plain, chunks)
    )
    assert stream == "multiplexed" or len(set(texts)) == 1
    assert not content_of(plain)


def test_completions_say_where_each_token_begins(served: Served) -> None:
    body = {"model": "dflash", "prompt": "The sky is", "max_tokens": 9, "logprobs": 1}
    chunks = served.stream("/v1/completions", **body)[:-1]
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    tokens = [token for part in parts for token in part["tokens"]]
    offsets = [at for part in parts for at in part["text_offset"]]
    assert len(tokens) == 9 and len(parts) > 1
    assert offsets == [len("".join(tokens[:n])) for n in range(9)]
    whole = served.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert (whole["tokens"], whole["text_offset"]) == (tokens, offsets)


def test_scores_stop_where_the_answer_does(served: Served) -> None:
    text = served.chat(RAIN, max_tokens=24).json()["choices"][0]["message"]["content"]
    fields = {"max_tokens": 24, "logprobs": True, "stop": [text[10:14]]}
    got = served.chat(RAIN, **fields).json()
    content = got["choices"][0]["logprobs"]["content"]
    assert len(content) == got["usage"]["completion_tokens"]
    body = {"model": "dflash", "messages": said(RAIN), **fields}
    assert content_of(served.stream(**body)) == content


def test_parts_are_told_in_reading_order() -> None:
    def wrote(branch: int, tokens: int, *events: Any) -> Wrote:
        return Wrote("r", "", events, 1, 0, [[branch, 1, "x", -1.0, []]] * tokens)

    scores, told = Scores(), []
    for message in (
        wrote(-1, 2, ("opened", -1, ""), ("ended", -1, "stop")),
        wrote(1, 3, ("ended", 1, "stop")),
        wrote(0, 1),
        wrote(2, 1),
        wrote(0, 1, ("ended", 0, "stop")),
    ):
        scores.add(message)
        told.append([row[0] for row in scores.more()])
    assert told == [[-1, -1], [], [0], [], [0, 1, 1, 1, 2]]
    assert scores.rest() == []


def test_parts_that_are_read_where_they_lie_have_none() -> None:
    with Engine("bim_attend_merge", threaded=False) as engine:
        graph = ServedGraph(engine.session, lambda message: None)
        asked = Submit("bim_attend_merge", Prompt("r1", BEES, max_new_tokens=4), logprobs=0)
        with pytest.raises(Refusal, match="in place") as told:
            graph.build(asked)
        assert told.value.param == "logprobs"
        plain = asked._replace(settings=RequestSettings(skeleton=False))
        assert graph.build(plain)[1].contexts
        graph.engine.close()
