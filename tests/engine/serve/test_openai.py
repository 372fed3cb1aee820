"""OpenAI's API and the Responses API over a real server: the official client, streams, texts of
`run`, scores."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from helpers.servers import BEES, RAIN, Served, said

from specsot.engine.models import load_models
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt, RequestSettings
from specsot.engine.prepare.job import embedded_folder
from specsot.engine.run.engine import Engine
from specsot.engine.run.scoring import Scorer
from specsot.engine.run.session import Session, derive_seed
from specsot.engine.serve.answers import Scores
from specsot.engine.workers.process import Refusal, ServedGraph
from specsot.engine.workers.protocol import Submit, Wrote
from specsot.states.graph.load import op_table


@pytest.fixture(scope="session")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def alone() -> Any:
    """alone(graph, text, seed): what `specsot run` writes, and its token ids."""
    target, drafter = embedded_folder("target"), embedded_folder("dflash")
    models, table = load_models(target, drafter, "dflash"), op_table()

    def run(graph: str, text: str, seed: int = 0, *sets: str) -> tuple[str, list[int], Session]:
        program = open_graph(graph, sets=sets, table=table)
        session = Session(program, models, max_new_tokens=24)
        with Engine(session, threaded=False) as engine:
            answer = engine.generate(Prompt("1", text, derive_seed(seed, "1")))
            return answer.text, [t for s in answer.sections for t in s.tokens], session

    return run


def content_of(served: Served, model: str, text: str = BEES, **fields: Any) -> str:
    """A whole answer of 24 tokens, or what `fields` say."""
    got = served.chat(text, model, **{"max_tokens": 24, **fields}).json()
    return str(got["choices"][0]["message"]["content"])


def text_of(chunks: list[Any]) -> str:
    return "".join(
        c["choices"][0].get("delta", {}).get("content") or c["choices"][0].get("text", "")
        for c in chunks
        if c != "[DONE]" and c["choices"]
    )


def test_models(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    served = ("bim_dflash", "dflash", "autoregressive", "blend_eagle")
    assert names == [f"specsot/{name}" for name in served]
    assert client.models.retrieve("specsot/dflash").id == "specsot/dflash"


@pytest.mark.parametrize("graph", ["bim_dflash", "dflash"])
def test_text_and_stream_are_what_run_writes(client: openai.OpenAI, alone: Any, graph: str) -> None:
    text, tokens, _ = alone(graph, BEES)
    got = client.chat.completions.create(model=f"specsot/{graph}", messages=said(BEES))  # type: ignore[arg-type]
    assert got.choices[0].message.content == text
    assert got.usage is not None and got.usage.completion_tokens_details is not None
    skeleton = got.usage.completion_tokens_details.model_extra or {}
    written = got.usage.completion_tokens - skeleton["skeleton_tokens"]
    assert written == len(tokens) and (skeleton["skeleton_tokens"] > 0) == (graph == "bim_dflash")
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    asked: Any = {"model": graph, "messages": said(BEES), "stream": True}
    asked["stream_options"] = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    ends = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert ends[-1] == "length" and set(ends[:-1]) == {None}
    assert not chunks[-1].choices and chunks[-1].usage is not None
    figures = (chunks[-1].model_extra or {})["metrics"]["speculative_decoding"]
    assert figures["num_spec_steps"] == sum(figures["acceptance_histogram"])
    assert figures["num_accepted_draft_tokens"] <= figures["num_draft_tokens"]


def test_usage_comes_only_if_it_is_asked_for(served: Served) -> None:
    body = {"model": "dflash", "messages": said(RAIN), "max_tokens": 4}
    chunks = served.stream(**body)
    assert chunks[-1] == "[DONE]" and all("usage" not in c and c["choices"] for c in chunks[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = served.stream(**body, stream_options=options)
    counts = [c["usage"]["completion_tokens"] for c in chunks[:-1]]
    assert counts == sorted(counts) and counts[-1] == 4 and counts[0] == 0


def test_completions_go_on_behind_texts_and_ids(client: openai.OpenAI, served: Served) -> None:
    ids = served.ids("The sky is")
    assert served.decoded(ids) == "The sky is"
    texts = [
        [c.text for c in client.completions.create(model="dflash", prompt=prompt, n=n).choices]
        for prompt, n in (("The sky is", 1), (ids, 1), (["The sky is", "A bee"], 2))
    ]
    assert texts[0] == texts[1] and texts[0][0]
    assert len(texts[2]) == 4 and texts[2][:2] == texts[0] * 2 != texts[2][2:]


def test_sixteen_at_once_write_what_each_writes_alone(served: Served) -> None:
    asks = [
        (f"Why is number {n} odd?", model, n)
        for n in range(8)
        for model in ("dflash", "bim_dflash")
    ]

    def ask(one: tuple[str, str, int]) -> str:
        text, model, seed = one
        return content_of(served, model, text, seed=seed, temperature=0.9, max_tokens=12)

    one_by_one = [ask(one) for one in asks[:6]]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, asks))
    assert together[:6] == one_by_one and len(set(together)) > 8


def test_seeds_and_choices(served: Served, alone: Any) -> None:
    drawn = served.chat(BEES, "dflash", seed=7, temperature=1.6, n=2, max_tokens=24).json()
    texts = [one["message"]["content"] for one in drawn["choices"]]
    expected = [alone("dflash", BEES, s, "sampling.temperature=1.6")[0] for s in (7, 8)]
    assert texts == expected and texts[0] != texts[1]
    assert drawn["metrics"]["speculative_decoding"] is None


def test_stop_texts_end_an_answer_wherever_steps_cut_them(served: Served) -> None:
    whole = content_of(served, "dflash")
    for stop in (whole[10:14], whole[31:40], whole[20:21]):
        body = {"model": "dflash", "messages": said(BEES), "max_tokens": 24, "stop": [stop]}
        got = served.chat(BEES, max_tokens=24, stop=[stop, "\n\n\n"]).json()
        choice = got["choices"][0]
        assert choice["message"]["content"] == whole[: whole.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        plain = served.chat(BEES, "autoregressive", max_tokens=24, stop=stop).json()
        assert plain["usage"]["completion_tokens"] == got["usage"]["completion_tokens"]
        assert text_of(served.stream(**body)) == choice["message"]["content"]
    whole = content_of(served, "bim_dflash")  # an outlined one in reading order
    stop = whole[-30:-20]
    assert content_of(served, "bim_dflash", stop=[stop]) == whole.split(stop)[0]


def test_lengths_stop_ids_and_ignored_ends(served: Served) -> None:
    tokens = served.complete("A bee", max_tokens=6).json()
    assert tokens["usage"]["completion_tokens"] == 6
    ids = served.http.post("/tokenize", json={"prompt": tokens["choices"][0]["text"]}).json()
    stopped = served.complete("A bee", max_tokens=6, stop_token_ids=ids["tokens"][2:3]).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] < 6
    longer = served.chat(RAIN, max_tokens=160).json()
    assert longer["choices"][0]["finish_reason"] == "stop"
    endless = served.chat(RAIN, max_tokens=160, ignore_eos=True).json()
    assert endless["usage"]["completion_tokens"] == 160
    least = longer["usage"]["completion_tokens"] + 5
    later = served.chat(RAIN, max_tokens=160, min_tokens=least).json()
    assert later["usage"]["completion_tokens"] >= least


def test_an_outline_ends_whatever_is_ignored(served: Served) -> None:
    each = {"max_tokens": None, "specsot": {"part_tokens": 16}}
    for text in (BEES, " pray MALVOLIO My prayers minx MARIA No I warrant you he will"):
        got = served.chat(text, "bim_dflash", ignore_eos=True, **each)
        assert got.status_code == 200, got.text
        parts = max(got.json()["choices"][0]["message"]["content"].count("\n\n") // 2, 1)
        usage = got.json()["usage"]
        written = usage["completion_tokens"] - usage["completion_tokens_details"]["skeleton_tokens"]
        assert written % 16 == 0 and written >= 16 * parts


def test_biases_and_penalties_are_the_graphs_own(served: Served, alone: Any) -> None:
    fields = {"frequency_penalty": 2.0, "presence_penalty": 1.5, "repetition_penalty": 3.0}
    got = content_of(served, "dflash", **fields)
    sets = [f"sampling.{name}={value}" for name, value in fields.items()]
    assert got == alone("dflash", BEES, 0, *sets)[0] != alone("dflash", BEES)[0]
    first = served.ids("zzz")[0]
    forced = served.complete("A bee", max_tokens=3, logit_bias={str(first): 100}).json()
    text = served.decoded([first] * 3)
    assert forced["choices"][0]["text"] == text


def test_scores_are_the_targets_own(served: Served, alone: Any) -> None:
    _, tokens, session = alone("dflash", BEES)
    got = served.chat(BEES, max_tokens=24, logprobs=True, top_logprobs=3).json()
    content = got["choices"][0]["logprobs"]["content"]
    text = "".join(one["token"] for one in content).strip()
    assert text == got["choices"][0]["message"]["content"]
    request = session.request(Prompt("1", BEES))
    ids = [*request.prefix, *request.tail]
    scorer = Scorer(session.models, len(ids) + len(tokens))
    scorer.read(ids)
    expected = scorer.score(tokens, 3)
    assert [one["logprob"] for one in content] == pytest.approx(
        [s.logprob for s in expected], abs=1e-5
    )
    for one in content:  # greedy: the token is the best of its row
        assert one["top_logprobs"][0]["logprob"] == one["logprob"]


def test_echoed_scores_as_evaluation_harnesses_ask_for_them(served: Served) -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    ids = served.ids("The sky is blue.")
    by_text = served.complete("The sky is blue.", **fields).json()["choices"][0]
    by_ids = served.complete([ids], **fields).json()["choices"][0]
    assert by_text["logprobs"] == by_ids["logprobs"] and by_text["text"] == by_ids["text"]
    scores = by_text["logprobs"]
    assert len(scores["tokens"]) == len(ids) + 1 == len(scores["token_logprobs"])
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    assert all(value <= 0 for value in scores["token_logprobs"][1:])
    assert "".join(scores["tokens"]) == by_text["text"]
    model = served.http.get("/v1/models").json()["data"][0]["specsot"]
    stops = {"logit_bias": dict.fromkeys(map(str, model["stop_ids"]), 100)}
    for more in ({"max_tokens": 0}, {"max_tokens": 0, **stops}, stops):
        bare = served.complete("The sky is blue.", **{**fields, **more}).json()["choices"][0]
        assert bare["text"] == "The sky is blue."
        for name in ("tokens", "token_logprobs"):
            assert bare["logprobs"][name] == scores[name][: len(ids)]


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_an_echoed_stream_is_the_whole_answer(served: Served, max_tokens: int) -> None:
    asked = {"prompt": ["The sky is blue.", "A bee"], "echo": True, "logprobs": 1}
    body = {"model": "dflash", **asked, "max_tokens": max_tokens}
    whole = served.http.post("/v1/completions", json=body).json()["choices"]
    chunks = [c["choices"][0] for c in served.stream("/v1/completions", **body)[:-1]]
    for choice in whole:
        mine = [one for one in chunks if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"
        for name, values in choice["logprobs"].items():
            rows = [value for one in mine if one["logprobs"] for value in one["logprobs"][name]]
            assert rows == values, name


def test_an_answer_can_be_held_to_a_schema(served: Served) -> None:
    properties = {"colour": {"enum": ["red", "blue"]}, "n": {"type": "integer", "maximum": 9}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["colour", "n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for model in ("dflash", "bim_dflash"):
        text = content_of(served, model, "A colour?", max_tokens=60, response_format=form)
        value = json.loads(text)
        assert value["colour"] in ("red", "blue") and isinstance(value["n"], int)
    wrong = {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}}
    assert served.chat(response_format=wrong).json()["error"]["param"] == "response_format"


def test_conversations_have_rules_and_turns(served: Served) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "rain?"}],
        },
        {"role": "assistant", "content": "Water."},
        {"role": "user", "content": "And snow?"},
    ]
    ids = served.http.post("/tokenize", json={"messages": turns}).json()["tokens"]
    text = served.decoded(ids)
    places = [text.index(one) for one in ("Be brief.", "What is rain?", "Water.", "And snow?")]
    assert places == sorted(places)
    body = {"model": "bim_dflash", "messages": turns, "max_tokens": 8}
    got = served.http.post("/v1/chat/completions", json=body).json()
    assert got["choices"][0]["message"]["content"] and "error" not in got


def test_what_is_kept_is_shared_by_requests_of_one_salt(served: Served) -> None:
    prompt = "The hive and the meadow. " * 30

    def cached(**fields: Any) -> int:
        usage = served.complete(prompt, max_tokens=2, **fields).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(cache_salt="one") == 0 and cached(cache_salt="one") > 64
    assert cached(cache_salt="two") == 0 and cached() == 0
    assert cached(specsot={"cache_salt": "two"}) > 64


def test_the_parts_of_an_answer_share_its_max_tokens(served: Served, alone: Any) -> None:
    for most in (1, 40, 90):
        for name in ("max_tokens", "max_completion_tokens"):
            got = served.chat(BEES, "bim_dflash", **{name: most}).json()
        usage = got["usage"]
        assert 0 < usage["completion_tokens"] <= most
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert got["choices"][0]["finish_reason"] == "length"
    assert usage["completion_tokens_details"]["skeleton_tokens"] > 0
    each = {"max_tokens": None, "specsot": {"part_tokens": 24}}
    got = served.chat(BEES, "bim_dflash", **each).json()
    assert got["choices"][0]["message"]["content"] == alone("bim_dflash", BEES)[0]
    same = served.chat(BEES, "bim_dflash", **each | {"max_tokens": 1000}).json()
    assert same["choices"] == got["choices"]
    short = served.complete("A bee", max_tokens=9, specsot={"part_tokens": 3}).json()
    assert short["usage"]["completion_tokens"] == 3


def test_parts_as_they_are_written(served: Served) -> None:
    body = {"model": "bim_dflash", "messages": said(BEES)}
    vendor = {"stream": "multiplexed", "trace": True, "part_tokens": 24}
    chunks = [c for c in served.stream(**body, specsot=vendor)[:-1] if "specsot" in c]
    told = [c["specsot"] for c in chunks]
    titles = next(one["titles"] for one in told if one["event"] == "outline")
    texts = {one["branch"]: "" for one in told}
    for chunk, one in zip(chunks, told, strict=True):
        if one["event"] == "wrote":
            assert set("".join(origin for _, origin in one["pieces"])) <= set("pdft")
            texts[one["branch"]] += "".join(piece for piece, _ in one["pieces"])
            content = chunk["choices"][0]["delta"].get("content")
            assert (content == "") == (one["branch"] < 0)
    parts = [f"{n}. {title}\n\n{texts[n - 1].strip()}" for n, title in enumerate(titles, 1)]
    assert "\n\n".join(parts) == content_of(served, "bim_dflash", max_tokens=None)
    assert any(one["drafts"] for one in told if one["event"] == "rejected")
    bare = served.stream(**body, specsot=vendor | {"trace": False})[:-1]
    kinds = {c["specsot"]["event"] for c in bare if "specsot" in c}
    assert kinds == {"outline", "opened", "wrote", "ended"}
    order = [one["branch"] for one in told if one["event"] == "wrote" and one["branch"] >= 0]
    assert order != sorted(order), "side by side, not one after the other"
    origins = {o for one in told if one["event"] == "wrote" for _, o in one["pieces"]}
    assert origins >= set("pdt"), "prefill, drafts, the target's own"


def test_plain_answers_and_documents_before_the_question(
    served: Served,
) -> None:
    plain = served.chat(BEES, "bim_dflash", max_tokens=24, specsot={"skeleton": False}).json()
    assert plain["choices"] == served.chat(BEES, "dflash", max_tokens=24).json()["choices"]
    document = {"title": "Rain", "text": "Rain in Zanzibar is green."}
    bare, told = (served.chat(RAIN, specsot=v).json() for v in ({}, {"documents": [document]}))
    assert told["usage"]["prompt_tokens"] > bare["usage"]["prompt_tokens"] + 5


def test_what_of_a_prompt_was_reused_is_told(served: Served) -> None:
    text = "Rain falls from clouds. The water comes from the sea, and the wind carries it. " * 5
    body = {"model": "blend_eagle", "messages": said(RAIN), "max_tokens": 4}
    vendor = {"trace": True, "documents": [text]}
    chunks = served.stream(**body, specsot=vendor)[:-1]
    events = [e for c in chunks for e in (c.get("specsot") or {}).get("events", [])]
    ((_, branch, runs),) = [one for one in events if one[0] == "reused"]
    assert branch == 0 and {how for _, how in runs} == set("nrc")
    said_all = "".join(piece for piece, _ in runs)
    assert text.strip() in said_all and RAIN in said_all
    reused = "".join(piece for piece, how in runs if how != "n")
    assert reused in said_all and len(reused) > 200 and RAIN not in reused


def test_probes_and_metrics_and_fields_that_nobody_reads(served: Served) -> None:
    got = served.chat(user="me", store=True, **{"x\ny": 1})
    assert got.status_code == 200 and got.headers["x-specsot-ignored"] == "store, x?y"
    assert served.chat(**{" a": 1, " ": 2}).headers["x-specsot-ignored"] == "?, ?a"
    assert served.http.get("/health").status_code == 200
    assert served.http.get("/ready").json() == {"status": "ready"}
    assert served.http.get("/version").json()["version"]
    assert served.http.head("/metrics").status_code == 200
    before = served.metric("vllm:generation_tokens_total")
    served.chat(max_tokens=5)
    for name in ("specsot", "vllm"):
        assert served.metric(f"{name}:request_success_total") > 0
        assert served.metric(f"{name}:time_to_first_token_seconds_count") > 0
    assert served.metric("vllm:generation_tokens_total") == before + 5
    served.until(lambda: served.metric("vllm:spec_decode_num_accepted_tokens_total") > 0)
    served.until(lambda: served.metric("specsot:requests_running") == 0)
    positions = served.http.get("/metrics").text.count("spec_decode_num_accepted_tokens_per_pos")
    assert positions > 2


# -- log-probabilities ----------------------------------------------------------------------------


def scores_of(chunks: list[Any]) -> list[Any]:
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
def test_a_stream_has_the_scores_of_an_answer(served: Served, model: str, stream: str) -> None:
    body = {"model": model, "messages": said(BEES), "max_tokens": 16}
    asked = {**body, "logprobs": True, "top_logprobs": 1}
    whole = served.http.post("/v1/chat/completions", json=asked).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"]
    branches = [one["branch"] for one in content]
    assert branches == sorted(branches) and (-1 in branches) == (model == "bim_dflash")
    chunks = served.stream(**asked, specsot={"stream": stream})
    parts = scores_of(chunks)
    if stream == "multiplexed":
        parts.sort(key=lambda one: one["branch"])
    assert [one["token"] for one in parts] == [one["token"] for one in content]
    logprobs = [one["logprob"] for one in content]
    assert [one["logprob"] for one in parts] == pytest.approx(logprobs, abs=1e-4)
    assert all(one["top_logprobs"][0]["logprob"] == one["logprob"] for one in content)
    plain = served.stream(**body)
    assert stream == "multiplexed" or text_of(plain) == text_of(chunks)
    assert not scores_of(plain)


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
    text = content_of(served, "dflash", RAIN)
    fields = {"max_tokens": 24, "logprobs": True, "stop": [text[10:14]]}
    got = served.chat(RAIN, **fields).json()
    content = got["choices"][0]["logprobs"]["content"]
    assert len(content) == got["usage"]["completion_tokens"]
    body = {"model": "dflash", "messages": said(RAIN), **fields}
    assert scores_of(served.stream(**body)) == content


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


# -- the Responses API ----------------------------------------------------------------------------


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
