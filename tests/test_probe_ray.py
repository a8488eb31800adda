"""The Ray engine, on a Ray of this machine: the same pools, stops, errors and dead workers."""

import asyncio
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Lock

import pytest

from probes.generate import generate
from probes.plan import ProbeSettings, Question
from probes.pool import read_shards
from probes.probing import Finished, Known, Prober
from probes.ray_engine import RayEngine
from probes.records import BaseRecord, ProbeRecord
from splice import Agent, Function, Query, ScriptedModel, Workflow
from splice.errors import BudgetExceeded, ScriptExhausted, SettingsError
from splice.executor import NodeInput, RunSettings
from splice.ledger import Budget
from splice.records import Request, Trace
from splice.store import TraceStore
from splice.workload import Example, Workload

N_QUESTIONS = 12


def count_words(given: NodeInput) -> str:
    return f"{len(' '.join(given.parents.values()).split())} words"


WORKFLOW = Workflow(
    name="films",
    nodes=(
        Agent(id="film", role="archivist", subtask="find the director"),
        Agent(id="birth", role="archivist", subtask="find when this person was born"),
        Agent(id="other", role="archivist", subtask="find who else is named"),
        Function(id="count", call=count_words),
        Agent(id="writer", role="writer", subtask="answer the question"),
    ),
    edges=(
        ("film", "writer"),
        ("birth", "writer"),
        ("other", "count"),
        ("count", "writer"),
    ),
    output="writer",
)


def example(number: int) -> Example:
    year = 1900 + 7 * number % 100
    query = Query(
        id=f"q{number}",
        text=f"When was the director of Film{number} born?",
        context={
            "film": (f"Film{number} was directed by Person{number}.",),
            "birth": (f"Person{number} was born in {year}.",),
            "other": ("Nothing of use.",),
        },
    )
    return Example(
        query=query, reference={"year": str(year)}, gap_edges=(("film", "birth"),), kind="two hops"
    )


def holds_year(example: Example, answer: str | None) -> dict[str, float]:
    return {"f1": float(example.reference["year"] in (answer or ""))}


WORKLOAD = Workload(
    name="films",
    about="films",
    workflow=WORKFLOW,
    examples=tuple(map(example, range(N_QUESTIONS))),
    metrics=("f1",),
    score=holds_year,
)


def reply(request: Request) -> str:
    """Text that depends on every byte of the prompt."""
    asked = "".join(message.content for message in request.messages)
    number = int(hashlib.sha256(asked.encode()).hexdigest(), 16)
    return f"Person{number % 7} was born in {1900 + number % 100}"


def make_models() -> ScriptedModel:
    return ScriptedModel(reply)


def note(log: str, line: str) -> None:
    with open(log, "a") as file:
        file.write(f"{line}\n")


def wait_for_line(log: Path, line: str) -> None:
    for _ in range(6000):
        if log.exists() and line in log.read_text().split():
            return
        time.sleep(0.01)
    raise AssertionError(f"no line {line!r} in {log}")


def make_logging_models(log: str) -> ScriptedModel:
    """Models that write a line for each call, wherever they run."""

    def logged(request: Request) -> str:
        note(log, str(request.query_id))
        return reply(request)

    return ScriptedModel(logged)


def make_waiting_models(log: str) -> ScriptedModel:
    """Models that never answer, and write a line when they are told to stop."""

    class Waiting(ScriptedModel):
        async def complete(self, request, on_retry):
            note(log, "asked")
            try:
                await asyncio.Event().wait()
            finally:
                note(log, "stopped")

    return Waiting(reply)


def make_deadly_models(victims: dict[str, str], mark: str | None) -> ScriptedModel:
    """Models that kill their process at a stage of some questions; with `mark` once for each."""

    def reply_or_die(request: Request) -> str:
        if victims.get(str(request.query_id)) == request.stage:
            done = None if mark is None else Path(f"{mark}-{request.query_id}")
            if done is None or not done.exists():
                if done is not None:
                    done.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return reply(request)

    return ScriptedModel(reply_or_die)


def refuse() -> ScriptedModel:
    raise SettingsError("no key in HOST_KEY")


def make_silent_models() -> ScriptedModel:
    return ScriptedModel({})


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    """A small Ray of this machine for all tests, started and ended by an engine."""
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.setattr(ray, "init", partial(ray.init, num_cpus=2))
        with engine_of(make_models):
            yield
        assert not ray.is_initialized()


