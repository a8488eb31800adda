"""Going on where a run stopped: nothing that finished is paid for twice, nothing else is kept."""

import asyncio
import importlib.util
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import splice
from splice.api import arepair
from splice.errors import ModelError, ScriptExhausted, StoreError
from splice.executor import RunSettings, execute
from splice.models.protocol import OnRetry
from splice.models.scripted import Reply, ScriptedModel
from splice.records import Completion, ModelSettings, NodeRun, Query, Request, Trace
from splice.store import TraceStore, read_store
from splice.tools import tool
from splice.workflow import Agent, Workflow

ROOT = Path(splice.__file__).parents[1]
QUERY = Query(text="Where?", id="q")
FAILED = ModelError("no answer", reason="server_error")


def agent(name: str, **more) -> Agent:
    return Agent(**{"id": name, "role": f"You are {name}.", **more})


def make(edges: str, output: str, *nodes: Agent, **more) -> Workflow:
    pairs = [tuple(edge.split("-")) for edge in edges.split()]
    own = {node.id: node for node in nodes}
    names = dict.fromkeys([name for pair in pairs for name in pair])
    return Workflow(
        nodes=[own.get(name) or agent(name) for name in names], edges=pairs, output=output, **more
    )


def echo(request: Request) -> str:
    """An answer that changes with anything that the model is shown."""
    text = "".join(message.content for message in request.messages)
    return f"{request.node} {sum(map(ord, text)) % 100_003}"


class Shuffled(ScriptedModel):
    """Lets calls end in an order that a seed picks, and breaks down after so many."""

    def __init__(self, seed: int, n_good: int = 1000) -> None:
        super().__init__(echo)
        self.rng = random.Random(seed)
        self.n_left = n_good

    async def complete(self, request: Request, on_retry: OnRetry) -> Completion:
        for _ in range(self.rng.randint(0, 12)):
            await asyncio.sleep(0)
        self.n_left -= 1
        if self.n_left < 0:
            raise ModelError("down", reason="connection")
        return await super().complete(request, on_retry)


def random_workflow(seed: int) -> Workflow:
    rng = random.Random(seed)
    names = [f"n{i}" for i in range(rng.randint(3, 10))]
    edges = []
    for place, source in enumerate(names[:-1]):
        later = names[place + 1 :]
        edges += [(source, to) for to in rng.sample(later, rng.randint(1, min(3, len(later))))]
    return Workflow(nodes=[agent(n) for n in names], edges=edges, output=names[-1])


def timeless(trace: Trace) -> str:
    """What a trace says, but for its times and for who paid which call when."""
    return trace.model_copy(update={"calls": ()}).content()


# --- content, not position -------------------------------------------------------------------


async def test_a_finished_run_that_is_run_again_makes_no_call(tmp_path: Path) -> None:
    for seed in range(30):
        workflow = random_workflow(seed)
        with TraceStore(tmp_path / f"{seed}.jsonl") as store:
            first = await splice.arun(workflow, QUERY, model=Shuffled(seed), store=store)
        with TraceStore(tmp_path / f"{seed}.jsonl") as store:
            model = Shuffled(seed + 1)
            second = await splice.arun(workflow, QUERY, model=model, store=store)
        assert model.requests == []
        assert timeless(second) == timeless(first)
        assert second.calls == ()


async def test_a_run_that_broke_down_goes_on_whatever_the_order_of_completion(
    tmp_path: Path,
) -> None:
    n_resumed = 0
    for seed in range(40):
        workflow = random_workflow(seed)
        whole = await execute(workflow, QUERY, Shuffled(0), keep_keys=True)
        n_good = random.Random(seed).randrange(len(workflow.nodes))
        path = tmp_path / f"{seed}.jsonl"
        with TraceStore(path) as store:
            broken = await splice.arun(workflow, QUERY, model=Shuffled(seed, n_good), store=store)
        done = {run.node for run in broken.node_runs if run.status == "ok"}
        whole_runs = {run.node: run.output for run in whole.node_runs}
        usable = {run.node for run in broken.node_runs if run.output == whole_runs[run.node]}
        with TraceStore(path) as store:
            model = Shuffled(seed + 1)
            resumed = await splice.arun(workflow, QUERY, model=model, store=store)
        assert timeless(resumed) == timeless(whole)
        asked = [request.node for request in model.requests]
        assert sorted(asked) == sorted({node.id for node in workflow.nodes} - usable)
        n_resumed += bool(done)
    assert n_resumed > 10


