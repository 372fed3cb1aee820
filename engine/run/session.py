"""From a graph, models and prompts to a run: everything allocated once, nothing global."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...models.files import ModelError
from ...ops.draft.costs import RoundCosts
from ...ops.host import HostReader
from ...ops.sampling.settings import SamplingRules
from ...states.blend import BlendState
from ...states.drafting import Drafting, OutlineSide
from ...states.fold import FoldState
from ...states.graph.graph import Graph
from ...states.graph.program import Program
from ...states.machine import Run
from ...states.manager import BranchStateManager
from ...states.migration import go_on_, hand_over_
from ...states.prompt_builder import PromptBuilder
from ...states.request import Request
from ...states.request_table import RunLimits
from ...states.scheduler import Inbox
from ...states.text.documents import CHUNK_TOKENS
from ...states.text.grammar import GrammarError, OutlineGrammar, OutlineMatcher
from ...states.text.outline import Outline
from ...states.text.prompt_tokens import PromptTokens
from ...states.text.prompts import PromptBook
from ...states.text.schema_grammar import SchemaGrammar
from ...states.trace import Sink
from ...states.yaml.codes import ProblemCode
from ...states.yaml.source import GraphError
from ..chunks.store import ChunkLibrary, ChunkStore, chunks_for
from ..models import Models, with_drafter
from ..pools import RunPools
from ..prepare.environment import model_folder
from ..prepare.inputs import Prompt
from ..prepare.job import EMBEDDED
from ..prepare.request_settings import AS_THE_GRAPH, RequestSettings
from .books import prompt_book
from .round_costs import costs_of


class Session:
    """A checked graph with its models: makes runs, and requests for them.

    Args:
        outline: a given outline, used instead of letting the model write one.
        prompts: how questions become token ids; by default the graph's template.
        chunks: where chunks of documents are kept that the graph's block `blend` reuses; by default
            in memory, for all runs of this session.
    """

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
        if graph.drafter.has_model and models.drafter is None:
            reason = f"graph {graph.name!r} needs a {graph.drafter.kind} drafter; none was given"
            raise ModelError(program.source.file, reason)
        self.program = program
        self.models = models
        self.seed = seed
        self.outline_drafter = self._outline_drafter()
        self.asked = max_new_tokens
        self.budget = max_new_tokens or graph.limits.max_new_tokens
        self.outline = outline
        self.sampling = self._sampling()
        self.prompts = prompts or prompt_book(graph, models)
        self.new_matcher = self._grammar(graph)
        self._schemas: SchemaGrammar | None = None
        self._measured: list[RoundCosts | None] = []
        self.maker = chunks_for(program, models, chunks)
        documents = graph.skeleton.search_top_k if graph.skeleton is not None else 0
        most = graph.blend.chunk_tokens if graph.blend is not None else CHUNK_TOKENS
        self.reading = PromptBuilder(self.prompts, documents, most)

    def _outline_drafter(self) -> Any:
        """The drafter that outlines have for themselves, loaded; None without one."""
        skeleton = self.program.graph.skeleton
        if skeleton is None or skeleton.drafter is None or not skeleton.drafter.has_model:
            return None
        kind = skeleton.drafter.kind
        folder = model_folder(getattr(skeleton.drafter, "model", None) or EMBEDDED, kind)
        return with_drafter(self.models, folder, kind).drafter

    def _sampling(self) -> SamplingRules:
        """The graph's rules, whose token ids the model must know."""
        sampling = self.program.graph.sampling
        source = self.program.source
        size = self.models.target.vocab_size
        unknown = [
            (name, token)
            for name in ("logit_bias", "banned", "forced")
            for token in getattr(sampling, name)
            if token >= size
        ]
        reason = f"the model has {size} of them"
        wrong = [
            source.problem(("sampling", name), f"no token {token}: {reason}", ProblemCode.NO_TOKEN)
            for name, token in unknown
        ]
        if wrong:
            raise GraphError(wrong)
        return sampling.rules()

    def _grammar(self, graph: Graph) -> Callable[[str], Any] | None:
        skeleton = graph.skeleton
        target = self.models.target
        if skeleton is None or not skeleton.grammar or self.outline is not None:
            return None
        size = target.vocab_size
        stops = self.prompts.stop_ids
        try:
            tokenizer = self.models.tokenizer
            most = skeleton.max_branches
            form = self.prompts.form
            return OutlineGrammar(tokenizer, size, stops, most, skeleton.tools, form).matcher
        except GrammarError as error:  # of the tokenizer: the settings were checked with the graph
            raise ModelError(target.config.path.parent, str(error)) from None

    def request(self, prompt: Prompt, settings: RequestSettings = AS_THE_GRAPH) -> Request:
        """A request of this graph for one prompt.

        Raises:
            PromptError: the text cannot be a prompt, with the reason.
            GrammarError: no answer can be held to the schema.
        """
        skeleton = None if settings.plain else self.program.graph.skeleton
        reading = self.reading
        if prompt.past or prompt.rules:
            reading = replace(reading, prompts=self.prompts.behind(prompt.past, prompt.rules))
        searched = skeleton is not None and skeleton.documents == "branches"
        documents = () if searched else prompt.documents
        reading.check(prompt.documents)
        opening = PromptTokens()
        if settings.token_ids:
            prefix = PromptTokens()
            tail = PromptTokens(settings.token_ids)
        elif skeleton is None:
            prefix = PromptTokens()
            tail = reading.plain(prompt.text, documents)
            if self.program.graph.limits.n > 1:  # the last row's logits draw first tokens
                prefix = PromptTokens(tail[:-1], tail.chunks)
                tail = PromptTokens(tail[-1:])
        else:
            prefix, tail = reading.skeleton(prompt.text, documents)
            opening = reading.opening(prompt.text, documents)
        outline = self.outline if skeleton is not None else None
        attends = skeleton is not None and skeleton.merge == "attend"
        request = Request(
            prompt.key,
            derive_seed(self.seed, prompt.key) if prompt.seed is None else prompt.seed,
            prompt.text,
            prefix,
            tail,
            frozenset(self._stops(settings)),
            prompt.max_new_tokens or self.budget,
            skeleton.max_tokens if skeleton is not None else 0,
            settings.sampling or self.sampling,
            prompt.max_new_tokens or self.asked,
            opening=opening,
            given=outline,
            given_ids=[] if outline is None else list(self.prompts.outline_ids(outline.points)),
            new_matcher=self._matcher(prompt, settings),
            documents=prompt.documents if searched else (),
            cache_salt=prompt.cache_salt,
            closing_ids=frozenset((*self.prompts.stop_ids, *settings.stop_ids)),
            samples=self.program.graph.limits.n,
            combine=self.prompts.combine() if attends else None,
            most_parts=skeleton.max_branches if skeleton is not None else 0,
        )
        if settings.handed is not None:
            hand_over_(request, settings.handed)
        if settings.begun:
            go_on_(request, settings.begun)
        return request

    def _stops(self, settings: RequestSettings) -> Iterable[int]:
        own = () if settings.ignore_eos else self.prompts.stop_ids
        return (*own, *settings.stop_ids)

    def _matcher(
        self, prompt: Prompt, settings: RequestSettings
    ) -> Callable[[], OutlineMatcher] | None:
        """What the first branch is held to, if anything."""
        if settings.schema is not None:
            if self._schemas is None:
                size = self.models.target.vocab_size
                stops = self.prompts.stop_ids
                self._schemas = SchemaGrammar(self.models.tokenizer, size, stops)
            return self._schemas.matchers(settings.schema)
        if settings.plain or self.new_matcher is None:
            return None
        return partial(self.new_matcher, prompt.text)

    def start(self, prompts: Iterable[Prompt], sink: Sink) -> Run:
        """A run over these prompts, not yet advanced; more can be submitted while it goes."""
        board = self.board()
        for prompt in prompts:
            board["branches"].submit(self.request(prompt))
        return Run(self.program, board, sink)

    def board(self, inbox: Inbox | None = None) -> dict[str, Any]:
        """A fresh blackboard: pools allocated once, at fixed addresses.

        Args:
            inbox: where requests come from while the run goes; by default none come.
        """
        graph = self.program.graph
        models = self.models
        drafter = models.drafter if graph.drafter.has_model else None
        outlines = graph.skeleton.drafter if graph.skeleton is not None else None
        pools = RunPools.of(self.program, models, self.outline_drafter)
        limits = RunLimits(
            graph.layout,
            graph.drafter,
            graph.skeleton is None or graph.skeleton.share == "outline",
            models.target.max_positions,
            models.target.vocab_size,
            outlines,
            graph.scheduler,
            graph.skeleton is not None and graph.skeleton.merge == "attend",
            *self._costs(),
        )
        blend = None
        if self.maker is not None and graph.blend is not None:
            library = ChunkLibrary(self.maker, graph.blend.collect)
            blend = BlendState(graph.blend.settings, library)
        fold = None
        if graph.skeleton is not None and graph.skeleton.merge in ("plain", "blend"):
            blends = graph.skeleton.merge == "blend"
            fold = FoldState(self.prompts, models.target.before_rope if blends else None)
        more = blend, fold, graph.beam, pools.kv_outline, pools.kept
        branches = BranchStateManager(pools.kv, pools.kv_draft, limits, self.reading.branch, *more)
        drafting, *others = branches.draftings
        side = OutlineSide(self.outline_drafter, pools.kv_outline, others[0]) if others else None
        return {
            "branches": branches,
            "inbox": inbox or Inbox(),
            "drafting": drafting,
            "outline_side": side,
            "target": models.target,
            "drafter": drafter,
            "kv": pools.kv,
            "kv_draft": pools.kv_draft,
            "host": HostReader(),
            "prompts": self.prompts,
            "taps": _taps(branches.draftings, (drafter, self.outline_drafter), models),
        }

    def _costs(self) -> tuple[RoundCosts | None, RoundCosts | None]:
        """What forwards cost, of each drafter that chooses by it; measured once."""
        skeleton = self.program.graph.skeleton
        outlines = None if skeleton is None else skeleton.drafter
        sides = (self.program.graph.drafter, self.models.drafter), (outlines, self.outline_drafter)
        if not self._measured:
            self._measured += [
                None if block is None else costs_of(self.models, block, drafter)
                for block, drafter in sides
            ]
        first, second = self._measured
        return first, second


def _taps(
    draftings: Sequence[Drafting], drafters: Sequence[Any], models: Models
) -> tuple[int, ...]:
    """Which of the target's hidden states the drafters read; each is told which are its own."""
    wanted = [sorted(getattr(drafter, "tap_ids", ())) for drafter in drafters[: len(draftings)]]
    taps = sorted({tap for own in wanted for tap in own})
    size = torch.arange(models.target.hidden_size, device=models.device)
    for drafting, own in zip(draftings, wanted, strict=True):
        if own and own != taps:
            columns = [size + taps.index(tap) * len(size) for tap in own]
            drafting.memory.columns_F = torch.cat(columns)
    return tuple(taps)


def derive_seed(seed: int, key: str) -> int:
    """A request's own seed from the run's seed and its stable key; never from arrival order."""
    text = f"{seed}/{key}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
