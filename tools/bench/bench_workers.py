"""One worker against two, paired: what a cluster of one machine gains and costs, and regroups.

    python -m tools.bench.bench_workers [GRAPH] [--profile smollm2] [--rounds 5] [--prompts 4]

Workers have one thread each and are Ray actors that stay; every round decodes the same prompts on
one worker, on two, and in an ordinary run, in turn. Prints ratios of seconds (median of the rounds,
and their range), tokens, and what regroups took.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from specsot.engine.cluster.driver.director import Director
from specsot.engine.prepare.cluster_block import LOCAL, ClusterBlock
from specsot.engine.prepare.inputs import read_file
from specsot.engine.prepare.job import Job, prepare
from specsot.engine.prepare.options import RunOptions
from specsot.engine.record.report import answers_of, output_digest
from specsot.engine.run.runner import perform
from specsot.engine.run.session import Session, load
from specsot.engine.workers.ray_cluster import set_up_ray

set_up_ray(LOCAL)

from specsot.engine.cluster.ray_workers import RayLauncher  # noqa: E402  (reads the environment)
from specsot.engine.cluster.run import directed  # noqa: E402

TEN = Path(__file__).parents[2] / "graphs" / "prompts" / "ten.txt"
Timed = tuple[float, str]


class StayingLauncher(RayLauncher):
    """Its workers are there for the next run too."""

    def close(self) -> None:
        self.release()


def alone(session: Session, job: Job) -> Timed:
    began = perf_counter()
    run, _, _ = perform(session, job.prompts)
    seconds = perf_counter() - began
    return seconds, output_digest(answers_of(run.board["branches"].requests, session.prompts))


def on(
    launcher: StayingLauncher, session: Session, job: Job, workers: int
) -> tuple[Timed, Director]:
    """Seconds from the first transition to the last."""
    block = ClusterBlock(workers=workers)
    run, recorder = directed(launcher, block, session, job.prompts)
    began = perf_counter()
    while not run.finished:
        run.advance()
    seconds = perf_counter() - began
    launcher.release()
    digest = output_digest(answers_of(run.board["branches"].requests, session.prompts))
    assert recorder.director is not None
    return (seconds, digest), recorder.director


def ratios(name: str, over: Sequence[float], under: Sequence[float]) -> str:
    each = [one / other for one, other in zip(over, under, strict=True)]
    return f"{name}: {median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


def main(print_: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graph", nargs="?", default="bim_eagle")
    parser.add_argument("--profile")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--file", type=Path, default=TEN)
    asked = parser.parse_args()
    job = prepare(
        RunOptions(asked.graph, profile=asked.profile, threads=1),
        prompts=None,
    )
    prompts = read_file(asked.file).items[: asked.prompts]
    job = Job(job.program, job.options, prompts, job.outline)
    session = load(job)
    launcher = StayingLauncher(job, ClusterBlock(workers=2))
    seconds: dict[str, list[float]] = {"alone": [], "one": [], "two": []}
    figures, digests = [], set[str]()
    try:
        for number in range(asked.rounds + 1):
            plain = alone(session, job)
            one, _ = on(launcher, session, job, 1)
            two, director = on(launcher, session, job, 2)
            digests |= {plain[1], one[1], two[1]}
            if number:  # the first one warms up
                for name, (took, _) in (("alone", plain), ("one", one), ("two", two)):
                    seconds[name].append(took)
                figures.append(director.regrouping.figures)
    finally:
        RayLauncher.close(launcher)
    print_(f"{asked.graph}, {len(prompts)} prompts, {asked.rounds} rounds")
    print_(f"digests: {len(digests)}")
    for name, took in seconds.items():
        print_(f"{name}: median {median(took):.2f} s")
    print_(ratios("one worker / two workers", seconds["one"], seconds["two"]))
    print_(ratios("alone / one worker", seconds["alone"], seconds["one"]))
    print_(ratios("alone / two workers", seconds["alone"], seconds["two"]))
    count = sum(one.count for one in figures)
    if count:
        whole = 1e3 * sum(one.seconds for one in figures) / count
        spent = 1e3 * sum(one.collective_seconds for one in figures) / count
        size = sum(one.bytes for one in figures) / count
        print_(
            f"{count} regroups: {size / 1e6:.2f} MB, {whole:.1f} ms, {spent:.1f} ms of them gloo"
        )


if __name__ == "__main__":
    main()
