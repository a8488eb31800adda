"""Where gains are lost on the way: what each stage of a repair made of the true gap edges of a pool.

A message over a gap edge helps if the source has found the fact, the message says it, the receiver
makes use of it and the output node of what the receiver then says. Each stage is counted among the
trials that came through all earlier ones, by the annotated answers of the multi-hop data sets. What
is left at the end is what a perfect choice of edges and a perfect selector could win.

    python -m benchmarks.stages POOL... --data DATA...
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from probes.pool import read_shards, shard_path
from probes.records import BaseRecord, ProbeRecord
from skeletons.multihop.dealing import Archive, Hand, archive, deal, own_steps
from skeletons.multihop.gaps import holds, needed
from skeletons.multihop.hosts import WRITER
from skeletons.multihop.questions import Question
from skeletons.multihop.rows import read_questions
from skeletons.reading import split_file
from splice.errors import DataError
from splice.queries import Split
from splice.records import Edge, Trace
from splice.report.display import aligned
from splice.statistics import share
from splice.store import read_store
from splice.text import contains

SPLITS: tuple[Split, ...] = ("train", "validation")


class Known(NamedTuple):
    """A question with how it was dealt."""

    question: Question
    hands: Mapping[str, Hand]


class Facts(NamedTuple):
    """What is sent over a gap edge, and what it is good for, by the annotation."""

    sent: tuple[str, ...]
    """Answers of the source's steps that the receiver needs."""
    wanted: tuple[str, ...]
    """Answers of the receiver's steps that need them."""


class Case(NamedTuple):
    """One trial over a gap edge."""

    source: str
    """Data set."""
    is_found: bool
    """The source's output has the fact."""
    is_said: bool
    """So has the message."""
    was_used: bool
    """The receiver's output before the trial has what the fact is good for."""
    is_used: bool
    """So has its output after the trial."""
    before: float
    """Score of the base answer."""
    after: float
    """Score of the candidate answer."""


def known_questions(folders: Sequence[Path]) -> Mapping[str, Known]:
    """Questions of the splits that pools are made of, by id."""
    found: dict[str, Known] = {}
    for folder in folders:
        for split in SPLITS:
            questions = read_questions(split_file(folder, split)).questions
            others: Archive = archive(questions)
            found |= {q.id: Known(q, deal(q, others)) for q in questions}
    return found


def facts(known: Known, edge: Edge) -> Facts:
    """What an edge brings; empty where the annotation gives no answer."""
    question, hands = known
    source, receiver = edge
    steps = question.steps
    sent = [
        n
        for n in needed(question, receiver, hands)
        if holds(hands[source], steps[n]) and steps[n].answer is not None
    ]
    if receiver == WRITER:
        wanted = [question.answer]
    else:
        own = own_steps(question)[receiver]
        wanted = [
            answer
            for n in own
            if (answer := steps[n].answer) is not None
            and holds(hands[receiver], steps[n])
            and {*sent} & {*steps[n].needs}
        ]
    return Facts(tuple(answer for n in sent if (answer := steps[n].answer)), tuple(wanted))


def cases(pool: Path, questions: Mapping[str, Known]) -> Iterator[Case]:
    """The trials over gap edges of a pool, where the annotation says what to look for.

    Raises:
        DataError: a question of the pool is not in the data.
    """
    for shard in read_shards(pool):
        traces: Mapping[str, Trace] = read_store(shard_path(pool, "traces", shard.number)).traces
        for probe in shard.probes.values():
            base = shard.bases[probe.base]
            if probe.arm != "edge" or not probe.is_gap or probe.outcome != "done":
                continue
            if base.query_id not in questions:
                raise DataError(f"{pool}: question {base.query_id!r} is not in the data")
            case = _case(questions[base.query_id], base, probe, traces)
            if case is not None:
                yield case


def _case(
    known: Known, base: BaseRecord, probe: ProbeRecord, traces: Mapping[str, Trace]
) -> Case | None:
    edge = probe.edge.ends
    sent, wanted = facts(known, edge)
    before, after = traces.get(base.trace or ""), traces.get(probe.trace or "")
    if not sent or not wanted or before is None or after is None or base.score is None:
        return None
    source, receiver = edge
    return Case(
        source=known.question.source,
        is_found=_has_any(before.by_node[source].output, sent),
        is_said=_has_any(probe.message.text if probe.message else None, sent),
        was_used=_has_any(before.by_node[receiver].output, wanted),
        is_used=_has_any(after.by_node[receiver].output, wanted),
        before=base.score,
        after=base.score + (probe.delta or 0.0),
    )


def _has_any(text: str | None, answers: Sequence[str]) -> bool:
    return text is not None and any(contains(text, answer) for answer in answers)


def stages(found: Sequence[Case]) -> list[tuple[str, list[Case]]]:
    """The trials that came through each stage, one after another."""
    through = [("trials over a true gap edge", list(found))]
    for title, keep in (
        ("the source has found the fact", lambda case: case.is_found),
        ("the message says it", lambda case: case.is_said),
        ("the receiver did not know before", lambda case: not case.was_used),
        ("the receiver knows now", lambda case: case.is_used),
        ("the answer is better", lambda case: case.after > case.before),
    ):
        through.append((title, [case for case in through[-1][1] if keep(case)]))
    return through


def table(found: Sequence[Case]) -> list[str]:
    """One line a stage: trials left, share of those before, scores before and after."""
    rows = [("stage", "trials", "of those before", "95% interval", "score before", "after")]
    n_before = len(found)
    for title, left in stages(found):
        rows.append((title, str(len(left)), *_part(len(left), n_before), *_scores(left)))
        n_before = len(left)
    return aligned(rows)


def _part(n: int, n_before: int) -> tuple[str, str]:
    part = share(n, n_before)
    if part is None:
        return "-", "-"
    return f"{part.value:.2f}", f"{part.interval:.2f}"


def _scores(found: Sequence[Case]) -> tuple[str, str]:
    if not found:
        return "-", "-"
    return f"{fmean(c.before for c in found):.3f}", f"{fmean(c.after for c in found):.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the stages of each data set and of all together."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__)
    parser.add_argument("pools", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders of data sets")
    args = parser.parse_args(argv)
    questions = known_questions(args.data)
    by_source: dict[str, list[Case]] = defaultdict(list)
    for pool in args.pools:
        for case in cases(pool, questions):
            by_source[case.source].append(case)
    everything = [case for found in by_source.values() for case in found]
    for source, found in (*sorted(by_source.items()), ("all", everything)):
        print(f"\n## {source}\n")
        print("\n".join(table(found)))
        n_worse = sum(case.after < case.before for case in found)
        print(f"\nanswers that got worse: {n_worse} of {len(found)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
