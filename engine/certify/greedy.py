"""Greedy equality: every branch holds the tokens that transformers decodes behind its context."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...states.requests.branch import Branch, Finish, Request
from ...states.requests.samplers import rules_of
from ..bench.sides import Side, answer_all
from ..prepare.inputs import Prompt
from ..prepare.job import Job
from ..record.report import answers_of
from ..run.contexts import contexts
from ..run.runner import Halt
from .teacher import Repeat, TeacherTally, repeat_in_float64
from .workbench import Bench, Check

GREEDY = "sampling.temperature=0"


def greedy_checks(bench: Bench) -> Iterator[Check]:
    """The graph as it is, but greedy: by teacher forcing, and by `generate` on a few prompts."""
    job, requests = bench.changed(GREEDY, tokens=bench.extent.tokens), list[Request]()
    forced, generated = (TeacherTally(bench.reference, bench.dtype) for _ in range(2))
    side = bench.side(job)
    for prompt, request in answered(bench, side, bench.prompts):
        requests.append(request)
        repeat = repeated(bench, job, prompt)
        forced.hold(side, request, repeat)
        if len(requests) <= bench.extent.generated:
            bench.tell(f"generate: prompt {len(requests)} ...")
            _hold_generated(side, request, generated, repeat)
    title = "greedy decoding of transformers, token by token"
    yield forced.check("greedy/teacher forcing", title)
    title = "`generate` of transformers, outlines with their grammar"
    yield generated.check("greedy/generate", title)
    yield _texts(side, requests)


def answered(
    bench: Bench, side: Side, prompts: Sequence[Prompt]
) -> Iterator[tuple[Prompt, Request]]:
    """Every prompt as a run of its own."""
    for one in answer_all([side], prompts, Halt(), bench.tell):
        yield one.prompt, one.runs["A"].request


def repeated(bench: Bench, job: Job, prompt: Prompt) -> Repeat | None:
    """The same prompt in float64."""

    def rerun() -> Iterator[tuple[Side, Request]]:
        side = bench.side(replace(job, options=replace(job.options, dtype="float64")))
        return ((side, request) for _, request in answered(bench, side, [prompt]))

    return repeat_in_float64(bench, rerun)


def _hold_generated(
    side: Side, request: Request, tally: TeacherTally, repeat: Repeat | None
) -> None:
    """Branches whose rules `generate` has too; others are held by teacher forcing alone."""
    tally.prompts += 1
    for branch, context in contexts(request, side.session.prompts):
        simple = branch.matcher is not None or rules_of(branch).plain
        if not simple or branch.finish not in (Finish.STOP, Finish.LENGTH):
            continue
        text, _ = tally.reference.generate(branch, context, tally.dtype)
        ended = branch.finish is Finish.STOP and text[-1] in branch.request.stop_ids
        if branch.tokens in (text, text[:-1] if ended else text):
            tally.branches += 1
            tally.tokens += len(branch.tokens)
            continue
        before = len(tally.wrong), tally.ties
        tally.hold_branch(branch, context, repeat)
        if before == (len(tally.wrong), tally.ties):  # one forward and many do not agree
            tally.wrong.append(f"{branch.name}: `generate` writes {_difference(branch, text)}")


def _difference(branch: Branch, text: Sequence[int]) -> str:
    for place, (own, token) in enumerate(zip(branch.tokens, text, strict=False), 1):
        if own != token:
            return f"{token} at {place}, the answer has {own}"
    return f"{len(text)} tokens, the answer has {len(branch.tokens)}"


def _texts(side: Side, requests: Sequence[Request]) -> Check:
    """What people read holds no text of control tokens."""
    markers = list(getattr(side.session.models.tokenizer, "all_special_tokens", ()))
    answers = answers_of(requests, side.session.prompts)
    texts = [section.text for answer in answers for section in answer.sections]
    texts += [answer.text for answer in answers]
    wrong = sorted({marker for marker in markers for text in texts if marker in text})
    text = f"no text of {len(markers)} control tokens in {len(texts)} texts"
    text += f"; found {', '.join(wrong)}" if wrong else ""
    figures = {"texts": len(texts), "markers": len(markers), "found": len(wrong)}
    return Check("greedy/no marker text", not wrong, figures, text)
