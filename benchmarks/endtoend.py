"""All policies on all benchmarks, each by `splice evaluate`, and the multi-hop ones pooled.

Each evaluation keeps its replies in a folder of its own, so the whole is started again with the same
command after whatever happened, and asks nothing twice. What is pooled are the questions: scores of
the three multi-hop sets are of one metric, and intervals resample questions of all three together.

    python -m benchmarks.endtoend --data DATA --out runs/endtoend --split validation --limit 20
    python -m benchmarks.endtoend --data DATA --out runs/endtoend --parts PARTS --model 1.5b
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from splice.errors import StoreError
from splice.evaluation import EvaluationResult, EvaluationSettings, Row, policy_results
from splice.evaluation_table import policy_table
from splice.files import read_text
from splice.report.display import aligned
from splice.statistics import paired_gain

ON_HALF: Final = ("full_rerun", "voting", "edge_expansion", "nexa", "nexa_rollback")
"""Policies that run whole workflows again and take most of the time."""


class Run(NamedTuple):
    """One evaluation."""

    name: str
    workload: str
    data: str
    """Folder below that of all data sets."""
    options: tuple[str, ...] = ()
    seed: int = 0
    """Of the draw of questions, among the rest."""


RUNS: Final = (
    Run("2wiki", "multihop", "multihop_2wiki"),
    Run("hotpotqa", "multihop", "multihop_hotpotqa"),
    Run("musique", "multihop", "multihop_musique"),
    Run("2wiki-planned", "multihop", "multihop_2wiki", ("subtasks=planned",)),
    Run("musique-planned", "multihop", "multihop_musique", ("subtasks=planned",)),
    Run("plancraft", "plancraft", "plancraft", seed=1),
)
"""An evaluation of its own has used PlanCraft's test tasks of seed 0 before."""

POOLED: Final[Mapping[str, tuple[str, ...]]] = {
    "multi-hop, tasks from the question's form": ("2wiki", "hotpotqa", "musique"),
    "multi-hop, planned tasks": ("2wiki-planned", "musique-planned"),
}
"""HotpotQA has no annotated decomposition, so there is no planned variant of it."""


def command(run: Run, data: Path, out: Path, arguments: Sequence[str]) -> list[str]:
    """The command of one evaluation."""
    options = [part for option in run.options for part in ("-o", option)]
    return [
        *(sys.executable, "-m", "splice", "evaluate", run.workload),
        *("--data", str(data / run.data), "--out", str(out / run.name), "--seed", str(run.seed)),
        *options,
        *arguments,
    ]


class Pooled(NamedTuple):
    """Several evaluations of one metric together."""

    rows: Sequence[Row]
    """Of the policies that all of them have."""
    settings: EvaluationSettings
    """Of the first: budgets and statistics are those of all."""
    metric: str


def together(out: Path, names: Sequence[str]) -> Pooled:
    """Read the evaluations of these names.

    Raises:
        StoreError: one of them is not there, or goes by another metric than the others.
    """
    results = [_result(out / name) for name in names]
    metrics = {result.metric for result in results}
    if len(metrics) > 1:
        raise StoreError(
            f"{', '.join(names)} go by different metrics: {', '.join(sorted(metrics))}"
        )
    read = [list(_rows(out / name, name)) for name in names]
    common = set.intersection(*({(row.policy, row.budget) for row in rows} for rows in read))
    rows = [row for own in read for row in own if (row.policy, row.budget) in common]
    return Pooled(rows, results[0].settings, results[0].metric)


def pooled(found: Pooled) -> list[str]:
    """The table of policies."""
    return policy_table(policy_results(found.rows, found.settings, found.metric))


def compared(found: Pooled, policy: str = "splice") -> list[str]:
    """What a policy scores above each other, budget by budget, on the questions that both have."""
    scores: dict[tuple[str, float | None], dict[str, list[float]]] = {}
    for row in found.rows:
        own = scores.setdefault((row.policy, row.budget), {})
        own.setdefault(row.query_id, []).append(row.scores[found.metric])
    table = [[f"{policy} above ...", "b", "n", "difference", "95% interval"]]
    for (other, budget), theirs in scores.items():
        for asked in found.settings.budgets if budget is None else (budget,):
            ours = scores.get((policy, asked), {})
            both = [query for query in theirs if query in ours]
            if other == policy or not both:
                continue
            more = paired_gain(
                [theirs[query] for query in both],
                [ours[query] for query in both],
                seed=found.settings.seed,
            )
            ends = f"{more.interval:+.3f}"
            table.append([other, f"{asked:g}", f"{more.n}", f"{more.mean:+.3f}", ends])
    return aligned(table)


def _result(folder: Path) -> EvaluationResult:
    text = read_text(folder / "result.json", StoreError)
    return EvaluationResult.model_validate_json(text)


def _rows(folder: Path, name: str) -> Iterator[Row]:
    """Rows of one evaluation, with ids that no other has."""
    for line in read_text(folder / "outcomes.jsonl", StoreError).splitlines():
        row = Row.model_validate_json(line)
        yield row.model_copy(update={"query_id": f"{name}/{row.query_id}"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not done, then print the pooled tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endtoend", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of all data sets")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", default=[run.name for run in RUNS])
    parser.add_argument("--split", default="test")
    parser.add_argument("--limit", type=int, default=60, help="questions of each run")
    parser.add_argument("--budget", type=float, nargs="+", default=[0.3, 0.5, 1.0])
    parser.add_argument("--policies", help="separated by commas; default: all of a comparison")
    parser.add_argument(
        "--parts",
        type=Path,
        help="learned parts; `shipped`: those of the package; default: hand-set scores",
    )
    parser.add_argument("--admit-by", default="headroom")
    parser.add_argument("--model", default=None)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)

    arguments = ["--split", args.split, "--limit", str(args.limit), "--admit-by", args.admit_by]
    arguments += [part for budget in args.budget for part in ("--budget", str(budget))]
    arguments += ["--concurrency", "1", "--threads", str(args.threads)]
    named = args.policies.split(",") if args.policies else list(ON_HALF)
    if on_half := [name for name in named if name in ON_HALF]:
        arguments += ["--half", ",".join(on_half)]
    for option, value in (
        ("--policies", args.policies),
        ("--parts", args.parts),
        ("--model", args.model),
    ):
        arguments += [option, str(value)] if value is not None else []
    for run in RUNS:
        if run.name not in args.runs:
            continue
        wanted = command(run, args.data, args.out, arguments)
        print(f"\n## {run.name}\n\n{' '.join(wanted[2:])}\n", flush=True)
        if subprocess.run(wanted, check=False).returncode:
            print(f"{run.name} stopped; the same command goes on", file=sys.stderr)
            return 1
    for title, names in POOLED.items():
        done = [name for name in names if name in args.runs]
        if len(done) > 1:
            print(f"\n## {title}: {', '.join(done)} pooled\n")
            found = together(args.out, done)
            print("\n".join([*pooled(found), "", *compared(found)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
