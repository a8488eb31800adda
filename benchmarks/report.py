"""Results as Markdown, and the machine they were measured on."""

from __future__ import annotations

import datetime
import math
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import splice
from benchmarks.engines import Engines

BEGIN = "<!-- benchmark:begin -->"
END = "<!-- benchmark:end -->"

_WAYS = {
    "everything": "run everything again",
    "position": "everything from the receiver on, in order (resume by position)",
    "supersteps": "every level from the receiver's on (replay from a LangGraph checkpoint)",
    "descendants": "the receiver and all its descendants",
    "splice": "SPLICE: the receiver, and nodes whose input changed",
}


def machine(engines: Engines) -> dict[str, Any]:
    """What the numbers depend on; the load is what it is before the first measurement."""
    names = {name for engine in engines.present for name in engine.DISTRIBUTIONS}
    names |= {"pydantic", "langgraph-checkpoint-sqlite"}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_at_start": [round(load, 2) for load in os.getloadavg()],
        "versions": {name: found for name in sorted(names) if (found := _version(name))},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return splice.__version__ if distribution == "splice-repair" else None


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def _cell(value: object, digits: int) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, (int, float)) else "–"


def markdown(results: dict[str, Any]) -> str:
    """All results as a piece of a Markdown page."""
    parts = [
        _machine_part(results["machine"], results["left_out"]),
        _targets_part(results),
        _overhead_part(results["speed"]),
        _waiting_part(results["speed"]),
        _refused_part(results["speed"]),
        _trials_part(results["trials"]),
        _storage_part(results["storage"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _machine_part(found: dict[str, Any], left_out: Sequence[str]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    load = " / ".join(map(str, found["load_at_start"]))
    lines = [
        f"Measured on {found['date']}: {found['cores']} cores ({found['processor']}), "
        f"{found['system']}, Python {found['python']}; load average at the start {load}.",
        f"Versions: {versions}.",
    ]
    if left_out:
        lines.append(f"Left out because not installed: {', '.join(left_out)}.")
    return "\n".join(lines)


def _targets_part(results: dict[str, Any]) -> str:
    speed, storage = results["speed"], results["storage"]
    by_graph = speed["overhead_us"].values()
    nodes = results["trials"]["nodes"]
    lines = [
        (
            "µs a node with nothing to do, worst graph",
            max(values["SPLICE"] for values in by_graph),
            40.0,
            1,
        ),
        *(
            (
                f"times {name}, worst graph",
                max(values["SPLICE"] / values[name] for values in by_graph),
                2.0,
                2,
            )
            for name in next(iter(by_graph))
            if name.startswith("bare asyncio")
        ),
        ("skewed graph, wall / critical path", speed["barrier"]["SPLICE"], 1.05, 3),
        ("100 workflows at once, wall / critical path", speed["crowd"]["wall"]["SPLICE"], 1.25, 3),
        ("nodes a trial executes / nodes that it must", nodes["splice"] / nodes["needed"], 1.0, 3),
        ("trace on disk / payload", storage["ways"]["SPLICE"]["times_payload"], 1.15, 3),
    ]
    rows = [
        [what, _cell(found, digits), f"≤ {most:g}", "yes" if found <= most else "**no**"]
        for what, found, most, digits in lines
    ]
    return "**Targets**\n\n" + table(["", "measured", "target", "met"], rows)


def _overhead_part(speed: dict[str, Any]) -> str:
    by_graph = speed["overhead_us"]
    rows = [
        [name, *(_cell(values[name], 1) for values in by_graph.values())]
        for name in _order(next(iter(by_graph.values())))
    ]
    head = ["µs a node", *by_graph]
    return "**Nodes with nothing to do**\n\n" + table(head, rows)


def _order(values: dict[str, Any]) -> list[str]:
    """Engines, the fastest first and those without a number last."""
    return sorted(values, key=lambda name: v if isinstance(v := values[name], float) else math.inf)


def _waiting_part(speed: dict[str, Any]) -> str:
    barrier, crowd = speed["barrier"], speed["crowd"]
    rows = [
        [
            name,
            _cell(barrier[name], 2),
            _cell(crowd["wall"][name], 2),
            _cell(crowd["cpu_us"].get(name), 0),
        ]
        for name in _order(crowd["wall"])
    ]
    head = [
        "",
        "skewed graph, wall / critical path",
        "100 workflows at once, wall / critical path",
        "the same, CPU µs a node",
    ]
    return "**Nodes that wait as for a model**\n\n" + table(head, rows)


def _refused_part(speed: dict[str, Any]) -> str:
    """Why a cell holds a dash."""
    columns = {**speed["overhead_us"], "skewed": speed["barrier"], "100": speed["crowd"]["wall"]}
    lines = [
        f"- {name}, {graph}: no right answer (`{value['refused']}`)"
        for graph, values in columns.items()
        for name, value in values.items()
        if isinstance(value, dict)
    ]
    return "\n".join(lines)


def _trials_part(trials: dict[str, Any]) -> str:
    nodes, n_trials = trials["nodes"], trials["n_trials"]
    rows = [
        [words, _cell(nodes[way] / n_trials, 2), f"{nodes[way] / nodes['needed']:.2f}"]
        for way, words in _WAYS.items()
    ]
    head = ["way to run again after a message", "nodes a trial", "times what is needed"]
    title = f"**Trials on {n_trials:,} random workflows, each checked against running everything**"
    return f"{title}\n\n{table(head, rows)}"


def _storage_part(storage: dict[str, Any]) -> str:
    rows = [
        [name, *(_cell(way[key], 2) for key in ("kib", "times_payload", "write_ms"))]
        for name, way in storage["ways"].items()
    ]
    head = ["trace of a fan 1-8-1", "KiB a workflow", "times the payload", "ms a write"]
    load = storage["load"]
    said = (
        f"{load['n_traces']:,} traces of {load['kib']:.1f} KiB are read back in "
        f"{load['seconds']:.1f} s ({load['seconds'] / load['n_traces'] * 1e6:.0f} µs each)."
    )
    title = f"**Traces on disk, {storage['payload_kib']:.0f} KiB of payload a workflow**"
    return f"{title}\n\n{table(head, rows)}\n\n{said}"


def replace_block(page: str, block: str) -> str:
    """The page with what stands between the two markers replaced.

    Raises:
        ValueError: the page has no such markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"
