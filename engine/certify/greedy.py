"""Greedy equality: every branch holds the tokens that transformers decodes behind its context."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...states.requests.branch import Branch, Finish, Request
from ...states.requests.samplers import rules_of
from ..bench.sides import ComparedPrompt, Side, answer_all
from ..prepare.inputs import Prompt
from ..prepare.job import Job
from ..record.report import answers_of
from ..run.contexts import contexts
from ..run.runner import Halt
from .teacher import Repeat, TeacherForcing, TeacherTally
from .toys import Check
from .workbench import Bench

GREEDY = "sampling.temperature=0"


def greedy_checks(bench: Bench) -> Iterator[Check]:
    """The graph as it is, but greedy: by teacher forcing, and by `generate` on a few prompts."""
    job = bench.changed(GREEDY, tokens=bench.extent.tokens)
    side, teacher = bench.side(job), TeacherForcing(bench.reference, bench.dtype)
    forced, generated, asked = TeacherTally(), TeacherTally(), []
    for one in answered(bench, side, bench.prompts):
        asked.append(one)
        request, repeat = one.runs["A"].request, repeated(bench, job, one.prompt)
        teacher.hold(side, request, forced, repeat)
        if len(asked) <= bench.extent.generated:
            bench.tell(f"generate: prompt {len(asked)} ...")
            _hold_generated(bench, side, request, generated, repeat)
    text = f"greedy decoding of transformers, token by token: {forced.words}"
    yield Check("greedy/teacher forcing", forced.good, forced.figures, text)
    text = f"`generate` of transformers, outlines with their grammar: {generated.words}"
    yield Check("greedy/generate", generated.good, generated.figures, text)
    yield _texts(side, asked)


def answered(bench: Bench, side: Side, prompts: Sequence[Prompt]) -> Iterator[ComparedPrompt]:
    """Every prompt as a run of its own."""
    return answer_all([side], prompts, Halt(), bench.tell)


def repeated(bench: Bench, job: Job, prompt: Prompt) -> Repeat | None:
    """What a numeric tie needs: the same run in float64 holds to transformers in float64.

    None in float64, where nothing may differ.
    """
    if bench.dtype == "float64":
        return None
    known: list[bool] = []

    def repeat() -> bool:
        if not known:
            options = replace(job.options, dtype="float64")
            side, tally = bench.side(replace(job, options=options)), TeacherTally()
            for one in answered(bench, side, [prompt]):
                teacher = TeacherForcing(bench.reference, "float64")
                teacher.hold(side, one.runs["A"].request, tally, None)
            known.append(tally.good)
        return known[0]

    return repeat


def _hold_generated(
    bench: Bench, side: Side, request: Request, tally: TeacherTally, repeat: Repeat | None
) -> None:
    """Branches whose rules `generate` has too; others are held by teacher forcing alone."""
    tally.requests += 1
    teacher = TeacherForcing(bench.reference, bench.dtype)
    for branch, context in contexts(request, side.session.prompts):
        simple = branch.matcher is not None or rules_of(branch).plain
        if not simple or branch.finish not in (Finish.STOP, Finish.LENGTH):
            continue
        written = bench.reference.greedy(branch, context, bench.dtype)
        if written == branch.tokens or _stopped(branch, written):
            tally.branches += 1
            tally.tokens += len(branch.tokens)
            continue
        before = len(tally.wrong), tally.ties
        teacher.hold_branch(branch, context, tally, repeat)
        if before == (len(tally.wrong), tally.ties):  # one forward and many do not agree
            tally.wrong.append(f"{branch.name}: `generate` writes {_parted(branch, written)}")


def _stopped(branch: Branch, written: Sequence[int]) -> bool:
    ends = branch.finish is Finish.STOP and written[-1] in branch.request.stop_ids
    return ends and written[:-1] == branch.tokens


def _parted(branch: Branch, written: Sequence[int]) -> str:
    pairs = zip(branch.tokens, written, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return f"{len(written)} tokens, the answer has {len(branch.tokens)}"
    return f"{written[place]} at {place + 1}, the answer has {branch.tokens[place]}"


def _texts(side: Side, asked: Sequence[ComparedPrompt]) -> Check:
    """What people read holds no text of control tokens."""
    markers = list(getattr(side.session.models.tokenizer, "all_special_tokens", ()))
    requests = [one.runs["A"].request for one in asked]
    answers = answers_of(requests, side.session.prompts)
    texts = [section.text for answer in answers for section in answer.sections]
    texts += [answer.text for answer in answers]
    wrong = sorted({marker for marker in markers for text in texts if marker in text})
    text = f"no text of {len(markers)} control tokens in {len(texts)} texts"
    text += f"; found {', '.join(wrong)}" if wrong else ""
    figures = {"texts": len(texts), "markers": len(markers), "found": len(wrong)}
    return Check("greedy/no marker text", not wrong, figures, text)