async def test_nodes_that_failed_are_tried_again_on_resume(tmp_path: Path) -> None:
    workflow = make("a-z b-z", "z")
    with TraceStore(tmp_path / "s.jsonl") as store:
        model = ScriptedModel({"a": ["a"], "b": [FAILED, "b"], "z": ["without b", "with b"]})
        first = await splice.arun(workflow, QUERY, model=model, store=store)
        second = await splice.arun(workflow, QUERY, model=model, store=store)
    assert (first.answer, second.answer) == ("without b", "with b")
    assert [request.node for request in model.requests] == ["a", "b", "z", "b", "z"]


async def test_a_node_that_abstained_is_not_asked_again(tmp_path: Path) -> None:
    reply = '{"Response": "Insufficient Input", "Reasoning": "no year"}'
    workflow = make("a-z", "z", agent("a", may_abstain=True))
    with TraceStore(tmp_path / "s.jsonl") as store:
        model = ScriptedModel({"a": [reply], "z": ["z"]})
        first = await splice.arun(workflow, QUERY, model=model, store=store)
        second = await splice.arun(workflow, QUERY, model=model, store=store)
    assert timeless(first) == timeless(second)
    assert len(model.requests) == 2


async def test_an_edited_node_runs_again_and_the_others_do_not(tmp_path: Path) -> None:
    workflow = make("a-b b-c c-z x-y y-z", "z")
    with TraceStore(tmp_path / "s.jsonl") as store:
        await splice.arun(workflow, QUERY, model=ScriptedModel(echo), store=store)
        edited = make("a-b b-c c-z x-y y-z", "z", agent("b", subtask="Do it well."))
        model = ScriptedModel(echo)
        await splice.arun(edited, QUERY, model=model, store=store)
        assert [request.node for request in model.requests] == ["b", "c", "z"]
        steady = make("a-b b-c c-z x-y y-z", "z", agent("b", subtask="Do it otherwise."))
        same = ScriptedModel(lambda request: store_output(store, "b", request))
        await splice.arun(steady, QUERY, model=same, store=store)
        assert [request.node for request in same.requests] == ["b"]


def store_output(store: TraceStore, node: str, request: Request) -> Reply:
    """What a node said the first time."""
    assert request.node == node
    return next(run.output for run in store.node_runs().values() if run.node == node)


@pytest.mark.parametrize(
    "change",
    [
        {"model": ModelSettings(temperature=0.7)},
        {"model": ModelSettings(name="other")},
        {"role": "You are new."},
        {"tools": ("look",)},
    ],
)
async def test_any_change_of_what_a_node_is_makes_it_run_again(tmp_path: Path, change) -> None:
    @tool(effects="none")
    def look() -> str:
        """Look."""
        return "seen"

    with TraceStore(tmp_path / "s.jsonl") as store:
        old = make("a-z", "z", tools=(look,))
        await splice.arun(old, QUERY, model=ScriptedModel(echo), store=store)
        model = ScriptedModel(echo)
        new = make("a-z", "z", agent("a", **change), tools=(look,))
        await splice.arun(new, QUERY, model=model, store=store)
    assert model.requests[0].node == "a"


async def test_nodes_in_another_order_find_their_own_runs(tmp_path: Path) -> None:
    with TraceStore(tmp_path / "s.jsonl") as store:
        model = ScriptedModel(echo)
        first = await splice.arun(make("a-z b-z", "z"), QUERY, model=model, store=store)
        other = Workflow(
            nodes=[agent("z"), agent("b"), agent("a")], edges=[("a", "z"), ("b", "z")], output="z"
        )
        again = ScriptedModel(echo)
        second = await splice.arun(other, QUERY, model=again, store=store)
    assert again.requests == []
    assert {run.node: run.output for run in first.node_runs} == {
        run.node: run.output for run in second.node_runs
    }


async def test_another_query_rollout_or_model_shares_nothing(tmp_path: Path) -> None:
    workflow = make("a-z", "z")
    with TraceStore(tmp_path / "s.jsonl") as store:
        for query, rollout, name in [
            (QUERY, 0, "m"),
            (Query(text="When?"), 0, "m"),
            (QUERY, 1, "m"),
            (QUERY, 0, "n"),
            (Query(text="Where?", context={"a": ["x"], "z": ["y"]}), 0, "m"),
        ]:
            model = ScriptedModel(echo, name=name)
            settings = RunSettings(rollout=rollout)
            await splice.arun(workflow, query, model=model, store=store, settings=settings)
            assert len(model.requests) == 2