def engine_of(make_models, n_workers: int = 1) -> RayEngine:
    return RayEngine(make_models, n_workers=n_workers, cpus_per_worker=0.1)


def question_of(number: int) -> Question:
    return Question("films", "train", WORKLOAD.examples[number], WORKFLOW, 0)


def timeless(record: BaseRecord | ProbeRecord) -> BaseRecord | ProbeRecord:
    """A record without what differs from run to run: its time, and the id of a timed trace."""
    return record.model_copy(update={"elapsed_s": 0.0, "trace": None})


def timeless_trace(trace: Trace) -> dict:
    """A trace without its times."""

    def without_times(value):
        if isinstance(value, dict):
            return {
                key: without_times(held) for key, held in value.items() if not key.endswith("_s")
            }
        if isinstance(value, list):
            return [without_times(held) for held in value]
        return value

    return without_times(trace.model_dump(mode="json"))


def contents(folder: Path) -> dict[str, tuple[object, object]]:
    """Record and trace by the record's id."""
    found = {}
    for shard in read_shards(folder):
        with TraceStore(folder / f"traces-{shard.number:05}.jsonl") as store:
            traces = store.traces()
        for record in [*shard.bases.values(), *shard.probes.values()]:
            trace = traces[record.trace] if record.trace is not None else None
            found[record.id] = (
                timeless(record),
                None if trace is None else timeless_trace(trace),
            )
    return found


async def probed(probing, question: Question, n_records: int) -> tuple[list[Finished], bool]:
    """What is finished until `n_records` are there, and whether that is all."""
    finished: list[Finished] = []

    async def emit(one: Finished) -> bool:
        finished.append(one)
        return len(finished) < n_records

    return finished, await probing.probe_question(question, Known(), emit)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r"splice-repair\[ray\]"):
        engine_of(make_models)


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
async def test_a_pool_is_the_same_as_one_of_the_local_engine(tmp_path):
    probe = ProbeSettings(control_share=0.5)
    splits = {
        "train": WORKLOAD.model_copy(update={"examples": WORKLOAD.examples[:8]}),
        "validation": WORKLOAD.model_copy(update={"examples": WORKLOAD.examples[8:]}),
    }
    local = await generate(splits, make_models(), tmp_path / "local", probe=probe)
    with engine_of(make_models, n_workers=2) as engine:
        far = await generate(splits, make_models(), tmp_path / "far", probe=probe, engine=engine)
    assert contents(tmp_path / "far") == contents(tmp_path / "local")
    assert far.manifest.counts == local.manifest.counts
    assert far.n_done == N_QUESTIONS
    assert set(far.manifest.counts.by_arm) == {"edge", "resample", "placebo"}


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
async def test_a_pool_that_was_begun_locally_is_gone_on_with(tmp_path):
    few, all_ = ProbeSettings(n_edges=1, control_share=0), ProbeSettings(n_edges=2, control_share=1)
    begun, whole = tmp_path / "begun", tmp_path / "whole"
    await generate({"train": WORKLOAD}, make_models(), begun, probe=few)
    with engine_of(make_models) as engine:
        done = await generate({"train": WORKLOAD}, make_models(), begun, probe=all_, engine=engine)
    await generate({"train": WORKLOAD}, make_models(), whole, probe=all_)
    assert contents(begun) == contents(whole)
    assert done.n_bases == 0


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
@pytest.mark.parametrize("n_records", [1, 2])
async def test_no_model_is_asked_after_a_stop(tmp_path, n_records):
    log, local_log = tmp_path / "calls", tmp_path / "local_calls"
    probe = ProbeSettings(n_edges=3, control_share=1)
    with engine_of(partial(make_logging_models, str(log))) as engine:
        finished, is_complete = await probed(engine(WORKLOAD, probe), question_of(0), n_records)
        await asyncio.sleep(0.5)
        calls = log.read_text()
    local = Prober(
        make_logging_models(str(local_log)), score=holds_year, metric="f1", settings=probe
    )
    await probed(local, question_of(0), n_records)
    assert not is_complete
    assert len(finished) == n_records
    assert calls == local_log.read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
