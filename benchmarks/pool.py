"""How full the probe generator keeps a model server, and whether its memory stays flat.

A server that answers after a fixed time runs in a process of its own. As real ones do, it works on
so many requests at once and lets others wait; it notes how many it works on. What it saw is counted
from the moment at which as many requests had come as it has places, until the generator begins its
last question: before and after that there is not enough to do. Memory is measured on replies that
cost no time.

    python -m benchmarks.pool
    python -m benchmarks.pool --limit 64 72 80 --memory-probes 0
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import multiprocessing
import random
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from probes.generate import Generated, GenerateSettings, Progress, generate
from probes.plan import ProbeSettings
from probes.processes import generate_in_processes
from splice import Agent, Query, Workflow
from splice.models.endpoint import Endpoint
from splice.models.limits import Limits
from splice.models.protocol import OnRetry
from splice.models.scripted import ScriptedModel
from splice.records import Completion, Request
from splice.workload import Example, Scores, Workload

LATENCY_S = 0.2
PLACES = 64
"""Requests that the server works on at once."""
MIB = 1 << 20
PROBES = ProbeSettings()


# --- what is probed --------------------------------------------------------------------------

_PLAIN: Final = (
    "was shown in many small towns",
    "during its first winter",
    "and later abroad",
    "where it found friends",
    "among people who seldom went out",
    "while critics wrote about light",
    "and the patience of its makers",
    "although others missed a story",
)

WORKFLOW = Workflow(
    name="three readers and a writer",
    nodes=(
        Agent(id="film", role="film expert", subtask="Who directed the film?"),
        Agent(id="life", role="biographer", subtask="When was this person born?"),
        Agent(id="press", role="reader of reviews", subtask="What do the reviews say about it?"),
        Agent(id="writer", role="writer", subtask="Answer the question."),
    ),
    edges=(("film", "writer"), ("life", "writer"), ("press", "writer")),
    output="writer",
)


def workload(n_questions: int) -> Workload:
    """Questions with two documents of 80 words for each reader."""
    return Workload(
        name="pool benchmark",
        about="made up",
        workflow=WORKFLOW,
        examples=tuple(map(_example, range(n_questions))),
        metrics=("is_right",),
        score=_score,
    )


def _example(number: int) -> Example:
    words = random.Random(number)

    def document(fact: str) -> str:
        said = [f"It {' '.join(words.choices(_PLAIN, k=4))}." for _ in range(4)]
        said[words.randrange(4)] = fact
        return " ".join(said)

    film, person, year = f"Film{number}", f"Person{number % 97}", 1900 + number % 100
    context = {
        "film": (f"{film} was directed by {person}.", f"Film{number + 1} was directed by nobody."),
        "life": (f"{person} was born in {year}.", f"Person{number % 89} was born in 1899."),
        "press": (f"Reviews of {film} praised Actor{number}.", "Nothing else was noted."),
    }
    return Example(
        query=Query(
            id=f"q{number}",
            text=f"When was the director of {film} born?",
            context={node: tuple(map(document, facts)) for node, facts in context.items()},
        ),
        reference={"answer": str(year)},
        gap_edges=(("film", "life"),),
    )


def _score(example: Example, answer: str | None) -> Scores:
    return {"is_right": float(example.reference["answer"] in (answer or ""))}


def reply_to(prompt: bytes) -> str:
    """A short finding, always the same for a prompt."""
    drawn = int.from_bytes(hashlib.sha256(prompt).digest()[:4])
    return f"Person{drawn % 97}, born in {1900 + drawn % 100}"


def questions_for(n_probes: int) -> int:
    """Questions that give about so many probes."""
    per_question = PROBES.n_edges + 2 * PROBES.control_share
    return max(1, round(n_probes / per_question))


# --- the server ------------------------------------------------------------------------------


class _Seen:
    """What a server has seen."""

    def __init__(self) -> None:
        self.log: list[tuple[float, int]] = []
        """When work on a request began (1) and when it was answered (-1)."""
        self.questions: set[bytes] = set()
        self.dry = -math.inf
        """When a question came that had not come before, the last time."""

    def note(self, body: bytes) -> None:
        """A request has come."""
        question = bytes(body.partition(b"the director of ")[2].partition(b" born")[0])
        if question not in self.questions:
            self.questions.add(question)
            self.dry = time.monotonic()


class _Desk:
    """The places of a server, and who waits for one."""

    def __init__(self, latency_s: float, places: int) -> None:
        self.seen = _Seen()
        self._latency_s = latency_s
        self._free = places
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self, answer: Callable[[], None]) -> None:
        """Answer after the fixed time, counted from when there is a place."""
        if not self._free:
            self._waiting.append(answer)
            return
        self._free -= 1
        self.seen.log.append((time.monotonic(), 1))
        asyncio.get_running_loop().call_later(self._latency_s, self._done, answer)

    def _done(self, answer: Callable[[], None]) -> None:
        self.seen.log.append((time.monotonic(), -1))
        self._free += 1
        if self._waiting:
            self.take(self._waiting.popleft())
        answer()


class _Server(asyncio.Protocol):
    """One connection: as little HTTP as the client needs."""

    def __init__(self, desk: _Desk) -> None:
        self.desk = desk
        self.received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, end, rest = self.received.partition(b"\r\n\r\n")
        if not end:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(rest) < length:
            return
        body = bytes(rest)
        self.received.clear()
        self.desk.seen.note(body)
        self.desk.take(partial(self._answer, body))

    def _answer(self, body: bytes) -> None:
        message = {"role": "assistant", "content": reply_to(body)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(body) // 4, "completion_tokens": 8}
        content = json.dumps({"model": "loopback", "choices": [choice], "usage": usage}).encode()
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(content), content)
        )


async def _serve(pipe: Connection, latency_s: float, places: int) -> None:
    desk = _Desk(latency_s, places)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Server(desk), "127.0.0.1", backlog=1024)
    async with server:
        cpu_s = time.process_time()
        pipe.send(server.sockets[0].getsockname()[1])
        await loop.run_in_executor(None, pipe.recv)
        pipe.send((desk.seen, time.process_time() - cpu_s))


def _serve_until_told(pipe: Connection, latency_s: float, places: int) -> None:
    asyncio.run(_serve(pipe, latency_s, places))


class _Loopback:
    """The server's process, as its client knows it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.base_url = f"http://127.0.0.1:{pipe.recv()}/v1"

    def stop(self) -> tuple[_Seen, float]:
        """What the server saw, and its CPU seconds."""
        self._pipe.send("stop")
        seen, cpu_s = self._pipe.recv()
        return seen, cpu_s


