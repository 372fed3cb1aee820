"""Time per generated token of graphs against transformers' `generate`, prompt by prompt.

    python -m tools.smollm2.speed --graph eagle --graph bim_plain --graph bim_eagle \\
        --prompts questions.jsonl --count 6 --dtype bfloat16 --threads 2

For every drawn prompt each side answers in turn, in another order each time, so that drifts of the
machine hit all alike. A side's ratio is the median over prompts of `generate`'s time per token over
its own; of outlined graphs everything counts, the outline and its prompt included. GRAPH@SET,SET...
has settings of its own, as in `specsot compare`. `tau` is tokens per branch and round.

With --stay each graph is an engine that answers all prompts, the one that warms it up among them:
what the prompts begin with alike, as the examples of an outline's template, it reads once."""

import json
from dataclasses import dataclass, field
from random import Random
from statistics import median
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM

from specsot.engine.limits import cpu_share, disturbance
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.record.metrics import Meter
from specsot.engine.run.engine import Engine
from specsot.engine.run.session import Session, perform

from .asked import arguments, drawn, session

BASE = "transformers generate"


@dataclass
class Timed:
    """What one side took: seconds and tokens of each prompt; parts that its outlines had."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)

    @property
    def per_token(self) -> list[float]:
        return [s / max(t, 1) for s, t in zip(self.seconds, self.tokens, strict=True)]


class Generate:
    """Plain greedy decoding by transformers, one sequence with its cache."""

    def __init__(self, session: Session, dtype: str, budget: int) -> None:
        folder = session.models.target.config.path.parent
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model, self.session, self.budget = model.train(False), session, budget

    def answer(self, prompt: Prompt, timed: Timed) -> None:
        request = self.session.request(prompt)
        ids = torch.tensor([[*request.prefix, *request.tail]])
        began = perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=self.budget,
                eos_token_id=list(self.session.models.stop_ids),
                pad_token_id=0,
            )
        timed.seconds.append(perf_counter() - began)
        timed.tokens.append(out.shape[1] - ids.shape[1])


def answer(session: Session, prompt: Prompt, timed: Timed) -> None:
    """One prompt through a graph."""
    began = perf_counter()
    run, recorder, _ = perform(session, [prompt])
    timed.seconds.append(perf_counter() - began)
    request = run.board["branches"].requests[0]
    branches = list(request.all_branches())
    timed.tokens.append(sum(len(branch.tokens) for branch in branches))
    timed.parts.append(len(request.branches))
    timed.meter.add(recorder.meter)
    run.close()


def answer_by(engine: Engine, prompt: Prompt, timed: Timed) -> None:
    """One prompt through a graph that stays."""
    began = perf_counter()
    answer = engine.submit(prompt).result()
    timed.seconds.append(perf_counter() - began)
    timed.tokens.append(
        len(answer.outline_tokens) + sum(len(section.tokens) for section in answer.sections)
    )
    timed.parts.append(len(answer.sections))


def main() -> None:
    args = arguments(__doc__, count=6)
    *prompts, warmup = drawn(args, more=1)
    generate = Generate(session(args, "autoregressive"), args.dtype, args.tokens)
    sides = {side: session(args, side) for side in args.graph}
    engines = {name: Engine(side, threaded=False) for name, side in sides.items() if args.stay}
    timed: dict[str, Timed] = {name: Timed() for name in (BASE, *sides)}
    with torch.inference_mode():
        shares = []
        for number, prompt in enumerate([warmup, *prompts]):
            names = list(timed)
            Random(number).shuffle(names)
            shares.append(cpu_share())
            for name in names:
                own = timed[name] if number else Timed()
                if name == BASE:
                    generate.answer(prompt, own)
                elif name in engines:
                    answer_by(engines[name], prompt, own)
                else:
                    answer(sides[name], prompt, own)
            print(f"prompt {number} of {args.count}", flush=True)
    print("| side | ms per token | ratio | tau | tokens | parts |\n|---|---|---|---|---|---|")
    base = timed[BASE].per_token
    document = {"cpu_share": median(shares), **vars(args)}
    for name, own in timed.items():
        ratio = median(b / s for b, s in zip(base, own.per_token, strict=True))
        tau = f"{own.meter.tau_step:.2f}" if own.meter.rounds else ""
        parts = f"{sum(own.parts) / len(own.parts):.1f}" if own.parts else ""
        ms = 1e3 * median(own.per_token)
        print(f"| {name} | {ms:.1f} | {ratio:.2f} | {tau} | {sum(own.tokens)} | {parts} |")
    print(json.dumps(document, default=str))
    print(disturbance(median(shares)) or "nobody else used the machine")


if __name__ == "__main__":
    main()
