"""Real clients against a running server: each that is installed, with what it found.

`python -m tools.serve.clients http://127.0.0.1:8000 --model dflash --tokenizer FOLDER`"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.request import urlopen

import typer
from pydantic import create_model

QUESTION = "Tell me about honey bees."
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
QUESTIONS = (
    ("The sky is", "blue", "loud"),
    ("Bees make", "honey", "rocks"),
    ("Fish live in", "water", "books"),
    ("At night we see the", "moon", "carpet"),
    ("A bird has two", "wings", "wheels"),
    ("Snow is", "cold", "angry"),
    ("Plants grow from", "seeds", "spoons"),
    ("We read", "books", "clouds"),
)
COLOURS = ("red", "green", "blue")
PICK: Any = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": COLOURS}},
            "required": ["colour"],
        },
    },
}


def picked() -> Any:
    """A class of pydantic's with one colour."""
    return create_model("Picked", colour=(Literal[COLOURS], ...))


def ask_openai(url: str, model: str, folder: Path) -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("SPECSOT_API_KEY", "none"))
    said: Any = [{"role": "user", "content": QUESTION}]
    whole = client.chat.completions.create(model=model, messages=said, max_tokens=24)
    stream = client.chat.completions.create(model=model, messages=said, max_tokens=24, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert text == whole.choices[0].message.content and text
    asked: Any = {"model": model, "messages": said, "max_tokens": 200}
    called = client.chat.completions.create(**asked, tools=[PICK], tool_choice="required")
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments)["colour"]
    parsed = client.chat.completions.parse(**asked, response_format=picked())
    assert parsed.choices[0].message.parsed.colour in COLOURS
    response = client.responses.create(model=model, input=QUESTION, max_output_tokens=24)
    events = client.responses.create(model=model, input=QUESTION, max_output_tokens=24, stream=True)
    deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert response.output_text == "".join(deltas) == text
    return {"same text as a stream": True, "tools, parse, responses": True}


def ask_langchain(url: str, model: str, folder: Path) -> Any:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, max_tokens=24)
    whole = chat.invoke(QUESTION)
    text = "".join(one.content for one in chat.stream(QUESTION))
    assert text == whole.content and text
    longer = chat.model_copy(update={"max_tokens": 200})
    (call,) = longer.bind_tools([PICK], tool_choice="pick").invoke(QUESTION).tool_calls
    assert call["args"]["colour"] in COLOURS
    for method in ("json_schema", "function_calling"):
        found = longer.with_structured_output(picked(), method=method).invoke(QUESTION)
        assert found.colour in COLOURS
    object = longer.bind(response_format={"type": "json_object"}).invoke(QUESTION)
    return {
        "same text as a stream": True,
        "tools, structured output": True,
        "json mode": object.response_metadata["finish_reason"],
    }


def ask_litellm(url: str, model: str, folder: Path) -> Any:
    import litellm

    said = [{"role": "user", "content": QUESTION}]
    more = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 24}
    whole = litellm.completion(model=f"openai/{model}", messages=said, **more)
    parts = litellm.completion(model=f"openai/{model}", messages=said, stream=True, **more)
    text = "".join(one.choices[0].delta.content or "" for one in parts)
    assert text == whole.choices[0].message.content and text
    try:
        litellm.completion(model=f"openai/{model}", messages=said, **{**more, "max_tokens": 9000})
    except litellm.ContextWindowExceededError:
        return {"same text as a stream": True, "context error recognised": True}
    raise AssertionError("no context error")


def ask_llama_index(url: str, model: str, folder: Path) -> Any:
    from llama_index.core import PromptTemplate
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    more = {"is_chat_model": True, "is_function_calling_model": True, "max_tokens": 200}
    llm = OpenAILike(model=model, api_base=f"{url}/v1", api_key="none", **more)
    whole = llm.chat([ChatMessage(role="user", content=QUESTION)])
    *_, last = llm.stream_chat([ChatMessage(role="user", content=QUESTION)])
    assert last.message.content == whole.message.content
    found = llm.structured_predict(picked(), PromptTemplate(QUESTION))
    assert found.colour in COLOURS
    return {"same text as a stream": True, "structured": True}


