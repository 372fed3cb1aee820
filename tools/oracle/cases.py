"""Tables of cases: what is run, what is asked wrongly, what is printed."""

import json
from collections.abc import Iterator, Mapping, Sequence

from .run import Case

BEES = "How do honey bees live through the winter?"
UNKNOWN = "Tell me about submarines."  # a subject that the model is unsure of
DOCUMENTS = [
    {
        "title": "Honey bees in winter",
        "text": "Honey bees do not sleep through the winter. When the days grow cold the colony "
        "gathers around its queen in a tight ball, and the bees on the outside change places with "
        "those inside. They shiver to make heat, and they eat the honey of the summer. " * 2,
    },
    {
        "title": "The tea house",
        "text": "The tea house stands at the end of the village, beside the stone bridge. It was "
        "built in 1874 by a miller whose daughter had come home with a chest of green tea. " * 2,
    },
]
TWO = [
    {"id": "a", "prompt": UNKNOWN, "seed": 11},
    {"id": "b", "prompt": BEES, "documents": DOCUMENTS},
]
BOTH = [{"id": "a", "prompt": UNKNOWN}, {"id": "b", "prompt": "Describe batteries in detail."}]
MANY = [
    {"id": "1", "prompt": UNKNOWN, "max_new_tokens": 30},
    {"id": "2", "prompt": "Describe batteries in detail.", "seed": 5},
    {"id": "3", "prompt": UNKNOWN, "max_new_tokens": 9, "cache_salt": "x"},
    {"id": "4", "prompt": "How should I prepare a home office?", "max_new_tokens": 45},
    {"id": "5", "prompt": UNKNOWN},
]
OUTLINE = "PLAN\n1|60|-|-|First thing\n2|70|Search|1|Second\n3|70|-|-|Third\nEND\n"


