"""Probes on a Ray cluster: for pools that one machine can't make in time.

Workers are processes of the cluster that run the coroutine of `probes.probing`, one record at a
time. The command that asked gets each record, writes it, and says whether there is to be another
one, so a limit of time, a stop and a kill act as they do on one machine.

Ray moves code as pickles between its processes: join only clusters that you trust.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, TypeAlias

from probes.plan import ProbeSettings, Question, next_probe
from probes.probing import Emit, Finished, Known, Prober, base_record, edge_score, probe_record
from probes.records import BaseRecord
from splice._version import __version__
from splice.errors import ModelError, SettingsError, SpliceError
from splice.executor import Models
from splice.files import Closing
from splice.workload import Scorer, Workload

MakeModels: TypeAlias = Callable[[], Models]
"""Makes the models inside a worker: what holds locks and connections can't be sent to one."""

DEATHS: Final = 3
"""Workers that may die over one record before it counts as failed."""

START_S: Final = 300.0
"""Seconds in which a worker must have started: a cluster may have to add a machine first."""


class RayEngine(Closing):
    """Makes what probes the questions of a workload on a Ray cluster.

    All workloads share the same workers. One that dies is replaced, and the records that it was at
    begin anew; what it had spent on them is in no ledger. A record over which `DEATHS` workers died
    is written as failed, so that no question can hold up a pool. If none can take the place of a
    dead worker within `START_S`, the command ends with a `ModelError`.

    No worker knows what the others spend: budgets are checked between records, by the caller. Each
    call costs a few milliseconds, so the engine is for models that take far longer to answer.

    >>> def make_models() -> Models:
    ...     return Endpoint("http://models.internal/v1", model="qwen")
    >>> with RayEngine(make_models, n_workers=8) as engine:  # doctest: +SKIP
    ...     await generate({"train": workload}, make_models(), "pool", engine=engine)
    """

    def __init__(
        self,
        make_models: MakeModels,
        *,
        n_workers: int,
        cpus_per_worker: float = 1.0,
        address: str | None = None,
    ) -> None:
        """Take part in the Ray of this process; if there is none, join or start one.

        Args:
            make_models: called once by each worker. It and the workload must be importable on every
                machine; what is defined in a script or a function is sent along.
            n_workers: processes, each of which probes many questions at a time.
            cpus_per_worker: cores that Ray sets apart for each.
            address: of a cluster; None: the one that `RAY_ADDRESS` names, or else this machine.

        Raises:
            SettingsError: Ray is missing or can't be joined, or `make_models` can't be sent.
        """
        if n_workers < 1:
            raise SettingsError(f"n_workers is {n_workers}; at least 1 is needed")
        self._ray = _import_ray()
        packed = _packed("make_models", make_models)
        self._owns_ray = _join(self._ray, address)
        self._crew = _Crew(self._ray, packed, n_workers, cpus_per_worker)

    def close(self) -> None:
        """End the workers, and Ray itself if it was joined or started here."""
        self._crew.close()
        if self._owns_ray:
            self._owns_ray = False
            self._ray.shutdown()

    def __call__(self, workload: Workload, settings: ProbeSettings) -> _RayProbing:
        """What probes the questions of one workload. The workers have started when it returns.

        Raises:
            SettingsError: the scorer can't be sent, or a worker does not start.
            SpliceError: `make_models` raised it in a worker.
        """
        setup = _Setup(workload.score, settings.metric or workload.metrics[0], settings)
        packed = _packed(f"the scorer of workload {workload.name!r}", setup)
        sent = self._ray.put(packed)
        self._crew.start(sent)
        return _RayProbing(self._crew, sent, settings)


class _Setup(NamedTuple):
    """What a worker needs to know of a workload."""

    score: Scorer
    metric: str
    settings: ProbeSettings


class _Step(NamedTuple):
    """What one call of a worker made."""

    finished: Finished | None
    """None: nothing was missing."""
    is_complete: bool


class _Worker:
    """Lives in a process of the cluster, and probes with models of its own."""

    def __init__(self, make_models: bytes) -> None:
        self._make_models = make_models
        self._models: Models | None = None
        self._probers: dict[bytes, Prober] = {}

    async def start(self, setup: bytes) -> str:
        """Make ready for a workload; return the version that is installed here."""
        self._prober(setup)
        return __version__

    async def step(self, setup: bytes, question: bytes, known: Known) -> _Step:
        """Make the first record that is missing of a question."""
        made: list[Finished] = []

        async def keep(finished: Finished) -> bool:
            made.append(finished)
            return False

        is_complete = await self._prober(setup).probe_question(_unpacked(question), known, keep)
        return _Step(made[0] if made else None, is_complete)

    def _prober(self, setup: bytes) -> Prober:
        if setup not in self._probers:
            if self._models is None:
                self._models = _unpacked(self._make_models)()
            score, metric, settings = _unpacked(setup)
            self._probers[setup] = Prober(
                self._models, score=score, metric=metric, settings=settings
            )
        return self._probers[setup]


