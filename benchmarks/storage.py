"""What a trace weighs on disk and how long it takes to write, beside LangGraph's SQLite saver.

A fan of ten nodes, each of which writes 2 KiB of text that does not repeat: 20 KiB of payload a
workflow. The time of a write is what a run takes with a store less what it takes without one.
"""

from __future__ import annotations

import base64
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import splice
from benchmarks.engines.splice import workflow_of
from benchmarks.graphs import Body, Graph, fan, mix
from splice.models.scripted import ScriptedModel
from splice.store import TraceStore, read_store

GRAPH = fan(8)
OUTPUT_BYTES = 2048
KIB = 1024

_SAVER = "LangGraph, SQLite saver"

Once: TypeAlias = Callable[[str], Awaitable[str | None]]
"""Runs one workflow on one query and gives its answer."""


def left_out() -> list[str]:
    """The saver, if it is not installed."""
    is_here = find_spec("langgraph") and find_spec("langgraph.checkpoint.sqlite")
    return [] if is_here else ["langgraph-checkpoint-sqlite"]


def filler(size: int) -> Body:
    """A node body that writes `size` bytes of words without meaning, made from all its inputs.

    Short words, because a long run of random characters looks like a secret, which a store redacts.
    """

    async def body(node: str, inputs: Sequence[str]) -> str:
        noise = random.Random(mix(node, inputs)).randbytes(size)
        letters = base64.b32encode(noise).decode().lower()
        return " ".join(letters[i : i + 7] for i in range(0, size, 7))[: size - 1] + "."

    return body


async def answer_of(graph: Graph, body: Body, query: str) -> str:
    """The right answer, computed without any engine."""
    outputs: dict[str, str] = {}
    for node, parents in graph.parents.items():
        outputs[node] = await body(node, [outputs[p] for p in parents] if parents else [query])
    return outputs[graph.sink]


def with_splice(body: Body, store: TraceStore | None) -> Once:
    """SPLICE, with or without a store."""
    workflow, model = workflow_of(GRAPH, body), ScriptedModel({})

    async def run(query: str) -> str | None:
        asked = splice.Query(text=query, id=query)
        trace = await splice.arun(workflow, asked, model=model, store=store)
        return trace.answer

    return run


async def with_langgraph(body: Body, path: Path | None, opened: AsyncExitStack) -> Once:
    """LangGraph, with or without its SQLite saver; a thread for each workflow."""
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

    from benchmarks.engines.langgraph import compiled

    saver = None
    if path is not None:
        saver = await opened.enter_async_context(AsyncSqliteSaver.from_conn_string(str(path)))
    application = compiled(GRAPH, body, saver)

    async def run(query: str) -> str | None:
        config: Any = {"configurable": {"thread_id": query}}
        state = await application.ainvoke({"query": query, "outputs": {}}, config)
        answer: str = state["outputs"][GRAPH.sink]
        return answer

    return run


async def measure_writes(rounds: int) -> dict[str, Any]:
    """Size and time of a write, by way of storing; the ways take turns."""
    body = filler(OUTPUT_BYTES)
    with TemporaryDirectory() as name:
        folder = Path(name)
        files = {"SPLICE": folder / "splice" / "traces.jsonl"}
        ways: dict[str, tuple[Once, Once]] = {}
        async with AsyncExitStack() as opened:
            files["SPLICE"].parent.mkdir()
            store = opened.enter_context(TraceStore(files["SPLICE"]))
            ways["SPLICE"] = with_splice(body, None), with_splice(body, store)
            if not left_out():
                path = files[_SAVER] = folder / "langgraph" / "traces.sqlite"
                path.parent.mkdir()
                ways[_SAVER] = (
                    await with_langgraph(body, None, opened),
                    await with_langgraph(body, path, opened),
                )
            seconds = await _take_turns(ways, body, rounds)
        # Closed by now: SQLite has moved its write-ahead log into the file.
        sizes = {way: _size(path.parent) / rounds for way, path in files.items()}
    payload = OUTPUT_BYTES * len(GRAPH.nodes)
    return {
        way: {
            "kib": sizes[way] / KIB,
            "times_payload": sizes[way] / payload,
            "write_ms": 1000 * (statistics.median(stored) - statistics.median(plain)),
        }
        for way, (plain, stored) in seconds.items()
    }


async def _take_turns(
    ways: dict[str, tuple[Once, Once]], body: Body, rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of each run, without and with a store."""
    seconds: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in ways}
    for turn in range(rounds):
        query = f"query {turn}"
        right = await answer_of(GRAPH, body, query)
        for way, pair in ways.items():
            for run, times in zip(pair, seconds[way], strict=True):
                start = time.perf_counter()
                answer = await run(query)
                times.append(time.perf_counter() - start)
                if answer != right:
                    raise ValueError(f"{way}: the answer to {query!r} is wrong")
    return seconds


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


async def measure_load(n_traces: int) -> dict[str, Any]:
    """Seconds to read back `n_traces` traces of the fan, 200 bytes a node."""
    workflow, model = workflow_of(GRAPH, filler(200)), ScriptedModel({})
    with TemporaryDirectory() as name:
        path = Path(name) / "traces.jsonl"
        with TraceStore(path) as store:
            for place in range(n_traces):
                query = splice.Query(text=f"query {place}", id=str(place))
                store.put_trace(await splice.arun(workflow, query, model=model))
        start = time.perf_counter()
        found = read_store(path)
        seconds = time.perf_counter() - start
        if len(found.traces) != n_traces or found.damage:
            raise ValueError(f"{len(found.traces)} of {n_traces} traces came back")
        return {
            "n_traces": n_traces,
            "seconds": seconds,
            "kib": path.stat().st_size / n_traces / KIB,
        }


async def measure_storage(rounds: int, n_traces: int) -> dict[str, Any]:
    """Everything in this module."""
    return {
        "payload_kib": OUTPUT_BYTES * len(GRAPH.nodes) / KIB,
        "ways": await measure_writes(rounds),
        "load": await measure_load(n_traces),
    }