def _lines(rows: Sequence[Mapping[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


FILES = {
    "two.jsonl": _lines(TWO),
    "both.jsonl": _lines(BOTH),
    "many.jsonl": _lines(MANY),
    "outline.txt": OUTLINE,
    "short.txt": "PLAN\n1|10|-|-|First thing\n2|10|-|-|Second\n3|10|-|-|Third\nEND\n",
}

LAYOUTS = {
    "alone": "autoregressive",
    "bim": "bim_plain",
    "batching": "bim_plain --set layout.kind=batching",
    "paged": "bim_plain --set layout.kind=paged",
}
DRAFTERS = {
    "none": "kind=none",
    "eagle3": "kind=eagle3 num_draft_tokens=4 draft_depth=3 top_k=2",
    "eagle2": "kind=eagle2 num_draft_tokens=4 draft_depth=3 top_k=2",
    "eagle1": "kind=eagle1",
    "dflash": "kind=dflash block_size=8",
    "ddtree": "kind=dflash block_size=8 grow=ddtree num_draft_tokens=10",
    "vanilla": "kind=vanilla gamma=4",
    "ngram": "kind=ngram num_draft_tokens=5 draft_depth=5 width=2",
}
DRAWN = "temperature=0.9 top_p=0.95 top_k=40"
SAMPLERS = {"greedy": "", "match": DRAWN, "rejection": f"{DRAWN} accept=rejection"}

OPTIMISTIC = "scheduler.admission=optimistic"
SMALL = "skeleton.direct_tokens=90 skeleton.max_tokens=110 limits.max_new_tokens=60"
SMALL += " --outline short.txt"  # it expects less than is written, so somebody makes way
HOT = " ".join(f"sampling.{one}" for one in DRAWN.split())
REJECTION = f"{HOT} sampling.accept=rejection"
CHUNKED = "scheduler.max_num_batched_tokens=16"
COSTS = "drafter.costs={target: {1: 9, 64: 12}, drafter: {1: 1, 64: 2}, overhead: 1}"

# key: graph, prompts, settings
FURTHER: dict[str, tuple[str, str, str]] = {
    **{
        f"newcomers/{graph}": (graph, "many", "layout.max_num_branches=2")
        for graph in ("eagle", "bim_eagle", "batching_dflash", "paged_eagle", "bim_two_drafters")
    },
    **{
        f"chunked/{graph}": (graph, "many", f"{CHUNKED} layout.max_num_branches=3")
        for graph in ("eagle", "bim_eagle", "batching_vanilla", "paged_eagle", "bim_blend_eagle")
    },
    "chunked/alone_dflash": ("dflash", "many", f"{CHUNKED} layout.max_num_branches=2"),
    **{
        f"preempted/{graph}": (graph, "many", f"layout.kv_slots={slots} {OPTIMISTIC} {more}")
        for graph, slots, more in (
            ("bim_eagle", 400, SMALL),
            ("bim_plain", 400, f"{SMALL} {HOT}"),
            ("paged_eagle", 400, SMALL),
            ("bim_ngram", 400, f"{SMALL} scheduler.prefix_cache=false"),
            ("eagle", 120, "limits.max_new_tokens=60"),
            ("batching_eagle", 300, f"{SMALL} layout.max_num_branches=4"),
        )
    },
    **{
        f"no_prefix_cache/{graph}": (graph, "many", "scheduler.prefix_cache=false")
        for graph in ("eagle", "bim_eagle", "batching_eagle", "paged_eagle", "bim_dflash")
    },
    **{
        f"policy_{policy}/{graph}": (graph, "many", f"scheduler.policy={policy} {where}")
        for policy in ("fcfs", "max_throughput", "sot_priority")
        for graph, where in (
            ("bim_eagle", "layout.max_num_branches=3"),
            ("batching_ngram", "layout.max_num_branches=3 layout.order=longest_first"),
        )
    },
    **{
        f"order_{order}": ("bim_dflash", "both", f"layout.order={order} layout.max_num_branches=2")
        for order in ("longest_first", "shortest_first")
    },
    **{
        f"share_prompt/{graph}": (graph, "two", f"skeleton.share=prompt {more}")
        for graph, more in (
            ("bim_eagle", ""),
            ("batching_dflash", ""),
            ("paged_eagle", ""),
            ("bim_vanilla", HOT),
            ("bim_ngram", CHUNKED),
        )
    },
    **{
        f"outline/{graph}": (graph, "two", f"{more} --outline outline.txt")
        for graph, more in (("bim_eagle", ""), ("batching_plain", HOT), ("paged_plain", ""))
    },
    **{
        f"blocks/{graph}": (graph, "many", "layout.block_size=16 layout.max_num_branches=3")
        for graph in ("bim_eagle", "paged_eagle", "bim_attend_merge", "dflash")
    },
    **{
        f"attention_{kind}/{graph}": (graph, "both", f"attention={kind}")
        for kind in ("dense", "grouped", "cascade")
        for graph in ("bim_eagle", "paged_plain")
    },
    **{
        f"merge_{kind}/{graph}": (graph, "two", f"skeleton.merge={kind} {more}")
        for kind, graph, more in (
            ("plain", "bim_blend_merge", ""),
            ("concat", "bim_blend_merge", ""),
            ("blend", "bim_blend_merge", HOT),
            ("attend", "bim_attend_merge", REJECTION),
            ("plain", "bim_attend_merge", "drafter.kind=ngram"),
        )
    },
    **{
        f"blend_{key}": (graph, "two", f"blend.min_tokens=16 {more}")
        for key, graph, more in (
            ("reuse", "blend_eagle", "blend.plan=reuse"),
            ("plain", "blend_eagle", "blend.plan=plain"),
            ("k", "blend_eagle", "blend.metric=kv blend.ratios=[0.4]"),
            ("layers", "blend_eagle", "blend.check_layers=[1,3] blend.ratios=[0.5,0.2]"),
            ("chunks", "blend_eagle", "blend.chunk_tokens=24 blend.check_update=partial"),
            ("uncollected", "bim_blend_eagle", "blend.collect=false"),
            ("prefix", "bim_blend_eagle", "skeleton.documents=prefix"),
            ("drawn", "bim_blend_eagle", HOT),
        )
    },
    **{
        f"beam_{key}": ("beam", "both", more)
        for key, more in (
            ("two", "beam.num_beams=2 beam.length_penalty=0.5"),
            ("early", "beam.early_stopping=true layout.max_num_branches=1"),
            ("never", "beam.early_stopping=never beam.length_penalty=-1.0"),
            ("batching", "layout.kind=batching layout.max_num_branches=12"),
            ("paged", "layout.kind=paged beam.num_beams=3"),
        )
    },
    **{
        f"samples/{graph}": (graph, "both", f"limits.n=3 {HOT} {more}")
        for graph, more in (
            ("eagle", ""),
            ("dflash", "layout.kind=batching"),
            ("autoregressive", "layout.kind=paged"),
            ("speculative", "sampling.accept=rejection"),
        )
    },
    **{
        f"gamma_{policy}": ("speculative", "both", f"{more} drafter.gamma_policy={policy} {HOT}")
        for more, policies in (
            ("drafter.gamma_max=6", ("egag",)),
            (
                "drafter.kind=adaptive drafter.gamma=4 drafter.draws=sampled drafter.gamma_max=6",
                ("heuristic", "svip", "confidence", "adaedl"),
            ),
        )
        for policy in policies
    },
    "gamma_cost": ("speculative", "both", f"drafter.gamma_policy=cost {COSTS}"),
    "nodes_auto": ("bim_eagle", "both", f"drafter.num_draft_tokens=auto {COSTS}"),
    "rows_per_round": ("bim_eagle", "many", "drafter.rows_per_round=6"),
    "rows_per_round/ddtree": ("batching_ddtree", "both", "drafter.rows_per_round=12"),
    "nodes_by_active": ("bim_eagle", "many", "drafter.num_draft_tokens={1: 6, 3: 2}"),
    **{
        f"rule_{rule}/{kind}": (graph, "both", f"{REJECTION} sampling.rule={rule} {more}")
        for rule, kind, graph, more in (
            ("chain", "vanilla", "speculative", "drafter.draws=sampled"),
            ("block", "vanilla", "bim_vanilla", "drafter.draws=sampled"),
            ("block", "dflash", "dflash", "drafter.draws=sampled"),
            ("with_replacement", "eagle1", "eagle2", "drafter.kind=eagle1 drafter.draws=sampled"),
            (
                "without_replacement",
                "eagle1",
                "eagle2",
                "drafter.kind=eagle1 drafter.draws=distinct",
            ),
            ("topk", "eagle3", "eagle", ""),
        )
    },
    "unadjusted": ("eagle", "both", f"{REJECTION} sampling.skip_sample_adjustment=true"),
    "penalties": (
        "bim_eagle",
        "both",
        f"{HOT} sampling.repetition_penalty=1.2 sampling.presence_penalty=0.4"
        " sampling.frequency_penalty=0.2",
    ),
    "filters": (
        "bim_dflash",
        "both",
        f"{HOT} sampling.min_p=0.05 sampling.filter_order=filters_first",
    ),
    "ids": (
        "eagle",
        "both",
        "sampling.banned=[282,300] sampling.forced=[595,306] sampling.min_new_tokens=12"
        " sampling.logit_bias={301: 2.5, 273: -3.0}",
    ),
    "stop_id": ("bim_eagle", "both", "--stop-id 282 --stop-id 310"),
    "float64": ("bim_eagle", "both", "--dtype float64"),
    "bfloat16": ("eagle", "both", "--dtype bfloat16"),
    "int8": ("bim_eagle", "both", "--weights int8"),
    "int4": ("dflash", "both", "--weights int4"),
    "limit": ("bim_eagle", "both", "limits.max_rounds=12"),
    "too_small": ("eagle", "two", "layout.kv_slots=80 limits.max_new_tokens=20"),
    "no_grammar": ("bim_eagle", "both", "skeleton.grammar=false skeleton.max_tokens=40"),
    "list_outline": ("bim_eagle", "both", "skeleton.format=list skeleton.max_branches=2"),
    "direct": ("bim_eagle", "both", "skeleton.max_tokens=4 skeleton.direct_tokens=12"),
    "probe_blend": ("blend_eagle", "two", "blend.min_tokens=16 --probe-blend"),
    "explained": ("bim_eagle", "both", "--explain-rounds"),
}

TRACED = {
    "autoregressive": "",
    "eagle": "layout.max_num_branches=2",
    "bim_eagle": "",
    "batching_dflash": "layout.max_num_branches=3",
    "paged_eagle": CHUNKED,
    "bim_blend_merge": "",
    "beam": "",
    "bim_plain": f"layout.kv_slots=400 {OPTIMISTIC} {SMALL}",
}
KEPT = {
    "bim_eagle_greedy": "bim_eagle",
    "batching_dflash_drawn": f"batching_dflash {HOT}",
    "eagle_rejection": f"eagle {REJECTION}",
}


def run_words(graph: str, prompts: str, settings: str, budget: int = 20) -> list[str]:
    """The command line of a run; words of `settings` without `--` are changes of the graph."""
    words = ["run", *graph.split()]
    flagged = False
    for word in _split(settings):
        if word.startswith("--"):
            words.append(word)
            flagged = word not in ("--probe-blend", "--explain-rounds")
            continue
        words += [word] if flagged else ["--set", word]
        flagged = False
    more = ["--prompts", f"{prompts}.jsonl"] if prompts else []
    return [*words, *more, "--max-new-tokens", str(budget), "--threads", "1", "--no-tui"]


def _split(text: str) -> list[str]:
    """The words of a text; a blank inside braces parts none."""
    words: list[str] = []
    for piece in text.split():
        if words and words[-1].count("{") > words[-1].count("}"):
            words[-1] += f" {piece}"
        else:
            words.append(piece)
    return words


def runs(shipped: Sequence[str]) -> Iterator[Case]:
    """Every shipped graph, every combination of layout, drafter and sampler, and the rest."""

    def case(key: str, *words: str) -> Case:
        return Case(part="runs", key=key, words=words, files=FILES)

    for key, (graph, prompts, settings) in FURTHER.items():
        budget = 60 if "limits.max_new_tokens=60" in settings else 20
        yield case(key, *run_words(graph, prompts, settings, budget))
    for name in shipped:
        yield case(f"shipped/{name}", *run_words(name, "two", "", 24))
    for layout, graph in LAYOUTS.items():
        for drafter, block in DRAFTERS.items():
            for sampler, rule in SAMPLERS.items():
                if drafter == "none" and sampler == "rejection":
                    continue
                sets = [f"drafter.{one}" for one in block.split()]
                sets += [f"sampling.{one}" for one in rule.split()]
                words = run_words(graph, "both", " ".join(sets), 16)
                yield case(f"{layout}/{drafter}/{sampler}", *words)
    for key, code in PROGRAMS.items():
        yield Case(part="runs", key=f"api/{key}", code=code)


def traces() -> Iterator[Case]:
    """Runs whose way through the machine is kept step by step."""
    for graph, settings in TRACED.items():
        budget = 60 if "limits.max_new_tokens=60" in settings else 16
        words = run_words(graph, "many", settings, budget)
        yield Case(part="trace", key=graph, words=words, files=FILES)


def kept_runs() -> Iterator[Case]:
    """Runs whose folders are kept; only `record` performs them."""
    for name, settings in KEPT.items():
        graph, _, sets = settings.partition(" ")
        words = run_words(graph, "both", sets, 12)
        yield Case(part="keep", key=name, words=words, files=FILES)


def replays() -> Iterator[Case]:
    """What is done with the kept run folders."""
    for name in KEPT:
        for key, words in (
            ("show", "runs show latest"),
            ("list", "runs list --json"),
            ("last", "replay latest"),
            ("csv", "trace export latest --format csv"),
            ("perfetto", "trace export latest"),
            ("diff", "runs diff latest latest --json"),
            ("repeat", "run runs/latest/run.yaml --no-tui"),
            ("verify", "verify-run latest"),
        ):
            yield Case(part="replay", key=f"{name}/{key}", words=words.split(), archive=name)


PROGRAMS = {
    "generate": """
from specsot import generate
for graph in ("bim_eagle", "dflash"):
    answer = generate("How do bees make honey?", graph=graph, max_new_tokens=12, threads=1)
    print(answer.text)
""",
    "engine": """
from specsot import Engine
with Engine("bim_eagle", max_new_tokens=12, threads=1) as engine:
    handle = engine.submit("How do bees make honey?")
    for event in handle.stream():
        print(type(event).__name__, getattr(event, "text", ""))
    print(handle.result().text)
""",
    "session": """
from specsot import Prompt, open_session
sets = ["drafter.num_draft_tokens=6"]
session = open_session("bim_eagle", sets=sets, max_new_tokens=12, threads=1)
run = session.start([Prompt("1", "How do bees make honey?")], lambda event: None)
while not run.finished:
    run.advance()
    print(run.state)
""",
    "names": """
import specsot
for name in sorted(specsot.FROM_API):
    found = getattr(specsot, name)
    print(name, getattr(found, "__annotations__", {}).keys() and sorted(found.__annotations__))
""",
}

EXTENDED = "version: 1\nname: mine\nextends: bim_eagle\n"
BAD_GRAPHS = {
    "empty": "",
    "no_yaml": "version: [1\n",
    "tab": "version: 1\n\tname: mine\n",
    "list": "- 1\n- 2\n",
    "version": "version: 9\nname: mine\nextends: bim_eagle\n",
    "unknown_key": f"{EXTENDED}colour: blue\n",
    "twice": f"{EXTENDED}name: other\n",
    "extends_nothing": "version: 1\nname: mine\nextends: nowhere\n",
    "extends_itself": "version: 1\nname: mine\nextends: wrong.yaml\n",
    "drafter": f"{EXTENDED}drafter: {{kind: magic}}\n",
    "type": f"{EXTENDED}layout: {{kind: bim, capacity: many}}\n",
    "range": f"{EXTENDED}sampling: {{temperature: -1}}\n",
    "tree": f"{EXTENDED}drafter: {{kind: eagle3, nodes: 900, levels: 2, top_k: 2}}\n",
    "skip": f"{EXTENDED}sampling: {{skip_sample_adjustment: true}}\n",
    "machine": f"{EXTENDED}states: {{}}\n",
    "no_machine": "version: 1\nname: mine\nlayout: {kind: bim}\ndrafter: {kind: none}\n",
    "op": "version: 1\nname: mine\nlayout: {kind: bim}\ndrafter: {kind: none}\ninitial: a\n"
    "states:\n  a: {ops: [no.such_op]}\n  b: {final: true}\ntransitions: [{from: a, to: b}]\n",
    "guard": "version: 1\nname: mine\nlayout: {kind: bim}\ndrafter: {kind: none}\ninitial: a\n"
    "states:\n  a: {ops: []}\n  b: {final: true}\n"
    "transitions: [{from: a, to: b, when: luck}, {from: a, to: c}]\n",
    "unreachable": "version: 1\nname: mine\nlayout: {kind: bim}\ndrafter: {kind: none}\n"
    "initial: a\nstates:\n  a: {}\n  b: {final: true}\n  c: {}\ntransitions: []\n",
    "flow": "version: 1\nname: mine\nlayout: {kind: bim}\ndrafter: {kind: none}\ninitial: a\n"
    "states:\n  a: {ops: [target.forward_]}\n  b: {final: true}\ntransitions: [{from: a, to: b}]\n",
}
BAD_FILES = {
    "object.jsonl": '{"prompt": "x"\n',
    "keys.jsonl": '{"prompt": "x", "question": "y"}\n',
    "budget.jsonl": '{"prompt": "x", "max_new_tokens": 0}\n',
    "twice.jsonl": '{"id": 1, "prompt": "x"}\n{"id": 1, "prompt": "y"}\n',
    "forall.jsonl": '{"prompt": "x", "temperature": 1}\n',
    "empty.txt": "\n\n",
    "latin.txt": b"caf\xe9\n",
    "table.csv": "a,b\n",
    "outline.txt": "nothing\n",
    "folder/config.json": "{}",
    "specsot_bad/specsot.yaml": "colour: blue\n",
}
BAD_LINES = (
    *("run nowhere", "run bim_eagel", "run bim_eagle hello --set drafter.nodes"),
    *("run bim_eagle x --set drafter.nodes=0", "run bim_eagle x --set drafter.colour=1"),
    *("run bim_eagle x --set colour.red=1", "run bim_eagle x --set drafter.kind=magic"),
    *("run bim_eagle x --set layout.kind=row", "run bim_eagle x --set sampling.accept=luck"),
    *("run eagle x --set skeleton.share=prompt", "run bim_eagle x --set layout.capacity=4"),
    *("run bim_eagle x --set scheduler.policy=mine", "run beam x --set drafter.kind=eagle3"),
    *("run bim_eagle x --model nowhere/at/all", "run bim_eagle x --model folder"),
    *("run bim_eagle x --model folder --drafter-model folder", "run bim_eagle --colour"),
    *("run bim_eagle x --drafter-model folder", "run bim_eagle x --dtype int8"),
    *(
        "run bim_eagle x --device tpu",
        "run bim_eagle x --device cuda:9",
        "run bim_eagle x --seed -1",
    ),
    *("run bim_eagle x --threads 0", "run bim_eagle x --max-new-tokens 0", "run bim_eagle x y"),
    *(
        "run bim_eagle x --profile mine",
        "run bim_eagle x --weights int3",
        "run bim_eagle x --slow -1",
    ),
    *(
        "run bim_eagle x --stop-id 99999",
        "run bim_eagle x --expect-digest zz",
        "run beam x --break b",
    ),
    *("run bim_eagle x --expect-digest 000000000000 --max-new-tokens 2 --threads 1 -q",),
    *("run eagle x --outline outline.txt", "run bim_eagle x --outline outline.txt"),
    *("run eagle x --probe-blend", "run beam x --explain-rounds"),
    *(
        "run bim_eagle x --prompts empty.txt",
        "run bim_eagle - --step",
        "run bim_eagle x --break no",
    ),
    *(
        f"run bim_eagle --prompts {name}"
        for name in BAD_FILES
        if name[-5:] in ("jsonl", "y.txt", "n.txt")
    ),
    *("run bim_eagle --prompts table.csv", "run bim_eagle --prompts none.txt", "run bim_eagle ''"),
    *("run bim_eagle x --document none.txt", "run eagle x --set limits.samples=2"),
    *("serve --port 99999", "serve --host nowhere.invalid --port 0", "serve nowhere --port 0"),
    *("serve --host 0.0.0.0 --port 0", "serve --max-queue 0", "serve --metrics-compat x --port 0"),
    *("serve bim_eagle --timeout 0", "serve bim_eagle --model nowhere/at/all --port 0"),
    *("compare bim_plain", "compare bim_plain nowhere", "compare bim_plain bim_eagle@drafter.x=1"),
    *("sweep bim_eagle", "sweep bim_eagle --vary drafter.nodes", "bench nowhere", "show nowhere"),
    *("show", "show bim_eagle --full --mermaid", "show bim_eagle --set drafter.nodes=2"),
    *("check nowhere", "runs show", "runs show nowhere", "runs diff a b", "runs clean"),
    *("replay nowhere", "trace export nowhere", "verify-run nowhere", "view nowhere"),
    *("explain X999", "models get nowhere", "models inspect nowhere", "cache drop", "cache add"),
    *(
        "train",
        "train eagle3",
        "run autoregressive x --model nowhere/at/all",
        "simulate bim_eagle --costs none.json",
    ),
    *("cluster up --workers 0", "cluster", "nothing", "--colour", "", "certify nowhere"),
)


def errors() -> Iterator[Case]:
    """Wrong graphs, settings, flags, models, files."""
    for name, text in BAD_GRAPHS.items():
        words = ["check", "wrong.yaml"]
        yield Case(part="errors", key=f"graph {name}", words=words, files={"wrong.yaml": text})
    for line in BAD_LINES:
        words = [word.strip("'") for word in line.split()]
        yield Case(part="errors", key=line or "(nothing)", words=words, files=BAD_FILES)


PAGES = {
    "list": "list",
    "list --ops": "list --ops",
    "check": "check",
    "explain": "explain",
    "bench --list": "bench --list",
    "simulate": "simulate bim_eagle --requests 60 --parts 2-6 --json",
    "schema": "schema",
}


def graphs(shipped: Sequence[str]) -> Iterator[Case]:
    """What the program says of every shipped graph, and of what graphs can say."""
    for key, line in PAGES.items():
        yield Case(part="graphs", key=key, words=line.split())
    for name in shipped:
        for form in ("resolved", "full", "mermaid"):
            words = ["show", name, f"--{form}"]
            yield Case(part="graphs", key=f"{name} --{form}", words=words)


def pages_of_help(words: Sequence[str] = ()) -> Case:
    """The help of one command."""
    return Case(part="cli", key=" ".join(["specsot", *words]), words=[*words, "--help"])


SERVED = r"""
import json, re, subprocess, sys, time, urllib.error, urllib.request

words = ["serve", "dflash", "bim_eagle", "--port", "0", "--threads", "1", "--max-new-tokens", "9"]
with open("log", "w") as log:
    server = subprocess.Popen([sys.executable, "-m", "specsot", *words], stdout=log, stderr=log)
try:
    while not (found := re.search(r"ready: (\S+)", open("log").read())):
        assert server.poll() is None, open("log").read()
        time.sleep(0.05)

    def ask(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        head = {"content-type": "application/json"}
        request = urllib.request.Request(found[1] + path, data, head)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                code, text = reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            code, text = error.code, error.read().decode()
        text = re.sub(r'"(id|created|request_id)": ?("[^"]*"|\d+)', r'"\1":"?"', text)
        text = re.sub(r'"(\w*(seconds|_ms|per_second))": ?[0-9.e-]+', r'"\1":"?"', text)
        return code, text

    said = [{"role": "user", "content": "What is rain?"}]
    told = {}
    code, text = ask("/openapi.json")
    for path, body in json.loads(text)["paths"].items():
        told[f"openapi {path}"] = body
    rest = {k: v for k, v in json.loads(text).items() if k != "paths"}
    told["openapi"] = rest
    chat = {"messages": said, "max_tokens": 8}
    outlined = {"messages": said, "model": "bim_eagle", "specsot": {"part_tokens": 8}}
    for key, path, body in (
        ("models", "/v1/models", None),
        ("chat", "/v1/chat/completions", chat),
        ("chat skeleton", "/v1/chat/completions", outlined),
        ("chat drawn", "/v1/chat/completions", {**chat, "temperature": 1, "seed": 4, "n": 2}),
        ("chat scores", "/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 2}),
        ("stream", "/v1/chat/completions", {**chat, "stream": True}),
        ("completion", "/v1/completions", {"prompt": "Rain is", "max_tokens": 6, "echo": True}),
        ("tokenize", "/tokenize", {"prompt": "Rain is"}),
        ("no body", "/v1/chat/completions", {}),
        ("no model", "/v1/chat/completions", {**chat, "model": "gpt"}),
        ("bad n", "/v1/chat/completions", {**chat, "n": 0}),
        ("bad temperature", "/v1/chat/completions", {**chat, "temperature": "hot"}),
        ("bad role", "/v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}),
        ("bad tokens", "/v1/completions", {"prompt": [1, 999999], "max_tokens": 2}),
        ("unknown field", "/v1/completions", {"prompt": "x", "max_tokens": 2, "colour": 1}),
        ("no route", "/v1/nothing", None),
    ):
        code, text = ask(path, body)
        told[key] = f"{code}\n{text}"
    code, text = ask("/metrics")
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE specsot")]
    told["metrics"] = "\n".join(sorted(names))
finally:
    server.terminate()
    server.wait(60)
print(json.dumps(told))
"""


def served() -> Iterator[Case]:
    """A server's OpenAPI document, some answers, some refusals."""
    yield Case(part="openapi", key="served", code=SERVED)
