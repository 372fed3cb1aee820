"""Prometheus metrics of a server, under specsot's names and optionally vLLM's.

Labels are graphs, replicas, states and reasons; they never hold text of requests.
"""

from collections import Counter as Tallied
from collections.abc import Iterator
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...workers.link import LinkState
from ...workers.protocol import Ended
from ...workers.router import DRAINING, Router

SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LONG = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
GAUGES = {  # of an engine: our name, vLLM's, where the number is
    "requests_running": ("num_requests_running", "running", "Requests that have begun."),
    "requests_waiting": ("num_requests_waiting", "waiting", "Requests that have not begun."),
    "branches_running": ("", "branches", "Branches decoded side by side."),
    "kv_slots_used": ("", "slots", "Slots of the target's pool in use."),
    "kv_slots": ("", "capacity", "Slots of the target's pool."),
}
REPLICA_STATES = (LinkState.READY, LinkState.STARTING, DRAINING, LinkState.DEAD)
COUNTERS = {
    "forwards": ("", "forwards", "Forwards of the target."),
    "steps": ("", "steps", "Steps of the engine."),
    "committed_tokens": ("", "tokens", "Tokens that forwards committed."),
    "draft_tokens": ("spec_decode_num_draft_tokens", "drafted", "Drafted tokens."),
    "accepted_tokens": ("spec_decode_num_accepted_tokens", "accepted", "Drafts accepted."),
    "recovered": ("", "recovered", "Times that requests were run again after a fault."),
    "prefix_queries": ("prefix_cache_queries", "prefix_asked", "Prompt tokens looked up."),
    "prefix_hits": ("prefix_cache_hits", "prefix_reused", "Prompt tokens found."),
}


class EngineCollector:
    """The counts that the engines reported last."""

    def __init__(self, link: Router, prefix: str) -> None:
        self._link = link
        self._prefix = prefix
        self._vllm = prefix == "vllm"

    def collect(self) -> Iterator[Metric]:
        label = "model_name" if self._vllm else "graph"
        kinds: list[tuple[Any, Any]] = [
            (GaugeMetricFamily, GAUGES),
            (CounterMetricFamily, COUNTERS),
        ]
        for family, table in kinds:
            for specsot_name, (vllm_name, field, doc) in table.items():
                name = vllm_name if self._vllm else specsot_name
                if name:
                    metric = family(f"{self._prefix}:{name}", doc, labels=[label])
                    for graph, counts in self._link.counts.items():
                        metric.add_metric([graph], counts[field])
                    yield metric
        yield from self._derived(label)

    def _derived(self, label: str) -> Iterator[Metric]:
        doc = "Share of the target's pool in use."
        name = "kv_cache_usage_perc" if self._vllm else "kv_usage"
        usage = GaugeMetricFamily(f"{self._prefix}:{name}", doc, labels=[label])
        name = "spec_decode_num_accepted_tokens_per_pos" if self._vllm else "accepted_at"
        doc = "Drafts accepted at each place of a path."
        places = CounterMetricFamily(f"{self._prefix}:{name}", doc, labels=[label, "position"])
        for graph, counts in self._link.counts.items():
            usage.add_metric([graph], counts["slots"] / max(counts["capacity"], 1))
            for place, count in enumerate(counts["positions"][:64]):
                places.add_metric([graph, str(place)], count)
        yield usage
        yield places
        if not self._vllm:
            name = "specsot:requests_open"
            doc = "Answers that somebody waits for."
            yield GaugeMetricFamily(name, doc, value=self._link.open)
            yield from self._replicas()

    def _replicas(self) -> Iterator[Metric]:
        facts = self._link.replicas
        states = Tallied(replica.state for replica in facts)
        many = GaugeMetricFamily("specsot:replicas", "Processes that decode.", labels=["state"])
        doc = "Tokens that a replica is expected to write."
        tokens = GaugeMetricFamily("specsot:replica_tokens", doc, labels=["replica"])
        doc = "Tokens that a replica has written since it was started."
        wrote = GaugeMetricFamily("specsot:replica_written_tokens", doc, labels=["replica"])
        doc = "Times that a replica was started again."
        again = CounterMetricFamily("specsot:replica_restarts", doc, labels=["replica"])
        doc = "Times that requests went on in another replica."
        yield CounterMetricFamily("specsot:request_reruns", doc, value=self._link.reruns)
        for state in REPLICA_STATES:
            many.add_metric([state], states[state])
        for replica in facts:
            tokens.add_metric([replica.name], replica.tokens)
            wrote.add_metric([replica.name], replica.written)
            again.add_metric([replica.name], replica.restarts)
        yield from (many, tokens, wrote, again)


