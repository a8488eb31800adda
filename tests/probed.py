"""A toy workload for probe pools: a model without memory, whose answers move when inputs move."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from probes.generate import Generated, GenerateSettings, generate
from probes.plan import ProbeSettings
from probes.pool import read_shards
from splice import Agent, Query, ScriptedModel, Workflow
from splice.records import Request
from splice.store import read_store
from splice.workload import Example, Workload

WORKFLOW = Workflow(
    name="toy",
    nodes=(
        Agent(id="a", role="You find directors.", subtask="Who directed the film?"),
        Agent(id="b", role="You find years.", subtask="When was this person born?"),
        Agent(id="c", role="You find towns.", subtask="Where was this person born?"),
        Agent(id="w", role="You answer.", subtask="Answer the question."),
    ),
    edges=(("a", "w"), ("b", "w"), ("c", "w")),
    output="w",
)


TRIP = """\
name = "trip"
output = "desk"
edges = [["routes", "desk"], ["visas", "desk"]]

[[nodes]]
id = "routes"
role = "You look up routes."
subtask = "Where is the stop?"

[[nodes]]
id = "visas"
role = "You look up visas."
subtask = "How many hours at the stop?"

[[nodes]]
id = "desk"
role = "You answer."
subtask = "Answer the question."
"""
"""A workflow as a file, for the command line."""


def example(n: int) -> Example:
    """The `n`-th question."""
    return Example(
        query=Query(
            id=f"q{n}",
            text=f"When was the director of Film {n} born?",
            context={
                "a": (f"Film {n} was directed by Person {n}.",),
                "b": (f"Person {n} was born in {1900 + n % 100}.",),
                "c": ("The town lies on a river.",),
            },
        ),
        reference={"year": str(1900 + n % 100)},
        kind="even" if n % 2 == 0 else "odd",
        gap_edges=(("a", "b"),),
    )


def score(example: Example, answer: str | None) -> dict[str, float]:
    """1 if the digit that the answer ends with is at most that of the year."""
    return {"right": float((answer or "9")[-1] <= example.reference["year"][-1])}


def workload(n_questions: int, begin: int = 0) -> Workload:
    """So many questions."""
    return Workload(
        name="toy",
        about="Films and the people who made them.",
        workflow=WORKFLOW,
        examples=tuple(example(n) for n in range(begin, begin + n_questions)),
        metrics=("right",),
        score=score,
    )


def reply(request: Request) -> str:
    """A name and a year drawn from what was asked, with which seed and how warm."""
    asked = f"{request.messages}{request.rollout}{request.settings.temperature}"
    draw = int(hashlib.sha256(asked.encode()).hexdigest(), 16)
    return f"Person {draw % 5} in {1900 + draw % 100}"


def make(folder: Path, n_questions: int, **settings: object) -> Generated:
    """Generate a pool of the toy."""
    probe = settings.pop("probe", ProbeSettings(control_share=0.4))
    model = settings.pop("model", ScriptedModel(reply))
    workloads = settings.pop("workloads", {"train": workload(n_questions)})
    chosen = GenerateSettings.model_validate(settings)
    return asyncio.run(generate(workloads, model, folder, probe=probe, settings=chosen))


def content(folder: Path) -> dict[str, object]:
    """Everything in a pool by id, but how long it took."""
    found: dict[str, object] = {}
    for shard in read_shards(folder):
        traces = read_store(folder / f"traces-{shard.number:05}.jsonl").traces
        for record in (*shard.bases.values(), *shard.probes.values()):
            trace = traces[record.trace].content() if record.trace is not None else None
            assert record.id not in found
            found[record.id] = record.model_dump(exclude={"elapsed_s", "trace"}), trace
    return found