@contextmanager
def _loopback(latency_s: float, places: int) -> Iterator[_Loopback]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve_until_told, args=(theirs, latency_s, places), daemon=True
    )
    process.start()
    try:
        yield _Loopback(ours)
    finally:
        process.join(timeout=1.0)
        process.kill()
        process.join()


# --- requests in work ------------------------------------------------------------------------


class Flow(NamedTuple):
    """One run of the generator against the server."""

    n_processes: int
    n_open: int
    """Questions that were worked on at once."""
    limit: int
    """Requests that the generator may have sent at once."""
    places: int
    """Requests that the server works on at once."""
    n_probes: int
    n_calls: int
    in_work: float
    """Requests that the server works on: mean over the time in which there was enough to do."""
    share: float
    """Of the places."""
    probes_per_s: float
    calls_per_s: float
    """Over the same time as `in_work`."""
    cpu_ms_per_call: float
    """CPU of the generator's processes, with the client in them."""
    server_cpu_ms_per_call: float
    peak_mib: float
    """Resident memory of the largest process so far."""


def flow(
    n_probes: int,
    *,
    n_open: int,
    limit: int,
    places: int = PLACES,
    n_processes: int = 1,
    latency_s: float = LATENCY_S,
) -> Flow:
    """Generate a pool against the server, and count what it works on."""
    with _loopback(latency_s, places) as server, TemporaryDirectory() as folder:
        share = Limits(concurrency=math.ceil(limit / n_processes))

        def make_models() -> Endpoint:
            return Endpoint(model="loopback", base_url=server.base_url, limits=share)

        # The first request imports the SDK and reads the certificates.
        asyncio.run(_warm(make_models()))
        began, cpu_s = time.monotonic(), _cpu_s()
        made = generate_in_processes(
            {"train": workload(questions_for(n_probes))},
            make_models,
            Path(folder) / "pool",
            n_processes=n_processes,
            probe=PROBES,
            settings=GenerateSettings(concurrency=n_open),
        )
        cpu_s, elapsed_s = _cpu_s() - cpu_s, time.monotonic() - began
        seen, server_cpu_s = server.stop()
    log = [entry for entry in seen.log if entry[0] >= began]
    begin, end = _busy_time(log, seen.dry, min(limit, places, n_open))
    in_work = mean_in_work(log, begin, end)
    n_answered = sum(change < 0 and begin <= moment < end for moment, change in log)
    return Flow(
        n_processes=n_processes,
        n_open=n_open,
        limit=limit,
        places=places,
        n_probes=made.n_probes,
        n_calls=made.n_calls,
        in_work=in_work,
        share=in_work / places,
        probes_per_s=made.n_probes / elapsed_s,
        calls_per_s=n_answered / (end - begin),
        cpu_ms_per_call=1000 * cpu_s / made.n_calls,
        server_cpu_ms_per_call=1000 * server_cpu_s / made.n_calls,
        peak_mib=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    )


