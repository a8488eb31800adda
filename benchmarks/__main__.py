"""Measure SPLICE beside other engines, in one process and one run.

Prints everything as JSON, or as Markdown with `--markdown`; `--write` also puts the Markdown
between the markers of a page.

    python -m benchmarks --write docs/performance.md
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines import Engines, installed
from benchmarks.report import machine, markdown, replace_block
from benchmarks.speed import measure_speed
from benchmarks.storage import left_out, measure_storage
from benchmarks.trials import measure_trials


async def measure(engines: Engines, *, rounds: int, n_trials: int, n_traces: int) -> dict[str, Any]:
    """Every measurement, one after the other."""
    return {
        "machine": machine(engines),
        "left_out": [*engines.left_out, *left_out()],
        "speed": await measure_speed(engines.present, rounds),
        "trials": await measure_trials(n_trials),
        "storage": await measure_storage(rounds, n_traces),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, then print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each engine")
    parser.add_argument("--trials", type=int, default=1000, help="random workflows")
    parser.add_argument("--traces", type=int, default=10_000, help="traces to read back")
    parser.add_argument("--markdown", action="store_true", help="print tables, not JSON")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page whose block to replace")
    args = parser.parse_args(argv)

    page = args.write.read_text("utf-8") if args.write else None
    results = asyncio.run(
        measure(installed(), rounds=args.rounds, n_trials=args.trials, n_traces=args.traces)
    )
    block = markdown(results)
    print(block if args.markdown else json.dumps(results, indent=2))
    if page is not None:
        args.write.write_text(replace_block(page, block), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
