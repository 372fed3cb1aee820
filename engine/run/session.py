"""From options to a session, and from its prompts to requests, engines and recorded runs."""

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from inspect import signature
from typing import Any, ParamSpec

import torch

from ...models.files import ModelError
from ...ops.draft.sizes import RoundCosts
from ...ops.forward import HostReader
from ...ops.sampling.settings import SamplingRules
from ...states.blend import BlendState, FoldState
from ...states.drafter import Drafter
from ...states.graph.checks import with_drafters
from ...states.graph.graph import Graph, Program
from ...states.graph.plugins import drafter_class
from ...states.machine import Sink
from ...states.manager import BranchStateManager
from ...states.prompt_builder import PromptBuilder
from ...states.request import Request, limit_to_part_, resume_
from ...states.request_table import RunLimits
from ...states.scheduler import Inbox
from ...states.text.documents import CHUNK_TOKENS
from ...states.text.grammar import GrammarError, OutlineGrammar, TokenGrammar
from ...states.text.outline import Outline
from ...states.text.prompts import PromptBook, load_template
from ...states.text.tokens import PromptTokens
from ...states.yaml.source import GraphError, Problem, ProblemCode
from ..chunks.store import CHUNK_BYTES, ChunkStore, chunks_for
from ..errors import UsageError
from ..models import Models, assumed, load_models, run_pools, with_drafter
from ..prepare import job as jobs
from ..prepare.inputs import AS_THE_GRAPH, Prompt, RequestSettings
from ..prepare.options import RunOptions, SessionOptions
from ..record.recorder import Recorder, Write
from .core import EngineCore, Status, StopSignal, drive
from .scoring import costs_of

P = ParamSpec("P")