async def _warm(model: Endpoint) -> None:
    await model.complete(Request(messages=()), lambda *_: None)
    await model.aclose()


def _cpu_s() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _busy_time(log: Sequence[tuple[float, int]], dry: float, many: int) -> tuple[float, float]:
    """From the beginning of the request with which `many` places could be busy until `dry`.

    Raises:
        ValueError: there is no such time; more questions are needed.
    """
    begun = [moment for moment, change in log if change > 0]
    if len(begun) < many or begun[many - 1] >= dry:
        raise ValueError(f"too few questions to keep {many} places busy: raise --probes")
    return begun[many - 1], dry


def mean_in_work(log: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Mean number of requests that are worked on between two moments."""
    area, n, since = 0.0, 0, -math.inf
    for moment, change in [*log, (math.inf, 0)]:
        area += n * max(0.0, min(moment, end) - max(since, begin))
        n, since = n + change, moment
    return area / (end - begin)


# --- memory ----------------------------------------------------------------------------------


class _Forgetful(ScriptedModel):
    """A scripted model that keeps no requests, as those alone would fill the memory."""

    async def complete(self, request: Request, on_retry: OnRetry) -> Completion:
        completion = await super().complete(request, on_retry)
        self.requests.clear()
        return completion


class Memory(NamedTuple):
    """Resident memory while a pool grows."""

    n_probes: int
    mib: list[tuple[int, float]]
    """Probes so far, and MiB."""
    peak_mib: float
    cpu_ms_per_call: float


async def memory(n_probes: int, *, n_open: int, n_samples: int = 20) -> Memory:
    """Generate a pool without a server, and look at the memory as it goes. Linux only."""
    n_questions = questions_for(n_probes)
    samples: list[tuple[int, float]] = []

    def sample(progress: Progress) -> None:
        if progress.n_probes >= len(samples) * n_probes / n_samples:
            samples.append((progress.n_probes, _resident_mib()))

    model = _Forgetful(lambda request: reply_to(request.messages[-1].content.encode()))
    cpu_s = time.process_time()
    with TemporaryDirectory() as folder:
        made: Generated = await generate(
            {"train": workload(n_questions)},
            model,
            Path(folder) / "pool",
            probe=PROBES,
            settings=GenerateSettings(concurrency=n_open),
            progress=sample,
        )
    return Memory(
        n_probes=made.n_probes,
        mib=samples,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        cpu_ms_per_call=1000 * (time.process_time() - cpu_s) / made.n_calls,
    )


def _resident_mib() -> float:
    n_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return n_pages * resource.getpagesize() / MIB


# --- the command -----------------------------------------------------------------------------


def flow_table(flows: Sequence[Flow]) -> str:
    """The runs as Markdown."""
    lines = [
        "| processes | questions open | sent at once, at most | worked on at once, mean | share "
        "| calls/s | probes/s | CPU ms a call | of the server | peak MiB |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {f.n_processes} | {f.n_open} | {f.limit} | {f.in_work:.1f} of {f.places} | {f.share:.1%} "
        f"| {f.calls_per_s:.0f} | {f.probes_per_s:.1f} | {f.cpu_ms_per_call:.2f} | {f.server_cpu_ms_per_call:.2f} "
        f"| {f.peak_mib:.0f} |"
        for f in flows
    ]
    return "\n".join(lines)


def memory_table(found: Memory) -> str:
    """The samples as Markdown."""
    lines = ["| probes | MiB |", "| ---: | ---: |"]
    lines += [f"| {n_probes:,} | {mib:.0f} |" for n_probes, mib in found.mib]
    return "\n".join([*lines, f"| peak | {found.peak_mib:.0f} |"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, then print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool", description=__doc__)
    parser.add_argument("--probes", type=int, default=2000, help="of each run; 0: no server")
    parser.add_argument("--places", type=int, default=PLACES, help="requests in work at once")
    parser.add_argument("--limit", type=int, nargs="+", default=[64, 72, 80], help="sent at once")
    parser.add_argument("--open", type=int, default=2 * PLACES, help="questions at once")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="of the generator")
    parser.add_argument("--latency", type=float, default=LATENCY_S, help="seconds for a reply")
    parser.add_argument("--memory-probes", type=int, default=20_000, help="0: no memory")
    args = parser.parse_args(argv)

    # Memory first: it is the process's, and what a run with a server takes is not given back.
    if args.memory_probes:
        print(memory_table(asyncio.run(memory(args.memory_probes, n_open=args.open))))
    if args.probes:
        flows = [
            flow(
                args.probes,
                n_open=args.open,
                limit=limit,
                places=args.places,
                n_processes=n_processes,
                latency_s=args.latency,
            )
            for n_processes in args.processes
            for limit in args.limit
        ]
        print(flow_table(flows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