@dataclass(slots=True, eq=False)
class _Seat:
    """The place of a worker; another one takes it when the worker dies."""

    worker: Any
    retrying: asyncio.Lock = field(default_factory=asyncio.Lock)
    n_questions: int = 0


class _Lost(Exception):
    """Raised if `DEATHS` workers died over one record."""


class _Crew:
    """The workers of an engine."""

    def __init__(self, ray: Any, make_models: bytes, n_workers: int, n_cpus: float) -> None:
        self._ray = ray
        self._make_models = make_models
        self._n_workers = n_workers
        self._n_cpus = n_cpus
        self._seats: list[_Seat] = []

    def start(self, setup: Any) -> None:
        """Make all workers ready for a workload.

        Raises:
            SettingsError: a worker does not start.
            SpliceError: `make_models` raised it.
        """
        while len(self._seats) < self._n_workers:
            self._seats.append(_Seat(self._new_worker()))
        for seat in self._seats:
            seat.retrying = asyncio.Lock()  # a lock belongs to the event loop that it is used in
        errors = self._ray.exceptions
        asked = [seat.worker.start.remote(setup) for seat in self._seats]
        try:
            for version in self._ray.get(asked, timeout=START_S):
                _require_own(version)
        except errors.RayTaskError as error:
            raise _cause_of(error) from _page(error)
        except errors.GetTimeoutError:
            raise SettingsError(
                f"not all of {self._n_workers} workers started within {START_S:g} s; the cluster "
                f"has {self._ray.cluster_resources().get('CPU', 0):g} cores, and each worker takes "
                f"{self._n_cpus:g}"
            ) from None
        except errors.RayError as error:
            raise SettingsError(f"a worker can't start: {_last_line(error)}") from None

    def take(self) -> _Seat:
        """The seat with the fewest questions, for one more; give it back with `release`."""
        seat = min(self._seats, key=lambda seat: seat.n_questions)
        seat.n_questions += 1
        return seat

    def release(self, seat: _Seat) -> None:
        """A question has left its seat."""
        seat.n_questions -= 1

    async def step(self, seat: _Seat, setup: Any, question: bytes, known: Known) -> _Step:
        """Have the next record of a question made.

        Raises:
            _Lost: one worker after another died over it.
            ModelError: Ray itself has failed, or a worker that died could not be replaced.
        """
        for n_deaths in range(DEATHS):
            # Of all that ran when a worker died nobody knows what killed it. One by one they are
            # tried again, so that the others don't die of it a second time.
            async with seat.retrying if n_deaths else nullcontext():
                worker = seat.worker
                try:
                    step: _Step = await self._answer(worker.step.remote(setup, question, known))
                    return step
                except self._ray.exceptions.RayActorError as error:
                    reason = _last_line(error)
            if seat.worker is worker:
                self._ray.kill(worker)
                seat.worker = self._new_worker()
            await self._await_start(seat.worker, setup)
        raise _Lost(f"{DEATHS} workers died over it; Ray says: {reason}")

    async def _await_start(self, worker: Any, setup: Any) -> None:
        """Wait for a worker that replaces another one.

        Raises:
            ModelError: there is no room for it any more.
        """
        try:
            _require_own(await asyncio.wait_for(self._answer(worker.start.remote(setup)), START_S))
        except TimeoutError:
            raise ModelError(
                f"a worker died, and no other one started within {START_S:g} s", reason="ray"
            ) from None
        except self._ray.exceptions.RayActorError:
            return  # the next step meets the dead worker and counts it

    async def _answer(self, ref: Awaitable[Any]) -> Any:
        """What a worker returns, or raises."""
        errors = self._ray.exceptions
        try:
            return await ref
        except asyncio.CancelledError:
            self._ray.cancel(ref)
            raise
        except errors.RayTaskError as error:
            raise _cause_of(error) from _page(error)
        except errors.RayActorError:
            raise
        except errors.RayError as error:
            raise ModelError(f"Ray: {_last_line(error)}", reason="ray") from None

    def _new_worker(self) -> Any:
        actor = self._ray.remote(_Worker)
        return actor.options(num_cpus=self._n_cpus).remote(self._make_models)

    def close(self) -> None:
        """End all workers."""
        for seat in self._seats:
            self._ray.kill(seat.worker)
        self._seats.clear()


