"""ToolBench as a workload: offered APIs dealt over two callers, responses replayed, a judge."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from skeletons.reading import sha256
from skeletons.replay import replay_tool
from skeletons.toolbench.apis import Api
from skeletons.toolbench.judge import METRICS, JudgeScorer
from skeletons.toolbench.requests import Asked, part, read_requests
from skeletons.toolbench.responses import Responses, read_cache, read_runs
from splice.errors import DataError, SettingsError
from splice.prompts import one_line
from splice.queries import Split
from splice.records import Document, Query
from splice.workflow import Agent, Function, Tool, Workflow, load_workflow
from splice.workload import Example, Options, Workload, refuse_unknown

OPTIONS = ("cache", "runs", "source", "judge")
CALLERS = ("caller_a", "caller_b")


class _Read(NamedTuple):
    requests: tuple[Asked, ...]
    responses: Responses
    origin: str
    sources: Mapping[str, str]


def load(data: Path | None, *, split: Split, options: Options) -> Workload:
    """ToolBench's requests with recorded responses.

    Args:
        data: folder with `queries.jsonl` and `apis.jsonl`, or StableToolBench's `test_instruction`
            folder or one of its files; None with the option `runs`.
        split: which part of the requests, dealt by a digest of their ids.
        options: either `cache`, a folder with a copy of StableToolBench's response cache, or
            `runs`, a file of recorded runs, with `source` if it holds more than one; `judge`, the
            name of the judge model.

    Raises:
        DataError: a file is missing or malformed, sources would be mixed, or nothing is in the
            split.
        SettingsError: options that are unknown, missing or exclude each other.
    """
    _check(data, options)
    read = _read_runs(options) if data is None else _read_cached(data, options)
    chosen = part(read.requests, split)
    if not chosen:
        raise DataError(f"none of {len(read.requests)} requests is in the {split} split")
    host = load_workflow(Path(__file__).with_name("workflow.toml"))
    tools = {
        api: replay_tool(api.function, api.description, api.parameters, _Answer(read, api))
        for asked in chosen
        for api in asked.apis
    }
    return Workload(
        name="toolbench",
        about=(
            f"ToolBench: {len(chosen)} requests. A planner reads all API documents, two callers "
            "have half of the APIs each, a synthesiser answers. Subtasks are the same for all. "
            f"Calls are answered from {len(read.responses)} responses: {read.origin}. A judge "
            "model says what is solved; figures by different judges can't be compared."
        ),
        workflow=host,
        examples=tuple(_example(asked, host, tools) for asked in chosen),
        metrics=METRICS,
        score=JudgeScorer(None, workflow=host, name=options.get("judge")),
        sources=read.sources,
    )


def _check(data: Path | None, options: Options) -> None:
    refuse_unknown(options, OPTIONS)
    if "cache" in options and "runs" in options:
        raise SettingsError("cache and runs exclude each other: their responses must not be mixed")
    if "runs" in options and data is not None:
        raise SettingsError("recorded runs bring their own requests: give runs or data")
    if "runs" not in options and (data is None or "cache" not in options):
        raise SettingsError(
            "toolbench needs recorded responses: data with the option cache, a copy of "
            "StableToolBench's response cache, or the option runs, a file of recorded runs"
        )
    if "source" in options and "runs" not in options:
        raise SettingsError("the option source chooses among recorded runs; give runs")


def _read_cached(data: Path, options: Options) -> _Read:
    requests, paths = read_requests(data)
    apis = list(dict.fromkeys(api for asked in requests for api in asked.apis))
    responses, hashed = read_cache(Path(options["cache"]), apis)
    sources = {path.name: sha256(path) for path in paths} | {"cache": hashed}
    return _Read(requests, responses, "StableToolBench's cache, real and made-up ones", sources)


def _read_runs(options: Options) -> _Read:
    path = Path(options["runs"])
    requests, responses, source = read_runs(path, options.get("source"))
    return _Read(requests, responses, f"recorded runs of {source}", {path.name: sha256(path)})


class _Answer:
    """Answers calls of one API."""

    def __init__(self, read: _Read, api: Api) -> None:
        self._responses = read.responses
        self._api = api

    def __call__(self, arguments: Mapping[str, object]) -> str:
        return self._responses.answer(self._api, arguments)


def _example(asked: Asked, host: Workflow, tools: Mapping[Api, Tool]) -> Example:
    listed = [f"{api.function}: {one_line(api.description, limit=120)}" for api in asked.apis]
    documents = (Document(title="APIs", text="\n".join(listed)),) if listed else ()
    return Example(
        query=Query(id=asked.id, text=asked.text, context={"planner": documents}),
        reference={"relevant": list(asked.relevant)},
        kind=asked.kind,
        workflow=_with(host, deal(asked), tools),
    )


def deal(asked: Asked) -> tuple[tuple[Api, ...], tuple[Api, ...]]:
    """A half of the offered APIs for each caller, by the request's id."""
    apis = list(asked.apis)
    random.Random(f"toolbench/{asked.id}").shuffle(apis)
    middle = (len(apis) + 1) // 2
    return tuple(apis[:middle]), tuple(apis[middle:])


def _with(host: Workflow, dealt: Sequence[Sequence[Api]], tools: Mapping[Api, Tool]) -> Workflow:
    """The host with the dealt APIs in the callers' hands."""
    names = {
        caller: tuple(api.function for api in apis)
        for caller, apis in zip(CALLERS, dealt, strict=True)
    }
    nodes: list[Agent | Function] = [
        node.model_copy(update={"tools": names[node.id]}) if node.id in names else node
        for node in host.nodes
    ]
    offered = tuple(tools[api] for apis in dealt for api in apis)
    return host.changed(nodes=tuple(nodes), tools=offered)