async def test_a_question_that_is_cancelled_stops_in_its_worker(tmp_path):
    log = tmp_path / "log"
    with engine_of(partial(make_waiting_models, str(log))) as engine:
        probing = engine(WORKLOAD, ProbeSettings())
        task = asyncio.create_task(probed(probing, question_of(0), 99))
        await asyncio.to_thread(wait_for_line, log, "asked")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_for_line, log, "stopped")


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
async def test_an_error_of_a_worker_is_the_same_error_here():
    spent = ProbeSettings(run=RunSettings(budget=Budget(max_calls=1)))
    with engine_of(make_models) as engine, pytest.raises(BudgetExceeded) as caught:
        await probed(engine(WORKLOAD, spent), question_of(0), 99)
    assert type(caught.value) is BudgetExceeded
    assert str(caught.value) == "the budget is used up"
    assert caught.value.__cause__ is None
    with engine_of(make_silent_models) as engine, pytest.raises(ScriptExhausted) as silent:
        await probed(engine(WORKLOAD, ProbeSettings()), question_of(0), 99)
    assert type(silent.value) is ScriptExhausted
    assert silent.value.reason == "script_exhausted"
    assert str(silent.value).startswith("no reply left for")


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
def test_models_that_a_worker_cannot_make_are_refused_before_the_first_call():
    with engine_of(refuse) as engine, pytest.raises(SettingsError) as caught:
        engine(WORKLOAD, ProbeSettings())
    assert type(caught.value) is SettingsError
    assert str(caught.value) == "no key in HOST_KEY"


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
def test_what_cannot_be_sent_is_named():
    with pytest.raises(SettingsError, match=r"make_models can't be sent to a worker: .*lock"):
        engine_of(partial(make_logging_models, Lock()))
    locked = WORKLOAD.model_copy(update={"score": partial(holds_year, Lock())})
    problem = "the scorer of workload 'films' can't be sent"
    with engine_of(make_models) as engine, pytest.raises(SettingsError, match=problem):
        engine(locked, ProbeSettings())


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
async def test_what_a_dead_worker_was_at_is_made_by_another_one(tmp_path):
    probe = ProbeSettings(control_share=0.5)
    deadly = partial(make_deadly_models, {"q3": "run", "q5": "trial"}, str(tmp_path / "mark"))
    await generate({"train": WORKLOAD}, make_models(), tmp_path / "local", probe=probe)
    with engine_of(deadly) as engine:
        await generate(
            {"train": WORKLOAD}, make_models(), tmp_path / "far", probe=probe, engine=engine
        )
    assert {path.name for path in tmp_path.glob("mark*")} == {"mark-q3", "mark-q5"}
    assert contents(tmp_path / "far") == contents(tmp_path / "local")


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
async def test_a_probe_that_kills_each_worker_fails_and_no_other_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr("probes.ray_engine.DEATHS", 2)
    probe = ProbeSettings(control_share=0)
    deadly = partial(make_deadly_models, {"q3": "trial"}, None)
    await generate({"train": WORKLOAD}, make_models(), tmp_path / "local", probe=probe)
    with engine_of(deadly) as engine:
        done = await generate(
            {"train": WORKLOAD}, make_models(), tmp_path / "far", probe=probe, engine=engine
        )
    local, far = contents(tmp_path / "local"), contents(tmp_path / "far")
    ((id, (record, trace)),) = (one for one in far.items() if one[1] != local[one[0]])
    assert far.keys() == local.keys()
    assert done.n_done == N_QUESTIONS
    assert done.n_failed == 1
    assert record.query_id == "q3"
    assert record.outcome == "failed"
    assert record.reason.startswith("2 workers died over it")
    assert trace is None
    tried = ("outcome", "reason", "message", "rerun", "evidence", "answer", "scores", "ledger")
    judged = ("delta", "outcome_class", "is_decisive")
    assert record.model_dump(exclude={*tried, *judged}) == local[id][0].model_dump(
        exclude={*tried, *judged}
    )


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
async def test_a_base_run_that_kills_each_worker_is_a_failed_one(monkeypatch):
    monkeypatch.setattr("probes.ray_engine.DEATHS", 1)
    question = question_of(3)
    with engine_of(partial(make_deadly_models, {"q3": "run"}, None)) as engine:
        finished, is_complete = await probed(engine(WORKLOAD, ProbeSettings()), question, 99)
    local, _ = await probed(
        Prober(make_models(), score=holds_year, metric="f1", settings=ProbeSettings()), question, 1
    )
    ((record, trace),) = finished
    assert is_complete
    assert trace is None
    assert record.failure.startswith("1 workers died over it")
    found = {"answer", "scores", "score", "diagnosis", "features", "failure", "ledger", "elapsed_s"}
    assert record.model_dump(exclude=found) == local[0].record.model_dump(exclude=found)


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
def test_an_engine_leaves_a_ray_running_that_it_did_not_start(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    engine_of(make_models).close()
    assert ray.is_initialized()
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