class _RayProbing:
    """Probes the questions of one workload."""

    def __init__(self, crew: _Crew, setup: Any, settings: ProbeSettings) -> None:
        self._crew = crew
        self._setup = setup
        self._settings = settings

    async def probe_question(self, question: Question, known: Known, emit: Emit) -> bool:
        """Make what is missing of a question; see `probes.probing.Prober.probe_question`.

        All its records are made by one worker, as far as that lives: what models have in memory of
        a question is of use to the next probe.
        """
        packed = _packed(f"question {question.example.query.id!r}", question)
        seat = self._crew.take()
        try:
            while True:
                step = await self._step(seat, packed, question, known)
                if step.finished is None:
                    return step.is_complete
                known = _with(known, step.finished)
                goes_on = await emit(step.finished)
                if step.is_complete or not goes_on:
                    return step.is_complete
        finally:
            self._crew.release(seat)

    async def _step(self, seat: _Seat, packed: bytes, question: Question, known: Known) -> _Step:
        try:
            return await self._crew.step(seat, self._setup, packed, known)
        except _Lost as lost:
            return self._failed(question, known, str(lost))

    def _failed(self, question: Question, known: Known, reason: str) -> _Step:
        """What stands for the record over which workers died."""
        if known.base is None or known.trace is None:
            return _Step(Finished(base_record(question, failure=reason), None), is_complete=True)
        planned = next_probe(question, self._settings, _outcomes(known))
        assert planned is not None  # else there would have been nothing to die over
        scored = edge_score(known.base, question.workflow, known.trace, planned.edge)
        probe = probe_record(known.base, planned, scored, outcome="failed", reason=reason)
        rest = next_probe(question, self._settings, {**_outcomes(known), probe.id: probe.outcome})
        return _Step(Finished(probe, None), is_complete=rest is None)


def _with(known: Known, finished: Finished) -> Known:
    """What is known once a record is finished."""
    record, trace = finished
    if isinstance(record, BaseRecord):
        return Known(record, trace)
    return known._replace(probes={**known.probes, record.id: record})


def _outcomes(known: Known) -> dict[str, str]:
    return {id: record.outcome for id, record in known.probes.items()}


def _import_ray() -> Any:
    if find_spec("ray") is None:
        raise SettingsError("the Ray engine needs Ray: pip install 'splice-repair[ray]'")
    # Nothing is sent anywhere unless the user asks for it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return import_module("ray")


def _join(ray: Any, address: str | None) -> bool:
    """Whether Ray was not there yet, and is now."""
    if ray.is_initialized():
        return False
    try:
        ray.init(
            address=address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except Exception as error:  # Ray documents none of what it raises here
        place = "Ray can't be started" if address is None else f"no Ray cluster at {address!r}"
        raise SettingsError(f"{place}: {type(error).__name__}: {_last_line(error)}") from error
    return True


def _packed(name: str, value: object) -> bytes:
    """A value as it is sent to workers.

    Raises:
        SettingsError: it holds what can't be sent, such as a lock or a connection.
    """
    try:
        packed: bytes = import_module("ray.cloudpickle").dumps(value)
    except Exception as error:  # each object on the way has its own reasons
        raise SettingsError(f"{name} can't be sent to a worker: {_last_line(error)}") from error
    return packed


def _unpacked(packed: bytes) -> Any:
    """A value that was sent here.

    Raises:
        SettingsError: what it refers to is not installed here.
    """
    try:
        return pickle.loads(packed)
    except Exception as error:
        raise SettingsError(
            f"a worker lacks what it was sent: {type(error).__name__}: {_last_line(error)}; install "
            "the same packages on every machine, or start the command where the module lies"
        ) from error


def _require_own(version: str) -> None:
    """Refuse workers that would make other records.

    Raises:
        SettingsError: another version is installed there.
    """
    if version != __version__:
        raise SettingsError(f"a worker has splice {version}, this process {__version__}")


def _cause_of(error: Any) -> Exception:
    """What was raised in a worker, without what Ray wraps it in."""
    cause: Exception = error.cause
    return cause


def _page(error: Any) -> Exception | None:
    """Ray's account of where it was raised; None for errors whose text says all."""
    return None if isinstance(error.cause, SpliceError) else error


def _last_line(error: Exception) -> str:
    """The line that says why, of the many that Ray writes."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip()[:300] if lines else type(error).__name__
