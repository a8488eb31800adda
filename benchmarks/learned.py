"""What diagnosis and selection cost beside a model call: milliseconds a query, median and p99.

Made-up questions run on four nodes with scripted replies, then each is diagnosed and its trial
judged. Every trace is new to what is measured, as it is in use; the first is left out, since it
imports and reads files.

    python -m benchmarks.learned
    python -m benchmarks.learned --parts FOLDER --language FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy

from benchmarks.pool import WORKFLOW, reply_to, workload
from splice.diagnosis import diagnose, find_gap
from splice.executor import RunSettings, execute
from splice.features import edge_features, query_features
from splice.learned import Learned, load_learned, shipped
from splice.line import evidence_of
from splice.message import write_message
from splice.models.scripted import ScriptedModel
from splice.records import Trace, Trial
from splice.selector import RuleSelector, Selector, SelectorInput
from splice.trial import run_trial
from splice.workload import Example


class Latency(NamedTuple):
    """How long one step takes."""

    step: str
    n: int
    median_ms: float
    p99_ms: float


def latency(step: str, seconds: Sequence[float]) -> Latency:
    """Median and 99th percentile, without the first."""
    rest = numpy.array(seconds[1:]) * 1000
    return Latency(step, len(rest), float(numpy.median(rest)), float(numpy.percentile(rest, 99)))


class _Case(NamedTuple):
    """A question that was repaired, up to the evidence."""

    base: Trace
    trial: Trial
    selected: SelectorInput
    evidence_s: float


def _model() -> ScriptedModel:
    return ScriptedModel(lambda request: reply_to(request.messages[-1].content.encode()))


async def _traces(examples: Sequence[Example]) -> list[Trace]:
    """Base runs that nobody has looked at yet."""
    return [await execute(WORKFLOW, example.query, _model()) for example in examples]


async def _cases(examples: Sequence[Example]) -> list[_Case]:
    """Trials of the first edge, for the questions in which it changes the answer."""
    cases = []
    for base in await _traces(examples):
        diagnosis = diagnose(WORKFLOW, base)
        message = await write_message(
            WORKFLOW, base, find_gap(WORKFLOW, base, diagnosis.edges[0].edge), model=None
        )
        if message is None:
            continue
        trial = await run_trial(WORKFLOW, base, message, _model(), settings=RunSettings())
        began = time.perf_counter()
        evidence = evidence_of(WORKFLOW, base, trial)
        seconds = time.perf_counter() - began
        selected = SelectorInput(
            question=base.query.text,
            workflow=WORKFLOW.name,
            base_score=diagnosis.base_score,
            base_answer=base.answer,
            candidate_answer=trial.trace.answer,
            evidence=evidence,
        )
        cases.append(_Case(base, trial, selected, seconds))
    return cases


async def _timed(
    step: str, examples: Sequence[Example], work: Callable[[Trace], object]
) -> Latency:
    seconds = []
    for trace in await _traces(examples):
        began = time.perf_counter()
        work(trace)
        seconds.append(time.perf_counter() - began)
    return latency(step, seconds)


async def _judged(step: str, cases: Sequence[_Case], selector: Selector) -> Latency:
    seconds = []
    for case in cases:
        began = time.perf_counter()
        await selector.judge(case.selected)
        seconds.append(time.perf_counter() - began)
    return latency(step, seconds)


async def measured(n: int, learned: Learned, language: Path | None) -> list[Latency]:
    """The steps, each over `n` questions of its own: what was read before is read faster."""
    edge = WORKFLOW.candidate_edges[0]
    examples = workload(5 * n).examples
    fresh = iter([examples[start : start + n] for start in range(0, 5 * n, n)])

    def features(trace: Trace) -> None:
        query_features(WORKFLOW, trace, diagnose(WORKFLOW, trace))

    rows = [
        await _timed(
            "features of one edge", next(fresh), lambda t: edge_features(WORKFLOW, t, edge)
        ),
        await _timed("diagnosis, hand-set", next(fresh), lambda t: diagnose(WORKFLOW, t)),
        await _timed("the same and the query's features", next(fresh), features),
        await _timed("diagnosis, learned", next(fresh), lambda t: learned.diagnose(WORKFLOW, t)),
    ]
    cases = await _cases(next(fresh))
    rows += [
        latency("process evidence of a trial", [case.evidence_s for case in cases]),
        await _judged("selector: rules", cases, RuleSelector()),
    ]
    if learned.selector is not None:
        rows.append(await _judged("selector: evidence", cases, learned.selector))
    if language is not None:
        from splice.language import LanguageSelector

        own = LanguageSelector(language)
        rows.append(await _judged("selector: language model", cases[:31], own))
    return rows


def table(rows: Sequence[Latency]) -> str:
    """The steps as Markdown."""
    lines = ["| step | n | median ms | p99 ms |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| {row.step} | {row.n} | {row.median_ms:.3f} | {row.p99_ms:.3f} |" for row in rows]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, then print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learned", description=__doc__)
    parser.add_argument("--questions", type=int, default=301)
    parser.add_argument("--parts", type=Path, help="learned parts; default: the shipped ones")
    parser.add_argument("--language", type=Path, help="folder of a language-model selector")
    args = parser.parse_args(argv)
    learned = shipped() if args.parts is None else load_learned(args.parts)
    print(table(asyncio.run(measured(args.questions, learned, args.language))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