class Session:
    """A checked graph with its models: builds requests and engines. outline: instead of one that
    the model writes. prompts: encodes questions; by default with the graph's template. chunks: that
    the graph's block `blend` reuses; by default in memory."""

    def __init__(
        self,
        program: Program,
        models: Models,
        *,
        seed: int = 0,
        max_new_tokens: int | None = None,
        outline: Outline | None = None,
        prompts: PromptBook | None = None,
        chunks: ChunkStore | None = None,
    ) -> None:
        graph = program.graph
        skeleton = graph.skeleton
        if graph.drafter.has_model and models.drafter is None:
            reason = f"graph {graph.name!r} needs a {graph.drafter.kind} drafter; none was given"
            raise ModelError(program.source.file, reason)
        self.models = models
        self.seed = seed
        self.outline_drafter: Any = None
        drafter = graph.outline_drafter
        if drafter is not None and drafter.has_model:
            ref = getattr(drafter, "model", None) or jobs.EMBEDDED
            folder = jobs.model_folder(ref, drafter.checkpoint or drafter.kind)
            self.outline_drafter = with_drafter(models, folder, drafter.kind).drafter
        drafter = _completed(graph.drafter, models.drafter)
        outline_drafter = _completed(graph.outline_drafter, self.outline_drafter)
        self.program = with_drafters(program, drafter, outline_drafter)
        graph = self.program.graph
        self.max_new_tokens = max_new_tokens
        self.budget = max_new_tokens or graph.limits.max_new_tokens
        self.outline = outline
        self.sampling = self._sampling()
        self.prompts = prompts or prompt_book(graph, models)
        self.new_matcher = self._outline_grammar()
        self.library = None if graph.blend is None else chunks_for(program, models, chunks)
        documents = skeleton.search_top_k if skeleton is not None else 0
        chunk_tokens = graph.blend.chunk_tokens if graph.blend is not None else CHUNK_TOKENS
        self.reading = PromptBuilder(self.prompts, documents, chunk_tokens)

    def _sampling(self) -> SamplingRules:
        """The graph's rules; raises GraphError for tokens that the model does not have."""
        sampling = self.program.graph.sampling
        size = self.models.target.vocab_size
        problems = []
        for name in ("logit_bias", "banned", "forced"):
            for token in (token for token in getattr(sampling, name) if token >= size):
                text = f"no token {token}: the model has {size} of them"
                place = ("sampling", name)
                problems.append(self.program.source.problem(place, text, ProblemCode.NO_TOKEN))
        if problems:
            raise GraphError(problems)
        return sampling.rules()

    def _outline_grammar(self) -> Callable[[str], Any] | None:
        """By question, the matcher of its outline; None without a grammar."""
        skeleton = self.program.graph.skeleton
        target = self.models.target
        if skeleton is None or not skeleton.grammar or self.outline is not None:
            return None
        try:
            return OutlineGrammar(
                self.models.tokenizer,
                target.vocab_size,
                self.prompts.stop_ids,
                skeleton.max_branches,
                tools=skeleton.tools,
                form=self.prompts.form,
            ).matcher
        except GrammarError as error:  # of the tokenizer: the settings were checked with the graph
            raise ModelError(target.config.path.parent, str(error)) from None

    @cached_property
    def _answers(self) -> TokenGrammar:
        size = self.models.target.vocab_size
        return TokenGrammar(self.models.tokenizer, size, self.prompts.stop_ids)

    def request(self, prompt: Prompt, settings: RequestSettings = AS_THE_GRAPH) -> Request:
        """A request of this graph for one prompt; raises PromptError, GrammarError if no answer can
        match the grammar."""
        skeleton = None if settings.plain else self.program.graph.skeleton
        reading = self.reading
        if prompt.past or prompt.rules:
            reading = replace(reading, prompts=self.prompts.behind(prompt.past, prompt.rules))
        searched = skeleton is not None and skeleton.documents == "branches"
        documents = () if searched else prompt.documents
        reading.check(prompt.documents)
        front = reading.in_front(documents)
        opening = PromptTokens()
        prefix = PromptTokens()
        if settings.token_ids:
            tail = PromptTokens(settings.token_ids)
        elif skeleton is None:
            tail = reading.prompts.plain(prompt.text, front)
            if settings.prefill:
                tail += self.prompts.encode(settings.prefill)
            if self.program.graph.limits.n > 1:  # the last row's logits draw first tokens
                prefix = PromptTokens(tail[:-1], tail.chunks)
                tail = PromptTokens(tail[-1:])
        else:
            prefix, tail = reading.prompts.skeleton(prompt.text, front)
            opening = reading.prompts.opening(prompt.text, front)
        outline = self.outline if skeleton is not None else None
        matcher: Callable[[], Any] | None = None  # of the first branch's text
        if settings.grammar is not None:
            matcher = self._answers.matchers(settings.grammar)
        elif not settings.plain and self.new_matcher is not None:
            matcher = partial(self.new_matcher, prompt.text)
        model_stops = self.prompts.stop_ids
        most = settings.answer_tokens or sys.maxsize
        request = Request(
            key=prompt.key,
            seed=derive_seed(self.seed, prompt.key) if prompt.seed is None else prompt.seed,
            question=prompt.text,
            prefix=prefix,
            tail=tail,
            stop_ids=frozenset((*(() if settings.ignore_eos else model_stops), *settings.stop_ids)),
            budget=min(prompt.max_new_tokens or self.budget, most),
            outline_budget=min(skeleton.max_tokens, most // 2) if skeleton is not None else 0,
            sampling=settings.sampling or self.sampling,
            requested_tokens=prompt.max_new_tokens or self.max_new_tokens,
            answer_tokens=most,
            opening=opening,
            given_outline=outline,
            given_ids=[] if outline is None else list(self.prompts.outline_ids(outline.points)),
            new_matcher=matcher,
            documents=prompt.documents if searched else (),
            cache_salt=prompt.cache_salt,
            closing_ids=frozenset((*model_stops, *settings.stop_ids)),
            samples=self.program.graph.limits.n,
            most_parts=skeleton.max_branches if skeleton is not None else 0,
        )
        if skeleton is not None and skeleton.merge == "attend":
            request.combine = self.prompts.combine()
        if settings.handed is not None:
            limit_to_part_(request, settings.handed)
        if settings.resumed:
            resume_(request, settings.resumed)
        return request

    def start(self, prompts: Iterable[Prompt | Request], sink: Sink) -> EngineCore:
        """An engine over a closed list of prompts or requests, before its first step."""
        core = EngineCore(self.program, self.board(), sink)
        for prompt in prompts:
            request = self.request(prompt) if isinstance(prompt, Prompt) else prompt
            core.manager.lifecycle.submit(request)
        return core

    def board(self, inbox: Inbox | None = None) -> dict[str, Any]:
        """A fresh blackboard with its pools; inbox: the source of requests while the engine runs.
        Raises GraphError if the pools take more memory than is free."""
        graph = self.program.graph
        skeleton = graph.skeleton
        models = self.models
        target = models.target
        if getattr(target, "compiled", None) is not None:
            # Threads of torch spin after a kernel of torch, on cores of the team's threads.
            torch.set_num_threads(1)
        drafter = models.drafter if graph.drafter.has_model else None
        kv, kv_draft, kv_outline, kv_prefix = run_pools(self.program, models, self.outline_drafter)
        sizes = (target.max_positions, target.vocab_size)
        limits = RunLimits(graph, *sizes, self.costs[0], outline_costs=self.costs[1])
        blend = None
        if self.library is not None and graph.blend is not None:  # with counters of its own
            blend = BlendState(graph.blend.settings, replace(self.library))
        fold = None
        if skeleton is not None and skeleton.merge in ("plain", "blend"):
            rope = target.before_rope if skeleton.merge == "blend" else None
            fold = FoldState(self.prompts, rope)
        branches = BranchStateManager(
            kv,
            kv_draft,
            limits,
            self.reading.branch,
            blend=blend,
            fold=fold,
            kv_outline=kv_outline,
            cache_pools=kv_prefix,
            draft_models=(drafter, self.outline_drafter),
        )
        return {
            "branches": branches,
            "inbox": inbox or Inbox(),
            "drafter": branches.drafter,
            "target": target,
            "kv": kv,
            "kv_draft": kv_draft,
            "host": HostReader(),
            "prompts": self.prompts,
            "taps": _taps(branches.drafter, models),
        }

    @cached_property
    def costs(self) -> tuple[RoundCosts | None, RoundCosts | None]:
        """Forward costs for the graph's drafter and for the outlines', measured once."""
        graph = self.program.graph
        first = costs_of(self.models, graph.drafter, self.models.drafter)
        return first, costs_of(self.models, graph.outline_drafter, self.outline_drafter)


def _completed(settings: Any, model: Any) -> Any:
    """A drafter's settings, with what the graph leaves to the checkpoint."""
    if settings is None or not settings.has_model:
        return settings
    return drafter_class(settings.kind).completed(settings, model)


def _taps(drafter: Drafter, models: Models) -> tuple[int, ...]:
    """Which of the target's hidden states the drafters read; sets the columns that each reads."""
    tap_ids = [sorted(getattr(part.model, "tap_ids", ())) for part in drafter.parts]
    taps = sorted({tap for ids in tap_ids for tap in ids})
    size = torch.arange(models.target.hidden_size, device=models.device)
    for part, ids in zip(drafter.parts, tap_ids, strict=True):
        if ids and ids != taps:
            part.columns_F = torch.cat([size + taps.index(tap) * len(size) for tap in ids])
    return tuple(taps)


def derive_seed(seed: int, key: str) -> int:
    """A request's seed from the run's seed and its stable key; never from arrival order."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:8], "big") >> 1


def _opener(kind: Callable[P, SessionOptions]) -> Callable[P, Session]:
    def open_session(*args: P.args, **kwargs: P.kwargs) -> Session:
        """A checked graph with its models loaded; arguments are the options of `specsot run`.
        Missing options come from specsot.yaml. Sets the number of torch threads of the process.
        Raises GraphError, ModelError, UsageError, OutlineError: what cannot be used, and where."""
        return load(jobs.prepare(RunOptions(**asdict(kind(*args, **kwargs)))))

    open_session.__signature__ = signature(kind)  # type: ignore[attr-defined]
    return open_session


open_session = _opener(SessionOptions)


def load(job: jobs.Job, *, packed: bool = True, part: tuple[int, int] = (0, 1)) -> Session:
    """Set torch up, load a job's models (packed, part: as for `load_models`) and tie them to its
    graph; raises UsageError, ModelError, GraphError: what cannot be used, and where."""
    options = job.options
    jobs.set_up_torch(jobs.threads_of(job), options.device)
    target, drafter = jobs.model_folders(job)
    models = load_models(
        target,
        drafter,
        job.program.graph.drafter.kind,
        device=options.device,
        dtype=options.dtype,
        weights=options.weights,
        scan=not options.no_nan_check,
        packed=packed,
        part=part,
    )
    return tie(job, models)


def tie(job: jobs.Job, models: Models) -> Session:
    """A job's graph with loaded models; raises UsageError, ModelError."""
    options = job.options
    chunks = None
    if stop_ids := options.stop_ids:
        size = models.target.vocab_size
        if max(stop_ids) >= size:
            raise UsageError(f"--stop-id {max(stop_ids)}: the model has {size} tokens")
        models = replace(models, stop_ids=tuple(sorted({*models.stop_ids, *stop_ids})))
    if options.cache_dir is not None and job.program.graph.blend is not None:
        chunks = ChunkStore(CHUNK_BYTES, options.cache_dir, options.device)
    session = Session(
        job.program,
        models,
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
        outline=job.outline,
        chunks=chunks,
    )
    notes = assumed(models.target, models.drafter, session.outline_drafter)
    if options.strict and notes:
        raise ModelError(jobs.model_folders(job)[0], f"--strict: {'; '.join(notes)}")
    return session


def prompt_book(graph: Graph, models: Models) -> PromptBook:
    """The graph's template over the model's tokenizer; raises GraphError. By default `embedded`
    for models with the embedded model's chat template; others get the format of the graph, `list`
    by default."""
    skeleton = graph.skeleton
    name = "auto" if skeleton is None else skeleton.template
    if name == "auto":
        file = jobs.embedded_folder("target") / "chat_template.jinja"
        chat = models.tokenizer.chat_template
        name = "instruct" if skeleton is None or skeleton.format == "fields" else "list"
        if chat and chat == file.read_text(encoding="utf-8"):
            name = "list" if skeleton is not None and skeleton.format == "list" else "embedded"
    template = load_template(name)
    book = partial(PromptBook, models.tokenizer, template, stop_ids=models.stop_ids)
    if skeleton is None:
        return book()
    if skeleton.format not in ("auto", template.format):
        message = f"its outlines are {template.format!r}, the graph says {skeleton.format!r}"
        raise GraphError([Problem(template.name, "template.format", message, ProblemCode.TEXTS)])
    return book(
        share=skeleton.share,
        part=skeleton.part,
        max_branches=skeleton.max_branches,
        tools=skeleton.tools,
    )


def perform(
    session: Session,
    prompts: Sequence[Prompt | Request],
    *,
    write: Write | None = None,
    stop: StopSignal | None = None,
    max_rounds: int | None = None,
) -> tuple[EngineCore, Recorder, Status]:
    """A recorded run without a view, driven to its end, to `max_rounds` (by default the graph's
    limit) or to a stop signal."""
    core, recorder = recorded(session, prompts, write)
    limit = max_rounds or session.program.graph.limits.max_rounds
    status = drive(core, recorder, max_rounds=limit, stop=stop)
    recorder.flush()
    return core, recorder, status


def recorded(
    session: Session, prompts: Sequence[Prompt | Request], write: Write | None
) -> tuple[EngineCore, Recorder]:
    """A run before its first step, with the recorder of its events."""
    recorder = Recorder(session.prompts.decode, write)
    core = session.start(prompts, recorder)
    recorder.attach(core)
    return core, recorder