class ServerMetrics:
    """Metrics of the HTTP process and of the engines behind it.

    Args:
        link: None without an engine. vllm: also use vLLM's names.
    """

    def __init__(self, link: Router | None, *, vllm: bool = False) -> None:
        self.registry = CollectorRegistry()
        if link is not None:
            self.registry.register(EngineCollector(link, "specsot"))
        if link is not None and vllm:
            self.registry.register(EngineCollector(link, "vllm"))
        self._sides = [_Side(self.registry, "specsot", "graph")]
        if vllm:
            self._sides.append(_Side(self.registry, "vllm", "model_name"))
        self.responses = Counter(
            "specsot:responses", "Answers by status.", ["status"], registry=self.registry
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def watch(self, graph: str) -> "Stopwatch":
        """Begins to measure one choice."""
        return Stopwatch(self, graph)

    def rejected(self, reason: str) -> None:
        for side in self._sides:
            side.rejected.labels(reason).inc()

    def finished(self, graph: str, finish: str) -> None:
        for side in self._sides:
            side.ended.labels(graph, finish).inc()

    @property
    def sides(self) -> "list[_Side]":
        return self._sides


class _Side:
    """The histograms and counters under one prefix."""

    def __init__(self, registry: CollectorRegistry, prefix: str, label: str) -> None:
        def histogram(name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{prefix}:{name}", doc, [label], buckets=buckets, registry=registry)

        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(f"{prefix}:{name}", doc, labels, registry=registry)

        self.first = histogram("time_to_first_token_seconds", "Until the first text.", LONG)
        self.between = histogram("inter_token_latency_seconds", "Between tokens.", SHORT)
        self.whole = histogram("e2e_request_latency_seconds", "Of a whole request.", LONG)
        self.prompt = histogram("request_prompt_tokens", "Tokens of prompts.", SIZES)
        self.written = histogram("request_generation_tokens", "Tokens of answers.", SIZES)
        self.prompts = counter("prompt_tokens", "Tokens of prompts.", label)
        self.tokens = counter("generation_tokens", "Tokens of answers.", label)
        self.drafts = counter("spec_decode_num_drafts", "Rounds that drafted.", label)
        self.ended = counter("request_success", "Requests that ended.", label, "finished_reason")
        self.rejected = counter("admission_rejections", "Requests turned away.", "reason")


class Stopwatch:
    """Times of one choice."""

    def __init__(self, metrics: ServerMetrics, graph: str) -> None:
        self._metrics = metrics
        self._graph = graph
        self.start_time = monotonic()
        self._last = 0.0
        self._tokens = 0

    def wrote(self, tokens: int) -> None:
        """Record the total of written tokens; tokens of one step share its time."""
        now = monotonic()
        new = tokens - self._tokens
        if new <= 0:
            return
        for side in self._metrics.sides:
            if not self._last:
                side.first.labels(self._graph).observe(now - self.start_time)
                continue
            for _ in range(min(new, 64)):
                side.between.labels(self._graph).observe((now - self._last) / new)
        self._last = now
        self._tokens = tokens

    def ended(self, ended: Ended) -> None:
        written = ended.usage["answer"] + ended.usage["outline"]
        for side in self._metrics.sides:
            side.whole.labels(self._graph).observe(monotonic() - self.start_time)
            side.prompt.labels(self._graph).observe(ended.usage["prompt"])
            side.written.labels(self._graph).observe(written)
            side.prompts.labels(self._graph).inc(ended.usage["prompt"])
            side.tokens.labels(self._graph).inc(written)
            side.drafts.labels(self._graph).inc(sum(count > 0 for count in ended.drafted))
        self._metrics.finished(self._graph, ended.finish)
