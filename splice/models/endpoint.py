"""Any server that speaks the OpenAI chat-completions protocol, through the `openai` SDK.

That is OpenAI itself, and vLLM, Ollama, llama.cpp, LiteLLM and most vendors by their base URL.

The SDK's own retries are off. It would repeat an attempt without telling anyone, and an attempt
that is missing from the ledger is tokens, money and waiting time that nobody can explain. So the
loop is here, and each failed attempt is told of.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

from pydantic import ValidationError

from splice.errors import ModelError, SettingsError
from splice.models.limits import Limiter, Limits, PerLoop
from splice.models.protocol import OnRetry
from splice.records import (
    ChatMessage,
    Completion,
    ModelIdentity,
    Price,
    Request,
    TokenLogprob,
    ToolRequest,
    ToolSpec,
    Usage,
    digest,
)

if TYPE_CHECKING:
    from ssl import SSLContext

    from openai import APIConnectionError, APIStatusError, AsyncOpenAI

Reason: TypeAlias = Literal[
    "auth",
    "not_found",
    "bad_request",
    "rate_limit",
    "server_error",
    "timeout",
    "connection",
    "bad_response",
    "empty_choices",
]
"""Why an attempt failed, as `ModelError.reason` and the ledger have it.

`bad_response`: the server answered with something that is no chat completion, or only a part of
one. `empty_choices`: a chat completion without an answer in it.
"""

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter", "other"]

_DEFAULT_LIMITS: Final = Limits()
_OPENAI: Final = "https://api.openai.com/v1"
_NO_KEY: Final = "no-key"
_SHORTEST_SECRET: Final = 6
_MOST_SERVER_TEXT: Final = 2000
_LONGEST_WAIT_S: Final = 60.0
_LONGEST_BACKOFF_S: Final = 30.0
_CONNECTIONS: Final = 8
"""Connections of one HTTP client: it looks through all of them for each request."""

_AT_ONCE: Final[Mapping[int, Reason]] = {401: "auth", 403: "auth", 404: "not_found"}
_REPEATED: Final[Mapping[int, Reason]] = {408: "timeout", 409: "server_error", 429: "rate_limit"}

_ADVICE: Final[Mapping[Reason, str]] = {
    "auth": "The server refused the API key. Set OPENAI_API_KEY, or pass `api_key`, to a key that "
    "this server accepts for this model.",
    "not_found": "The server has no such model or no such path. Check the name of the model, and "
    "that the base URL is all that comes before /chat/completions.",
    "bad_request": "The server refused the request as it stands.",
    "rate_limit": "The server asks for fewer requests. Lower the `limits` of the endpoint.",
    "server_error": "The server failed.",
    "timeout": "No whole answer came in time. Raise `timeout_s` or lower `max_tokens`.",
    "connection": "The server can't be reached, or it hung up. Check that it runs and that the "
    "base URL, OPENAI_BASE_URL or `base_url`, is right.",
    "bad_response": "The server's answer is not a chat completion.",
    "empty_choices": "The server's answer holds no choice.",
}


@dataclass(frozen=True, slots=True)
class _Failure:
    """One attempt that gave no completion."""

    reason: Reason
    status: int | None = None
    text: str = ""
    """What the server, or the connection, said about it."""
    wait_s: float | None = None
    """How long the server asks to wait; None: it does not say."""
    is_repeatable: bool = True


class Endpoint:
    """A chat model behind an OpenAI-compatible server."""

    def __init__(
        self,
        *,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        limits: Limits = _DEFAULT_LIMITS,
        prices: Mapping[str, Price] = {},
        timeout_s: float = 120.0,
        max_attempts: int = 5,
        identity: ModelIdentity | None = None,
        extra_body: Mapping[str, Any] = {},
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Settle where to ask; nothing is sent.

        Args:
            model: name of the model for requests that name none.
            base_url: all that comes before `/chat/completions`; None: the variable
                OPENAI_BASE_URL, else OpenAI.
            api_key: None: the variable OPENAI_API_KEY. A server given by its base URL may do
                without one.
            limits: how fast the server may be asked.
            prices: price by name of the model.
            timeout_s: seconds for one attempt, from sending it to the last byte of its answer.
            max_attempts: attempts at one request, the first included.
            identity: what answers for `model`, where more is known than its name.
            extra_body: further fields of each request, such as a server's own switches.
            sleep: waits between attempts.

        Raises:
            SettingsError: no key and no base URL are known, or one of the settings can't be used.
        """
        url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        key = (api_key or os.environ.get("OPENAI_API_KEY") or "").strip() or None
        if url is None and key is None:
            raise SettingsError(
                "no model server is known: set OPENAI_API_KEY to use OpenAI, or OPENAI_BASE_URL "
                "(or `base_url`) to use another server"
            )
        self._base_url = checked_url(url or _OPENAI)
        self._key = checked_key(key)
        if timeout_s <= 0 or max_attempts < 1:
            raise SettingsError(
                f"timeout_s must be above 0 and max_attempts at least 1, not {timeout_s!r} and "
                f"{max_attempts!r}"
            )
        self._model = model
        self._prices = dict(prices)
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts
        self._identity = identity
        self._extra_body = dict(extra_body)
        self._extra_digest = _body_digest(self._extra_body)
        self._sleep = sleep
        self._limiter = Limiter(limits)
        self._concurrency = limits.concurrency
        self._clients = PerLoop(self._open)
        self._random = random.Random(0)
        self._refused: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        """Name the model and the server; the key is left out."""
        return f"Endpoint(model={self._model!r}, base_url={shown_url(self._base_url)!r})"

    async def complete(self, request: Request, on_retry: OnRetry) -> Completion:
        """Answer one request, with as many attempts as it takes and the settings allow.

        Raises:
            ModelError: no usable answer; `reason` is one of `Reason`.
        """
        first = body = self._known_to_pass(_body(request, self._model))
        n_tokens = _estimate_tokens(request)
        n_failed = 0
        while True:
            outcome, elapsed_s = await self._attempt(body, n_tokens)
            if isinstance(outcome, Completion):
                self._refused |= _given_up(first, body)
                return outcome
            n_failed += 1
            lesser = _lesser_body(body, outcome)
            if lesser is None and not (outcome.is_repeatable and n_failed < self._max_attempts):
                raise self._error(outcome, body["model"], n_failed)
            on_retry(outcome.reason, outcome.status, elapsed_s)
            if lesser is None:
                await self._sleep(self._wait_s(outcome, n_failed))
            else:
                body = lesser

    def identity(self, name: str | None) -> ModelIdentity:
        """The identity given at construction, or what the name alone tells."""
        if self._identity is not None and name in (None, self._model, self._identity.name):
            return self._identity
        # The extra fields change answers as much as another version of the server would.
        version = f"extra-{self._extra_digest[:12]}" if self._extra_body else None
        return ModelIdentity(name=name or self._model, provider="endpoint", version=version)

    def price(self, name: str | None) -> Price | None:
        """Price from the table given at construction."""
        return self._prices.get(name or self._model)

    async def aclose(self) -> None:
        """Close the running loop's connections; the next request opens new ones."""
        clients = self._clients.pop()
        if clients is not None:
            await clients.aclose()

    def _open(self) -> AsyncGenerator[AsyncOpenAI, None]:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        clients = [
            AsyncOpenAI(
                base_url=self._base_url,
                api_key=self._key or _NO_KEY,
                max_retries=0,
                timeout=self._timeout_s,
                http_client=DefaultAsyncHttpxClient(verify=_certificates()),
            )
            for _ in range(math.ceil(self._concurrency / _CONNECTIONS))
        ]
        return _lend(clients)

    async def _attempt(
        self, body: Mapping[str, Any], n_tokens: int
    ) -> tuple[Completion | _Failure, float]:
        """Send the request once. Seconds are counted from when the limits let it go."""
        from httpx2 import Response
        from openai import APIConnectionError, APIStatusError, APITimeoutError

        async with self._limiter.slot(n_tokens):
            client = await anext(self._clients.get())
            started = time.monotonic()
            outcome: Completion | _Failure
            try:
                # The SDK's timeout is for each read: a server that trickles would never meet it.
                async with asyncio.timeout(self._timeout_s):
                    # Not `chat.completions.create`: it walks through the whole body to transform
                    # what is plain JSON already, which takes as long as all the rest.
                    answer = await client.post(
                        "/chat/completions", body={**body, **self._extra_body}, cast_to=Response
                    )
                outcome = _parse(answer.content, body["model"])
            except (TimeoutError, APITimeoutError):
                outcome = _Failure("timeout", text=f"the limit is {self._timeout_s:g} s")
            except APIConnectionError as error:
                outcome = _connection_failure(error)
            except APIStatusError as error:
                outcome = _status_failure(error)
            return outcome, time.monotonic() - started

    def _wait_s(self, failure: _Failure, n_failed: int) -> float:
        """Seconds to wait before the next attempt."""
        if failure.wait_s is not None:
            return min(failure.wait_s, _LONGEST_WAIT_S)
        return self._random.uniform(0.0, min(_LONGEST_BACKOFF_S, 2.0 ** (n_failed - 1)))

    def _known_to_pass(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body without what the server has refused before."""
        for field, lessen in _CONCESSIONS.items():
            if field in body and _refusal(body, field) in self._refused:
                body = lessen(body)
        return body

    def _error(self, failure: _Failure, model: str, n_attempts: int) -> ModelError:
        status = "" if failure.status is None else f", HTTP {failure.status}"
        said = self._redacted(failure.text)[:_MOST_SERVER_TEXT]
        return ModelError(
            f"no answer from model {model!r} at {shown_url(self._base_url)} ({failure.reason}"
            f"{status}, {n_attempts} attempt{'s' if n_attempts > 1 else ''}). "
            f"{_ADVICE[failure.reason]}{f' Details: {said}' if said else ''}",
            reason=failure.reason,
            status=failure.status,
        )

    def _redacted(self, text: str) -> str:
        """The text without the key and the password of the base URL, which servers do repeat."""
        for secret in (self._key, urlsplit(self._base_url).password):
            # Stand-ins for a key, such as "-" or "none", would take whole words with them.
            if secret is not None and len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, "[key]")
        return text


@cache
def _certificates() -> SSLContext:
    """The certificates that are trusted: read once, as that takes longer than a short run."""
    from httpx2 import create_ssl_context

    return create_ssl_context()


async def _lend(clients: Sequence[AsyncOpenAI]) -> AsyncGenerator[AsyncOpenAI, None]:
    """Yield one client after another as often as asked for, and close them in the end.

    A generator, because `asyncio.run` closes those that are still open before it closes its loop.
    So no connection outlives its loop, even where nobody calls `aclose`.
    """
    try:
        for client in itertools.cycle(clients):
            yield client
    finally:
        for client in clients:
            await client.close()


def checked_url(url: str) -> str:
    """The URL as it is.

    Raises:
        SettingsError: it is no http(s) URL.
    """
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_usable = False
    if not is_usable:
        raise SettingsError(
            "the base URL (OPENAI_BASE_URL or `base_url`) must begin with http:// or https:// "
            "and name a host, such as http://127.0.0.1:8000/v1"
        )
    return url


def shown_url(url: str) -> str:
    """The URL without what may be secret in it: user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def checked_key(key: str | None) -> str | None:
    """The key as it is.

    Raises:
        SettingsError: it holds characters that no header can carry. The key is not quoted.
    """
    # Checked here, because the HTTP client would quote the whole header in its complaint.
    if key is not None and not (key.isascii() and key.isprintable()):
        raise SettingsError("the API key holds characters that no HTTP header can carry")
    return key


def _body_digest(body: Mapping[str, Any]) -> str:
    try:
        return digest(json.dumps(body, sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise SettingsError(f"extra_body is not JSON: {error}") from error


def _body(request: Request, model: str) -> dict[str, Any]:
    """The fields of the HTTP request, without those that are not set."""
    settings = request.settings
    optional = {
        "top_p": settings.top_p,
        "seed": None if settings.seed is None else settings.seed + request.rollout,
        "stop": list(settings.stop) or None,
        "logprobs": None if settings.logprobs is None else True,
        "top_logprobs": settings.logprobs or None,
        "tools": [_tool(spec) for spec in request.tools] or None,
        "response_format": _response_format(request.response_schema),
    }
    body = {
        "model": settings.name or model,
        "messages": [_message(message) for message in request.messages],
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
        **{name: value for name, value in optional.items() if value is not None},
    }
    return {name: _encodable(value) for name, value in body.items()}


def _message(message: ChatMessage) -> dict[str, Any]:
    if message.role == "tool":
        return {
            "role": "tool",
            "content": message.content,
            "tool_call_id": message.tool_request_id or "",
        }
    if not message.tool_requests:
        return {"role": message.role, "content": message.content}
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_requests
    ]
    return {"role": message.role, "content": message.content or None, "tool_calls": calls}


def _tool(spec: ToolSpec) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": spec.name,
            "description": spec.description,
            "parameters": spec.parameters,
        },
    }


