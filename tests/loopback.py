"""A chat-completions server on 127.0.0.1, scripted by a function of the request.

    def respond(request):
        return Reply(text="Doha")

    with LoopbackServer(respond) as server:
        model = Endpoint(model="m", base_url=server.base_url, api_key="k")

It is a real HTTP/1.1 server with keep-alive, in a thread of its own, so the client is tested down
to the socket. It counts what it served, which is what a ledger must agree with.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal, TypeAlias

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """One answer of the server, or one way of failing to give it."""

    text: str | None = "ok"
    tool_calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments) each."""
    finish_reason: str | None = "stop"
    model: str | None = None
    """None: the one that was asked for."""
    logprobs: Json | None = None
    prompt_tokens: int | None = None
    """None: the words of the messages."""
    completion_tokens: int | None = None
    """None: the words of the text."""
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    usage: Json | Literal["counted", "absent"] = "counted"
    """`counted`: made of the four counts above, in OpenAI's form."""
    status: int = 200
    error: str = "scripted failure"
    """Message of an answer whose status is not 200."""
    headers: Mapping[str, str] = field(default_factory=dict)
    latency_s: float = 0.0
    fault: (
        Literal["hang", "cut", "trickle", "drop", "invalid_json", "empty_choices", "raw"] | None
    ) = None
    """`hang`: no answer at all. `cut`: half of the body. `trickle`: the body so slowly that it
    never ends. `drop`: the connection is closed unanswered. `raw`: `body` as it is."""
    body: bytes = b""


@dataclass
class Served:
    """Tokens of the answers that went out whole."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


Respond: TypeAlias = Callable[[Json], Reply]


class LoopbackServer:
    """Serves `/v1/chat/completions` and `/v1/models` for as long as the `with` block runs."""

    def __init__(self, respond: Respond = lambda request: Reply()) -> None:
        self.respond = respond
        self.requests: list[Json] = []
        """Bodies of the chat requests, in order of arrival."""
        self.headers: list[dict[str, str]] = []
        """Their headers, by lower-case name."""
        self.n_connections = 0
        self.n_served = 0
        """Chat completions that went out whole."""
        self.served = Served()
        self.n_in_flight = 0
        self.max_in_flight = 0
        self.idle = threading.Event()
        """Set while no request is in flight."""
        self.failures: list[Exception] = []
        """What `respond` raised. The first is raised again at the end of the `with` block."""
        self._port = 0
        self._ready = threading.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    @property
    def n_requests(self) -> int:
        return len(self.requests)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def __enter__(self) -> LoopbackServer:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self.failures:
            raise self.failures[0]

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=512)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await server.wait_closed()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.n_connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            # The client hung up, or the test is over. Either way there is nothing left to tell.
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False if the connection is over."""
        method, path, headers = await _read_head(reader)
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if (method, path) == ("GET", "/v1/models"):
            await _write(writer, 200, {"object": "list", "data": [{"id": "loopback"}]})
            return True
        if (method, path) != ("POST", "/v1/chat/completions"):
            await _write(writer, 404, {"error": {"message": f"no such path: {path}"}})
            return True
        request = json.loads(body)
        self.requests.append(request)
        self.headers.append(headers)
        self._count_in_flight(+1)
        is_in_flight = True
        try:
            reply = self._reply(request)
            if reply.latency_s:
                await asyncio.sleep(reply.latency_s)
            if reply.fault == "hang":
                await reader.read()
            if reply.fault in ("hang", "drop") or reader.at_eof():
                return False
            # Before the last byte goes out: the client may send the next request right after it.
            self._count_in_flight(-1)
            is_in_flight = False
            return await self._answer(writer, request, reply)
        finally:
            if is_in_flight:
                self._count_in_flight(-1)

    def _count_in_flight(self, change: int) -> None:
        self.n_in_flight += change
        self.max_in_flight = max(self.max_in_flight, self.n_in_flight)
        if self.n_in_flight:
            self.idle.clear()
        else:
            self.idle.set()

    def _reply(self, request: Json) -> Reply:
        try:
            return self.respond(request)
        except Exception as error:
            self.failures.append(error)
            return Reply(status=400, error=repr(error))

    async def _answer(self, writer: asyncio.StreamWriter, request: Json, reply: Reply) -> bool:
        if reply.status != 200:
            error = {"error": {"message": reply.error, "type": "scripted", "code": None}}
            await _write(writer, reply.status, error, reply.headers)
            return True
        counts = _counts(request, reply)
        completion = _completion(request, reply, counts, f"chatcmpl-{self.n_requests}")
        if reply.fault == "invalid_json":
            await _write(writer, 200, b'{"choices": [{"message": {"content": "ha')
        elif reply.fault == "raw":
            await _write(writer, 200, reply.body)
        elif reply.fault == "empty_choices":
            await _write(writer, 200, {**completion, "choices": []})
        elif reply.fault == "cut":
            whole = _http(200, completion, reply.headers)
            writer.write(whole[:-20])
            await writer.drain()
            writer.close()
            return False
        elif reply.fault == "trickle":
            for byte in _http(200, completion, reply.headers):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.02)
        else:
            await _write(writer, 200, completion, reply.headers)
            self.n_served += 1
            self.served.prompt_tokens += counts.prompt_tokens
            self.served.completion_tokens += counts.completion_tokens
            self.served.cached_tokens += counts.cached_tokens
            self.served.reasoning_tokens += counts.reasoning_tokens
        return True


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    request_line, *lines = head.strip().split("\r\n")
    method, path, _ = request_line.split(" ")
    fields = (line.partition(":") for line in lines)
    return method, path, {name.lower(): value.strip() for name, _, value in fields}


async def _write(
    writer: asyncio.StreamWriter,
    status: int,
    body: Json | bytes,
    headers: Mapping[str, str] = {},
) -> None:
    writer.write(_http(status, body, headers))
    await writer.drain()


def _http(status: int, body: Json | bytes, headers: Mapping[str, str]) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {
        "content-type": "application/json",
        "content-length": str(len(content)),
        **headers,
    }
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


def _counts(request: Json, reply: Reply) -> Served:
    words = sum(len(str(message["content"] or "").split()) for message in request["messages"])
    return Served(
        prompt_tokens=words if reply.prompt_tokens is None else reply.prompt_tokens,
        completion_tokens=(
            len((reply.text or "").split())
            if reply.completion_tokens is None
            else reply.completion_tokens
        ),
        cached_tokens=reply.cached_tokens or 0,
        reasoning_tokens=reply.reasoning_tokens or 0,
    )


def _completion(request: Json, reply: Reply, counts: Served, id_: str) -> Json:
    message: Json = {"role": "assistant", "content": reply.text}
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": f"call-{i}", "type": "function", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(reply.tool_calls)
        ]
    completion: Json = {
        "id": id_,
        "object": "chat.completion",
        "created": 0,
        "model": reply.model or request["model"],
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": reply.finish_reason,
                "logprobs": reply.logprobs,
            }
        ],
    }
    if reply.usage == "counted":
        completion["usage"] = _usage(reply, counts)
    elif reply.usage != "absent":
        completion["usage"] = reply.usage
    return completion


def _usage(reply: Reply, counts: Served) -> Json:
    usage: Json = {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }
    if reply.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": reply.cached_tokens}
    if reply.reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reply.reasoning_tokens}
    return usage
