"""Prometheus metrics of a server, under specsot's names and optionally vLLM's. Labels are graphs,
replicas, states and reasons; they never hold text of requests."""

from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..workers.link import LinkState
from ..workers.protocol import Ended
from ..workers.router import DRAINING, GAUGES, Router

SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LONG = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
LABELS = {"specsot": "graph", "vllm": "model_name"}
ENGINE_METRICS = (  # our name, vLLM's (or none), where the number is
    ("requests_running", "num_requests_running", "running", "Requests that have begun."),
    ("requests_waiting", "num_requests_waiting", "waiting", "Requests that have not begun."),
    ("branches_running", "", "branches", "Branches decoded side by side."),
    ("kv_slots_used", "", "slots", "Slots of the target's pool in use."),
    ("kv_slots", "", "capacity", "Slots of the target's pool."),
    ("forwards", "", "forwards", "Forwards of the target."),
    ("steps", "", "steps", "Steps of the engine."),
    ("committed_tokens", "", "tokens", "Tokens that forwards committed."),
    ("draft_tokens", "spec_decode_num_draft_tokens", "drafted", "Drafted tokens."),
    ("accepted_tokens", "spec_decode_num_accepted_tokens", "accepted", "Drafts accepted."),
    ("recovered", "", "recovered", "Times that requests were run again after a fault."),
    ("prefix_queries", "prefix_cache_queries", "prefix_asked", "Prompt tokens looked up."),
    ("prefix_hits", "prefix_cache_hits", "prefix_reused", "Prompt tokens found."),
)
HISTOGRAMS = {  # of choices
    "time_to_first_token_seconds": ("Until the first text.", LONG),
    "inter_token_latency_seconds": ("Between tokens.", SHORT),
    "e2e_request_latency_seconds": ("Of a whole request.", LONG),
    "request_prompt_tokens": ("Tokens of prompts.", SIZES),
    "request_generation_tokens": ("Tokens of answers.", SIZES),
}


class EngineCollector:
    def __init__(self, router: Router, prefix: str) -> None:
        self._router = router
        self._prefix = prefix

    def _family(
        self, kind: type[Any], name: str, doc: str, values: Mapping[Any, Any], *, label: str = ""
    ) -> Metric:
        family: Any = kind(f"{self._prefix}:{name}", doc, labels=[label or LABELS[self._prefix]])
        for labelled, value in values.items():
            family.add_metric([labelled], value)
        return cast(Metric, family)

    def collect(self) -> Iterator[Metric]:
        vllm = self._prefix == "vllm"
        graphs = self._router.counts
        for ours, theirs, field, doc in ENGINE_METRICS:
            if name := theirs if vllm else ours:
                kind = GaugeMetricFamily if field in GAUGES else CounterMetricFamily
                values = {graph: counts[field] for graph, counts in graphs.items()}
                yield self._family(kind, name, doc, values)
        name = "kv_cache_usage_perc" if vllm else "kv_usage"
        shares = {graph: at["slots"] / max(at["capacity"], 1) for graph, at in graphs.items()}
        yield self._family(GaugeMetricFamily, name, "Share of the target's pool in use.", shares)
        name = "spec_decode_num_accepted_tokens_per_pos" if vllm else "accepted_at"
        doc = "Drafts accepted at each place of a path."
        labels = [LABELS[self._prefix], "position"]
        places = CounterMetricFamily(f"{self._prefix}:{name}", doc, labels=labels)
        for graph, counts in graphs.items():
            for place, count in enumerate(counts["positions"][:64]):
                places.add_metric([graph, str(place)], count)
        yield places
        if vllm:
            return
        router = self._router
        yield GaugeMetricFamily("specsot:requests_open", "Open answers.", value=router.open)
        doc = "Requests that moved to another replica."
        yield CounterMetricFamily("specsot:request_reruns", doc, value=router.reruns)
        tally = Tally(replica["state"] for replica in router.replicas)
        order = (LinkState.READY, LinkState.STARTING, DRAINING, LinkState.HUNG, LinkState.DEAD)
        states = {state: tally[state] for state in order}
        doc = "Processes that decode."
        yield self._family(GaugeMetricFamily, "replicas", doc, states, label="state")


class ServerMetrics:
    """Metrics of the HTTP process and of the engines behind it; vllm: also use vLLM's names."""

    def __init__(self, router: Router | None, *, vllm: bool = False) -> None:
        self.registry = CollectorRegistry()
        self._metrics: dict[str, list[Any]] = {}
        for prefix in LABELS if vllm else ("specsot",):
            if router is not None:
                self.registry.register(EngineCollector(router, prefix))
            label = LABELS[prefix]
            for name, (doc, buckets) in HISTOGRAMS.items():
                histogram = Histogram(
                    f"{prefix}:{name}", doc, [label], buckets=buckets, registry=self.registry
                )
                self._metrics.setdefault(name, []).append(histogram)
            for name, doc, labels in (
                ("prompt_tokens", "Tokens of prompts.", (label,)),
                ("generation_tokens", "Tokens of answers.", (label,)),
                ("spec_decode_num_drafts", "Rounds that drafted.", (label,)),
                ("request_success", "Requests that ended.", (label, "finished_reason")),
                ("admission_rejections", "Requests turned away.", ("reason",)),
            ):
                counter = Counter(f"{prefix}:{name}", doc, labels, registry=self.registry)
                self._metrics.setdefault(name, []).append(counter)
        self.responses = Counter(
            "specsot:responses", "Answers by status.", ["status"], registry=self.registry
        )

    def observe(self, name: str, graph: str, value: float) -> None:
        for histogram in self._metrics[name]:
            histogram.labels(graph).observe(value)

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        for counter in self._metrics[name]:
            counter.labels(*labels).inc(by)

    def wrote(self, graph: str, tokens: int, waited: float, *, first: bool) -> None:
        if first:
            self.observe("time_to_first_token_seconds", graph, waited)
            return
        for _ in range(min(tokens, 64)):  # tokens of one step share its time
            self.observe("inter_token_latency_seconds", graph, waited / tokens)

    def ended(self, graph: str, ended: Ended, seconds: float) -> None:
        prompt = ended.usage["prompt"]
        written = ended.usage["answer"] + ended.usage["outline"]
        self.observe("e2e_request_latency_seconds", graph, seconds)
        self.observe("request_prompt_tokens", graph, prompt)
        self.observe("request_generation_tokens", graph, written)
        self.count("prompt_tokens", graph, by=prompt)
        self.count("generation_tokens", graph, by=written)
        self.count("spec_decode_num_drafts", graph, by=sum(count > 0 for count in ended.drafted))
        self.count("request_success", graph, ended.finish)