async def test_a_batch_that_is_repaired_again_makes_no_call_for_its_base_runs(
    tmp_path: Path,
) -> None:
    workflow = make("a-z b-z", "z")
    queries = [Query(text=f"Where is {i}?", id=f"q{i}") for i in range(12)]
    with TraceStore(tmp_path / "s.jsonl") as store:
        first = await splice.arepair_many(
            workflow, queries, model=Shuffled(1), store=store, budget_fraction=0.0
        )
    with TraceStore(tmp_path / "s.jsonl") as store:
        model = Shuffled(2)
        second = await splice.arepair_many(
            workflow, queries[::-1], model=model, store=store, budget_fraction=0.0, concurrency=3
        )
    assert model.requests == []
    assert {r.query.id: r.answer for r in first.results} == {
        r.query.id: r.answer for r in second.results
    }


async def test_a_run_that_is_cancelled_keeps_what_had_finished(tmp_path: Path) -> None:
    class Slow(ScriptedModel):
        async def complete(self, request: Request, on_retry: OnRetry) -> Completion:
            if request.node == "c":
                reached.set()
                await asyncio.Event().wait()
            return await super().complete(request, on_retry)

    reached = asyncio.Event()
    workflow = make("a-b b-c c-z", "z")
    with TraceStore(tmp_path / "s.jsonl") as store:
        work = asyncio.create_task(splice.arun(workflow, QUERY, model=Slow(echo), store=store))
        await reached.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert sorted(run.node for run in store.node_runs().values()) == ["a", "b"]
        model = ScriptedModel(echo)
        await splice.arun(workflow, QUERY, model=model, store=store)
    assert [request.node for request in model.requests] == ["c", "z"]


# --- kill -9 and a full disk -----------------------------------------------------------------

