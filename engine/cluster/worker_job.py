"""What a worker in another process has to know before it can begin, as text."""

import json
from dataclasses import asdict

from ...states.graph.load import load_program, op_table
from ...states.yaml.source import Source, decode
from ..models import has_parts
from ..prepare.cluster_block import ClusterBlock
from ..prepare.job import Job
from ..prepare.options import SESSION, RunOptions
from ..prepare.repeat import graph_yaml
from ..run.session import Session, load


def parts_of(job: Job, block: ClusterBlock) -> int:
    """Parts of the weights, of which every worker loads one."""
    return block.parts if has_parts(job.options.weights) else 1


def job_text(job: Job, block: ClusterBlock, number: int, part: int) -> str:
    """All that a worker has to know, as JSON: the graph and the options that decide on models.

    Args:
        part: of the weights, of `parts_of`.
    """
    options = {name: asdict(job.options)[name] for name in SESSION}
    options = {name: value for name, value in options.items() if name not in ("outline", "sets")}
    if block.devices:
        options["device"] = block.devices[number % len(block.devices)]
    options |= {"skip_scan": job.options.skip_scan, "profile": None, "graph": job.options.graph}
    whole = {"graph": graph_yaml(job.program.graph), "options": options}
    weights = {"packed": block.together == 1, "part": (part, parts_of(job, block))}
    return json.dumps(whole | weights)


def job_of(text: str) -> Job:
    """A worker's job."""
    said = json.loads(text)
    name = str(said["options"]["graph"])
    source = Source(decode(said["graph"].encode(), name), name)
    return Job(load_program(source, op_table()), RunOptions(**said["options"]), ())


def loaded(text: str) -> Session:
    """A worker's session; weights that several compute with are not packed."""
    said = json.loads(text)
    return load(job_of(text), packed=said["packed"], part=tuple(said["part"]))