def _response_format(schema: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if schema is None:
        return None
    return {
        "type": "json_schema",
        "json_schema": {"name": "reply", "strict": True, "schema": schema},
    }


def _encodable(value: Any) -> Any:
    """The value as plain JSON types whose texts UTF-8 can carry."""
    if isinstance(value, str):
        return _whole(value)
    if isinstance(value, Mapping):
        return {_whole(str(name)): _encodable(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [_encodable(item) for item in value]
    return value


def _whole(text: str) -> str:
    """The text with U+FFFD for each lone surrogate, which JSON can name and UTF-8 can't hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _estimate_tokens(request: Request) -> int:
    """About four bytes of prompt to a token, and the longest reply allowed."""
    texts = [message.content for message in request.messages]
    texts += [spec.model_dump_json() for spec in request.tools]
    n_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return n_bytes // 4 + request.settings.max_tokens


def _lesser_body(body: dict[str, Any], failure: _Failure) -> dict[str, Any] | None:
    """The body to try at once after a refusal; None if nothing in it can be given up."""
    if failure.status not in (400, 422):
        return None
    if "max_tokens" in body and "max_completion_tokens" in failure.text:
        return _rename_max_tokens(body)
    if "response_format" in body:
        return _drop_response_format(body)
    return None


def _rename_max_tokens(body: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in body.items() if name != "max_tokens"}
    return {**rest, "max_completion_tokens": body["max_tokens"]}


def _drop_response_format(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "response_format"}


_CONCESSIONS: Final[Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "max_tokens": _rename_max_tokens,
    "response_format": _drop_response_format,
}
"""What can be changed about a field that a server refuses, where the request keeps its meaning."""


def _given_up(first: Mapping[str, Any], last: Mapping[str, Any]) -> set[tuple[str, str]]:
    """What the server refused in `first`, shown by its answer to `last`."""
    return {_refusal(first, field) for field in _CONCESSIONS if field in first.keys() - last.keys()}


def _refusal(body: Mapping[str, Any], field: str) -> tuple[str, str]:
    """Model and field; for a reply format also which, as a server may refuse one schema only."""
    if field == "response_format":
        field += json.dumps(body[field], sort_keys=True)
    return (body["model"], field)


def _connection_failure(error: APIConnectionError) -> _Failure:
    cause = error.__cause__
    return _Failure("connection", text=f"{type(cause).__name__}: {cause}" if cause else "")


def _status_failure(error: APIStatusError) -> _Failure:
    status = error.status_code
    text = _whole(_server_text(error.body))
    if status in _REPEATED or status >= 500:
        reason = _REPEATED.get(status, "server_error")
        return _Failure(reason, status, text, wait_s=_asked_wait_s(error.response.headers))
    if status >= 400:
        return _Failure(_AT_ONCE.get(status, "bad_request"), status, text, is_repeatable=False)
    return _Failure("bad_response", status, text, is_repeatable=False)


def _server_text(body: object) -> str:
    """What an error body says to people."""
    if isinstance(body, Mapping):
        for name in ("message", "detail", "error"):
            if isinstance(body.get(name), str):
                return str(body[name])
        return json.dumps(body)
    return str(body or "")


def _asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait, at least 0; None if it does not say."""
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    seconds = _number(value)
    if seconds is not None or value is None:
        return seconds
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, date.timestamp() - time.time())


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if number >= 0 else None


def _parse(content: bytes, model: str) -> Completion | _Failure:
    """Read the body of a successful answer.

    The SDK would build its objects from whatever came, unchecked, so the bytes are read here.
    """
    try:
        # Not strict: some servers leave control characters in texts as they are. NaN and the like
        # are no JSON, and a record that holds one could not be read back.
        answer = json.loads(
            content.decode("utf-8-sig", "replace"), strict=False, parse_constant=lambda _: None
        )
    except (ValueError, RecursionError):
        return _Failure("bad_response", 200, "the body is not JSON, or not all of it came")
    if not isinstance(answer, Mapping):
        return _Failure("bad_response", 200, "the body is not a JSON object")
    if answer.get("error"):
        return _Failure("bad_response", 200, _whole(_server_text(answer["error"])))
    choices = answer.get("choices")
    if not choices:
        return _Failure("empty_choices", 200)
    choice = choices[0] if isinstance(choices, list) else None
    message = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or not isinstance(message, Mapping):
        return _Failure("bad_response", 200, "the first choice holds no message")
    return Completion(
        text=_text(message),
        tool_requests=_tool_requests(message.get("tool_calls")),
        finish_reason=_finish_reason(choice.get("finish_reason")),
        usage=_usage(answer.get("usage")),
        model=_whole(str(answer.get("model") or model)),
        logprobs=_logprobs(choice.get("logprobs")),
    )


def _text(message: Mapping[str, Any]) -> str:
    """The text of a reply; where a model declines a reply format, its reason for it."""
    content = message.get("content")
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        content = "".join(part for part in parts if isinstance(part, str))
    if content is None:
        content = message.get("refusal")
    return _whole(content) if isinstance(content, str) else ""


def _tool_requests(calls: object) -> tuple[ToolRequest, ...]:
    if not isinstance(calls, list):
        return ()
    functions = [
        (call.get("id"), call["function"])
        for call in calls
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
    ]
    return tuple(
        ToolRequest(
            id=_whole(str(id_ or f"call_{position}")),
            name=_whole(str(function.get("name") or "")),
            arguments=_arguments(function.get("arguments")),
        )
        for position, (id_, function) in enumerate(functions)
    )


def _arguments(arguments: object) -> str:
    """Arguments as text; some servers send the object itself."""
    if isinstance(arguments, str):
        return _whole(arguments)
    return "" if arguments is None else json.dumps(arguments)


def _finish_reason(reason: object) -> FinishReason:
    if reason == "function_call":
        return "tool_calls"
    known: dict[object, FinishReason] = {name: name for name in get_args(FinishReason)}
    return known.get(reason, "other")


def _usage(usage: object) -> Usage:
    """Token counts in the forms that servers give them; what is missing stays unknown."""
    if not isinstance(usage, Mapping):
        return Usage()
    prompt = _count(usage, "prompt_tokens")
    completion = _count(usage, "completion_tokens")
    cached = _count(usage.get("prompt_tokens_details"), "cached_tokens")
    if cached is None:
        # DeepSeek, then Moonshot.
        cached = _count(usage, "prompt_cache_hit_tokens")
    if cached is None:
        cached = _count(usage, "cached_tokens")
    reasoning = _count(usage.get("completion_tokens_details"), "reasoning_tokens")
    if prompt is not None and completion is not None and reasoning:
        # xAI counts reasoning beside the completion, which shows in its total.
        is_beside = _count(usage, "total_tokens") == prompt + completion + reasoning
        completion += reasoning if is_beside else 0
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        reasoning_tokens=reasoning,
    )


def _count(usage: object, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, Mapping) else None
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_count else None


def _logprobs(logprobs: object) -> tuple[TokenLogprob, ...] | None:
    """Log-probabilities by token; None if there are none, or not in the known form."""
    if not isinstance(logprobs, Mapping) or not isinstance(logprobs.get("content"), list):
        return None
    try:
        return tuple(
            TokenLogprob(
                token=_whole(token["token"]),
                logprob=token["logprob"],
                top=tuple(
                    (_whole(other["token"]), other["logprob"])
                    for other in token.get("top_logprobs") or ()
                ),
            )
            for token in logprobs["content"]
        )
    except (AttributeError, KeyError, TypeError, ValidationError):
        return None
