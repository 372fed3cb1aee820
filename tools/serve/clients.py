"""Real clients against a running server: each that is installed, with what it found.

`python -m tools.serve.clients http://127.0.0.1:8000 --model dflash --tokenizer FOLDER`
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

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
)


def ask_openai(url: str, model: str, folder: Path) -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("SPECSOT_API_KEY", "none"))
    said: Any = [{"role": "user", "content": QUESTION}]
    whole = client.chat.completions.create(model=model, messages=said, max_tokens=24)
    stream = client.chat.completions.create(model=model, messages=said, max_tokens=24, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert text == whole.choices[0].message.content and text
    return {"same text as a stream": True, "tokens": whole.usage and whole.usage.completion_tokens}


def ask_langchain(url: str, model: str, folder: Path) -> Any:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, max_tokens=24)
    whole = chat.invoke(QUESTION)
    text = "".join(one.content for one in chat.stream(QUESTION))
    assert text == whole.content and text
    return {"same text as a stream": True, "usage": whole.usage_metadata["output_tokens"]}


def ask_litellm(url: str, model: str, folder: Path) -> Any:
    import litellm

    said = [{"role": "user", "content": QUESTION}]
    more = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 24}
    whole = litellm.completion(model=f"openai/{model}", messages=said, **more)
    parts = litellm.completion(model=f"openai/{model}", messages=said, stream=True, **more)
    text = "".join(one.choices[0].delta.content or "" for one in parts)
    assert text == whole.choices[0].message.content and text
    return {"same text as a stream": True}


def ask_lm_eval(url: str, model: str, folder: Path) -> Any:
    """Two toy tasks: a choice by log-probability, and a text up to a stop."""
    with tempfile.TemporaryDirectory() as name:
        tasks = Path(name)
        rows = [{"question": q, "answer": a, "choices": [a, b]} for q, a, b in QUESTIONS]
        data = tasks / "toy.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        kinds = {
            "toy_mc": ("multiple_choice", 'doc_to_choice: "{{choices}}"'),
            "toy_gen": ("generate_until", "generation_kwargs: {until: ['.'], max_gen_toks: 16}"),
        }
        for task, (kind, more) in kinds.items():
            text = TASK.format(name=task, data=data, kind=kind, more=more)
            (tasks / f"{task}.yaml").write_text(text)
        given = f"base_url={url}/v1/completions,model={model},tokenizer={folder},num_concurrent=1"
        words = ["--model", "local-completions", "--model_args", given, "--tasks", ",".join(kinds)]
        out = ["--include_path", str(tasks), "--output_path", str(tasks / "out")]
        done = run([sys.executable, "-m", "lm_eval", "run", *words, *out])
        (results,) = (tasks / "out").rglob("results*.json")
        found = json.loads(results.read_text())["results"]
        return {"ended": done, **{k: v for k, v in found.items() if k in kinds}}


def ask_guidellm(url: str, model: str, folder: Path) -> Any:
    with tempfile.TemporaryDirectory() as name:
        words = f"""run --backend kind=openai_http,target={url},model={model}
            --profile kind=concurrent,streams=2 --constraint kind=max_requests,count=6
            --tokenizer kind=hf_auto,model={folder}
            --data kind=synthetic_text,prompt_tokens=32,output_tokens=16
            --output kind=json,path={name}/out.json""".split()
        return {"ended": run([sys.executable, "-m", "guidellm", *words])}


def run(words: list[str]) -> int:
    return subprocess.run(words, env=os.environ | OFFLINE, timeout=600, check=True).returncode


CLIENTS: dict[str, tuple[str, Callable[[str, str, Path], Any]]] = {
    "openai": ("openai", ask_openai),
    "langchain-openai": ("langchain_openai", ask_langchain),
    "litellm": ("litellm", ask_litellm),
    "lm-eval": ("lm_eval", ask_lm_eval),
    "guidellm": ("guidellm", ask_guidellm),
}


def results(url: str, model: str, folder: Path) -> Iterator[tuple[str, Any]]:
    os.environ.update(OFFLINE)
    for name, (module, ask) in CLIENTS.items():
        yield name, ask(url, model, folder) if find_spec(module) else "is not installed"


def main(
    url: Annotated[str, typer.Argument(help="Of the server.")],
    model: str = "dflash",
    tokenizer: Annotated[Path, typer.Option(help="A folder, for clients that count.")] = Path(
        "models/embedded/target"
    ),
) -> None:
    """Run every client that is installed against a server."""
    for name, found in results(url, model, tokenizer.resolve()):
        print(f"{name}: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    typer.run(main)