FLOW = '''
import asyncio
import os
import random
import resource
import sys

import splice
from splice.errors import StoreError
from splice.executor import NodeInput
from splice.store import TraceStore
from splice.workflow import Function, Workflow

NAMES = [f"n{i}" for i in range(24)]
EDGES = [
    (source, receiver)
    for place, receiver in enumerate(NAMES)
    for source in random.Random(place).sample(NAMES[:place], min(place, 2))
]
HAS_READER = {source for source, _ in EDGES}
EDGES += [(name, "end") for name in NAMES if name not in HAS_READER]


is_paced = False


def say(*words):
    if is_paced:
        os.read(0, 1)
    os.write(1, (" ".join(words) + "\\n").encode())


async def work(given: NodeInput) -> str:
    say("started", given.node)
    for _ in range(random.Random(given.node).randint(0, 8)):
        await asyncio.sleep(0)
    heard = " ".join(sorted(given.parents.values()))
    return f"{given.node} of {random.Random(heard + given.query.text).randrange(10**9)} " * 40


WORKFLOW = Workflow(
    nodes=[Function(id=name, call=work) for name in (*NAMES, "end")], edges=EDGES, output="end"
)


class Telling(TraceStore):
    """Says which node runs are in the file."""

    def put_node_run(self, run):
        name = super().put_node_run(run)
        say("kept", run.node)
        return name


def run_paced(path):
    global is_paced
    is_paced = True
    with Telling(path) as store:
        splice.run(WORKFLOW, "Where?", store=store)
    say("finished")


def run_until_full(path, n_bytes):
    with Telling(path) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))
        try:
            splice.run(WORKFLOW, "Where?", store=store)
        except StoreError as error:
            say("refused", str(error))
    say("finished")
'''


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module that the child processes run, in this process."""
    path = tmp_path_factory.mktemp("flow") / "flow.py"
    path.write_text(FLOW)
    spec = importlib.util.spec_from_file_location("flow", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(flow: ModuleType, call: str) -> subprocess.Popen[str]:
    folder = str(Path(flow.__file__).parent)
    code = f"import sys; sys.path[:0] = [{folder!r}, {str(ROOT)!r}]; import flow; flow.{call}"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def lines_until(child: subprocess.Popen[str], is_enough: Callable[[int], bool]) -> list[str]:
    """What the child says, until that is enough or it has ended."""
    found: list[str] = []
    assert child.stdout is not None
    for line in child.stdout:
        found.append(line.strip())
        if is_enough(len(found)):
            break
    return found


async def uninterrupted(flow: ModuleType) -> Trace:
    return await execute(flow.WORKFLOW, Query(text="Where?"), {}, keep_keys=True)


def named(lines: list[str], word: str) -> set[str]:
    return {line.split()[1] for line in lines if line.startswith(word)}


@pytest.mark.slow
async def test_after_kill_9_everything_that_finished_is_there_and_is_not_repeated(
    tmp_path: Path, flow: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = await uninterrupted(flow)
    for seed in range(6):
        path = tmp_path / f"{seed}.jsonl"
        n_lines = random.Random(seed).randint(1, 45)
        with start(flow, f"run_paced({str(path)!r})") as child:
            assert child.stdin is not None
            assert child.stdout is not None
            # It may say a little more than is waited for, so the blow falls at any moment.
            child.stdin.write("x" * (n_lines + 4))
            child.stdin.flush()
            said = lines_until(child, lambda n, most=n_lines: n >= most)
            os.kill(child.pid, signal.SIGKILL)
            said += [line.strip() for line in child.stdout]
        assert "finished" not in said
        stored = {run.node for run in read_store(path).node_runs.values()}
        assert named(said, "kept") <= stored <= named(said, "started")
        capfd.readouterr()
        with TraceStore(path) as store:
            resumed = await splice.arun(flow.WORKFLOW, "Where?", store=store)
        again = named(capfd.readouterr().out.splitlines(), "started")
        assert again == {node.id for node in flow.WORKFLOW.nodes} - stored
        assert resumed.content() == whole.content()
        assert resumed.answer is not None
        assert read_store(path).damage == ()


@pytest.mark.slow
async def test_a_full_disk_is_a_store_error_and_loses_nothing_that_was_written(
    tmp_path: Path, flow: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = await uninterrupted(flow)
    for n_bytes in (600, 3_000, 11_111):
        path = tmp_path / f"{n_bytes}.jsonl"
        with start(flow, f"run_until_full({str(path)!r}, {n_bytes})") as child:
            said = lines_until(child, lambda n: False)
        refusal = next(line for line in said if line.startswith("refused"))
        assert "can't be written: File too large; every record before is safe" in refusal
        assert said[-1] == "finished"
        contents = read_store(path)
        stored = {run.node for run in contents.node_runs.values()}
        assert stored == named(said, "kept")
        assert contents.damage == ()
        assert path.stat().st_size <= n_bytes
        capfd.readouterr()
        with TraceStore(path) as store:
            resumed = await splice.arun(flow.WORKFLOW, "Where?", store=store)
        again = named(capfd.readouterr().out.splitlines(), "started")
        assert again == {node.id for node in flow.WORKFLOW.nodes} - stored
        assert resumed.content() == whole.content()


async def test_a_store_that_refuses_stops_the_run_and_cancels_its_calls(tmp_path: Path) -> None:
    class Full(TraceStore):
        def put_node_run(self, run: NodeRun) -> str:
            if run.node == "b":
                raise StoreError("full")
            return super().put_node_run(run)

    started: list[str | None] = []

    class Counting(ScriptedModel):
        async def complete(self, request: Request, on_retry: OnRetry) -> Completion:
            started.append(request.node)
            await asyncio.sleep(0)
            if request.node == "c":
                await asyncio.Event().wait()
            return await super().complete(request, on_retry)

    path = tmp_path / "s.jsonl"
    with Full(path) as store, pytest.raises(StoreError, match="full"):
        await splice.arun(make("a-b a-c b-z c-z", "z"), QUERY, model=Counting(echo), store=store)
    assert set(started) == {"a", "b", "c"}
    assert [run.node for run in read_store(path).node_runs.values()] == ["a"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_repair_that_was_cut_off_in_its_trial_goes_on_from_the_trials_nodes(
    tmp_path: Path,
) -> None:
    """The receiver had answered anew when the process died; only the node behind it still runs."""
    finder = Agent(id="finder", role="finder", subtask="Which city?", documents="The city is Doha.")
    hours = Agent(
        id="hours",
        role="hours",
        subtask="How many hours?",
        documents="Doha: 31 hours.",
        abstention_phrase="not found",
    )
    desk = Agent(id="desk", role="desk")
    workflow = Workflow(
        nodes=(finder, hours, desk), edges=(("finder", "desk"), ("hours", "desk")), output="desk"
    )

    def answer(is_cut: bool) -> ScriptedModel:
        def reply(request: Request) -> Reply:
            told = request.messages[-1].content
            if request.node == "finder":
                return "Doha"
            if request.node == "hours":
                return "31 hours" if "additional evidence" in told else "not found"
            if request.stage == "trial" and is_cut:
                raise ScriptExhausted("the process dies here")
            return "31 hours" if "31" in told else "unknown"

        return ScriptedModel(reply)

    path = tmp_path / "traces.jsonl"
    with TraceStore(path) as store, pytest.raises(ScriptExhausted):
        await arepair(workflow, "How long?", model=answer(is_cut=True), store=store)
    model = answer(is_cut=False)
    with TraceStore(path) as store:
        result = await arepair(workflow, "How long?", model=model, store=store)
    assert result.answer == "31 hours"
    assert [(request.node, request.stage) for request in model.requests] == [("desk", "trial")]