def ask_instructor(url: str, model: str, folder: Path) -> Any:
    import instructor
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    said: Any = [{"role": "user", "content": QUESTION}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        found = instructor.from_openai(client, mode=mode).chat.completions.create(
            model=model, messages=said, response_model=picked(), max_tokens=200, max_retries=0
        )
        assert found.colour in COLOURS
    return {"TOOLS": True, "JSON_SCHEMA": True}


def ask_lm_eval(url: str, model: str, folder: Path) -> Any:
    """Two toy tasks, a choice by log-probability and a text up to a stop, for every graph that is
    served: figures and texts have to be equal, for all of them give the target's own tokens."""
    with urlopen(f"{url}/v1/models") as answer:
        names = [one["id"] for one in json.load(answer)["data"]]
    found = {name: evaluated(url, name, folder) for name in names}
    first, *others = found.values()
    assert all(one == first for one in others), found
    figures, samples = first
    return {"graphs": names, "equal": True, "answers compared": len(samples), **figures}


def ask_lm_eval_chat(url: str, model: str, folder: Path) -> Any:
    figures, samples = evaluated(url, model, folder, chat=True)
    return {"answers": len(samples), **figures}


def evaluated(
    url: str, model: str, folder: Path, *, chat: bool = False
) -> tuple[dict[str, Any], list[Any]]:
    """The figures of the tasks, and what was answered to each question."""
    with tempfile.TemporaryDirectory() as name:
        tasks = Path(name)
        rows = [{"question": q, "answer": a, "choices": [a, b]} for q, a, b in QUESTIONS]
        data = tasks / "toy.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        kinds = {
            "toy_mc": ("multiple_choice", 'doc_to_choice: "{{choices}}"'),
            "toy_gen": ("generate_until", "generation_kwargs: {until: ['.'], max_gen_toks: 16}"),
        }
        if chat:  # whose API has no log-probabilities of given answers
            del kinds["toy_mc"]
        for task, (kind, more) in kinds.items():
            text = TASK.format(name=task, data=data, kind=kind, more=more)
            (tasks / f"{task}.yaml").write_text(text)
        kind = "local-chat-completions" if chat else "local-completions"
        path = "chat/completions" if chat else "completions"
        given = f"base_url={url}/v1/{path},model={model},tokenizer={folder},num_concurrent=1"
        words = ["--model", kind, "--model_args", given, "--tasks", ",".join(kinds)]
        words += ["--apply_chat_template"] if chat else []
        out = ["--include_path", name, "--output_path", f"{name}/out", "--log_samples"]
        run([sys.executable, "-m", "lm_eval", "run", *words, *out])
        (results,) = (tasks / "out").rglob("results*.json")
        said = [
            json.loads(line)["resps"]
            for path in sorted((tasks / "out").rglob("samples*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        figures = json.loads(results.read_text())["results"]
        numbers = {
            f"{task} {kind.partition(',')[0]}": value
            for task in kinds
            for kind, value in figures[task].items()
            if isinstance(value, float) and "stderr" not in kind
        }
        return numbers, said


def ask_guidellm(url: str, model: str, folder: Path) -> Any:
    with tempfile.TemporaryDirectory() as name:
        words = f"""run --backend kind=openai_http,target={url},model={model}
            --profile kind=concurrent,streams=2 --constraint kind=max_requests,count=6
            --tokenizer kind=hf_auto,model={folder}
            --data kind=synthetic_text,prompt_tokens=32,output_tokens=16
            --output kind=json,path={name}/out.json""".split()
        run([sys.executable, "-m", "guidellm", *words])
        (report,) = Path(name).glob("*.json")
        (one,) = json.loads(report.read_text())["benchmarks"]
        return {"requests": one["metrics"]["request_totals"]}


def ask_aiperf(url: str, model: str, folder: Path) -> Any:
    with tempfile.TemporaryDirectory() as name:
        words = f"""profile --model {model} --url {url} --endpoint-type chat --streaming
            --tokenizer {folder} --concurrency 2 --request-count 6 --isl 32 --osl 16
            --extra-inputs ignore_eos:true --ui none --artifact-dir {name}""".split()
        program = str(Path(sys.executable).with_name("aiperf"))
        run([program, *words], HF_HUB_OFFLINE="")  # with it, it does not find a folder
        (report,) = Path(name).rglob("profile_export_aiperf.json")
        found = json.loads(report.read_text())
        names = ("request_count", "error_request_count", "output_sequence_length")
        return {one: found[one].get("avg") for one in names if found.get(one)}


def run(words: list[str], **more: str) -> None:
    """A client that is a program of its own; what it says is shown where it fails."""
    own = os.environ | OFFLINE | more
    done = subprocess.run(words, env=own, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


CLIENTS: dict[str, tuple[str, Callable[[str, str, Path], Any]]] = {
    "openai": ("openai", ask_openai),
    "langchain-openai": ("langchain_openai", ask_langchain),
    "litellm": ("litellm", ask_litellm),
    "llama-index": ("llama_index", ask_llama_index),
    "instructor": ("instructor", ask_instructor),
    "lm-eval": ("lm_eval", ask_lm_eval),
    "lm-eval chat": ("lm_eval", ask_lm_eval_chat),
    "guidellm": ("guidellm", ask_guidellm),
    "aiperf": ("aiperf", ask_aiperf),
}


def results(url: str, model: str, folder: Path) -> Iterator[tuple[str, Any]]:
    os.environ.update(OFFLINE)
    for name, (module, ask) in CLIENTS.items():
        try:
            yield name, ask(url, model, folder) if find_spec(module) else "is not installed"
        except Exception as error:
            yield name, {"failed": f"{type(error).__name__}: {error}"}


def main(
    url: Annotated[str, typer.Argument(help="Of the server.")],
    model: str = "dflash",
    tokenizer: Annotated[Path, typer.Option(help="A folder, for clients that count.")] = Path(
        "models/embedded/target"
    ),
) -> None:
    """Run every client that is installed against a server."""
    failed = False
    for name, found in results(url, model, tokenizer.resolve()):
        print(f"{name}: {json.dumps(found)}", flush=True)
        failed |= "failed" in found
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
