import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import LoopbackServer, Reply

from splice.errors import ModelError, SettingsError
from splice.models.endpoint import Endpoint, _asked_wait_s, _parse, _usage
from splice.models.limits import Limits
from splice.models.protocol import ChatModel, cost
from splice.records import (
    ChatMessage,
    Completion,
    ModelIdentity,
    ModelSettings,
    Price,
    Request,
    ToolRequest,
    ToolSpec,
    Usage,
)

KEY = "sk-very-secret-0123456789"
SEARCH = ToolSpec(name="search", description="Find.", parameters={"type": "object"})
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a key nor a proxy of the machine decides where a test's requests go."""
    for name in os.environ:
        if name.startswith("OPENAI_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


class Waits(list[float]):
    """Waits between attempts, noted instead of waited for."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


class Retries(list[tuple[str, int | None]]):
    """(reason, status) of each failed attempt that was repeated."""

    def __call__(self, reason: str, status: int | None, elapsed_s: float) -> None:
        assert elapsed_s >= 0
        self.append((reason, status))


def endpoint(server: LoopbackServer, **changes: Any) -> Endpoint:
    known: Json = {"model": "m", "base_url": server.base_url, "api_key": KEY, "sleep": Waits()}
    return Endpoint(**{**known, **changes})


def ask(text: str = "Where?", **fields: Any) -> Request:
    return Request(messages=(ChatMessage(role="user", content=text),), **fields)


async def answer(
    model: Endpoint, request: Request | None = None, retries: Retries | None = None
) -> Completion:
    try:
        return await model.complete(request or ask(), Retries() if retries is None else retries)
    finally:
        await model.aclose()


def in_turn(*replies: Reply) -> Callable[[Json], Reply]:
    """Give the replies one after the other; one request too many is an error."""
    queue = iter(replies)
    return lambda request: next(queue)


def failure(server: LoopbackServer, retries: Retries | None = None, **changes: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        asyncio.run(answer(endpoint(server, **changes), retries=retries))
    return caught.value


# What is sent


def test_endpoint_is_a_chat_model() -> None:
    assert isinstance(Endpoint(model="m", api_key=KEY), ChatModel)


def test_a_plain_request_holds_nothing_that_was_not_asked_for() -> None:
    with LoopbackServer() as server:
        asyncio.run(answer(endpoint(server)))
    assert server.requests == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "Where?"}],
            "temperature": 0.0,
            "max_tokens": 512,
            "seed": 0,
        }
    ]
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


def test_every_setting_reaches_the_server() -> None:
    settings = ModelSettings(
        name="other",
        temperature=0.7,
        top_p=0.9,
        max_tokens=33,
        seed=5,
        stop=("END",),
        logprobs=2,
    )
    request = ask(settings=settings, tools=(SEARCH,), response_schema=SCHEMA, rollout=3)
    with LoopbackServer() as server:
        asyncio.run(answer(endpoint(server, extra_body={"top_k": 1}), request))
    assert server.requests == [
        {
            "model": "other",
            "messages": [{"role": "user", "content": "Where?"}],
            "temperature": 0.7,
            "top_p": 0.9,
            "max_tokens": 33,
            "seed": 8,
            "stop": ["END"],
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "search",
                        "description": "Find.",
                        "parameters": {"type": "object"},
                    },
                }
            ],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "reply", "strict": True, "schema": SCHEMA},
            },
            "top_k": 1,
        }
    ]


def test_no_seed_is_sent_for_a_request_without_one() -> None:
    with LoopbackServer() as server:
        asyncio.run(answer(endpoint(server), ask(settings=ModelSettings(seed=None), rollout=4)))
    assert "seed" not in server.requests[0]


def test_log_probabilities_can_be_asked_for_without_alternatives() -> None:
    with LoopbackServer() as server:
        asyncio.run(answer(endpoint(server), ask(settings=ModelSettings(logprobs=0))))
    assert server.requests[0]["logprobs"] is True
    assert "top_logprobs" not in server.requests[0]


def test_a_conversation_with_tools_is_sent_in_the_servers_form() -> None:
    call = ToolRequest(id="c1", name="search", arguments='{"q": "x"}')
    request = Request(
        messages=(
            ChatMessage(role="system", content="Be brief."),
            ChatMessage(role="user", content="Find x."),
            ChatMessage(role="assistant", content="", tool_requests=(call,)),
            ChatMessage(role="tool", content="x is y", tool_request_id="c1"),
            ChatMessage(role="assistant", content=""),
        )
    )
    with LoopbackServer() as server:
        asyncio.run(answer(endpoint(server), request))
    assert server.requests[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Find x."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "search", "arguments": '{"q": "x"}'},
                }
            ],
        },
        {"role": "tool", "content": "x is y", "tool_call_id": "c1"},
        {"role": "assistant", "content": ""},
    ]


def test_texts_that_utf8_can_not_hold_are_sent_with_a_stand_in() -> None:
    with LoopbackServer() as server:
        asyncio.run(answer(endpoint(server), ask("a\ud800b\x00c\ud83d\ude00")))
    assert server.requests[0]["messages"][0]["content"] == "a\ufffdb\x00c\U0001f600"


# What comes back


def test_a_text_reply_is_mapped() -> None:
    reply = Reply(
        text="It is Doha",
        finish_reason="length",
        model="m-2026",
        prompt_tokens=11,
        cached_tokens=4,
        reasoning_tokens=2,
        logprobs={
            "content": [
                {
                    "token": "It",
                    "logprob": -0.5,
                    "top_logprobs": [
                        {"token": "It", "logprob": -0.5},
                        {"token": "A", "logprob": -1},
                    ],
                }
            ]
        },
    )
    with LoopbackServer(in_turn(reply)) as server:
        completion = asyncio.run(answer(endpoint(server)))
    assert completion.model_dump() == {
        "text": "It is Doha",
        "tool_requests": (),
        "finish_reason": "length",
        "usage": {
            "prompt_tokens": 11,
            "completion_tokens": 3,
            "cached_tokens": 4,
            "reasoning_tokens": 2,
        },
        "model": "m-2026",
        "logprobs": ({"token": "It", "logprob": -0.5, "top": (("It", -0.5), ("A", -1.0))},),
        "is_cached": False,
    }


def test_tool_calls_are_mapped_and_an_absent_text_is_empty() -> None:
    reply = Reply(
        text=None,
        tool_calls=(("search", '{"q": 1}'), ("search", "not json")),
        finish_reason="tool_calls",
    )
    with LoopbackServer(in_turn(reply)) as server:
        completion = asyncio.run(answer(endpoint(server), ask(tools=(SEARCH,))))
    assert completion.text == ""
    assert completion.finish_reason == "tool_calls"
    assert completion.tool_requests == (
        ToolRequest(id="call-0", name="search", arguments='{"q": 1}'),
        ToolRequest(id="call-1", name="search", arguments="not json"),
    )


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("tool_calls", "tool_calls"),
        ("function_call", "tool_calls"),
        ("content_filter", "content_filter"),
        ("eos", "other"),
        (None, "other"),
    ],
)
def test_finish_reasons(said: str | None, meant: str) -> None:
    with LoopbackServer(in_turn(Reply(finish_reason=said))) as server:
        assert asyncio.run(answer(endpoint(server))).finish_reason == meant


USAGES: list[tuple[str, object, Usage]] = [
    (
        "OpenAI, cached and reasoning",
        {
            "prompt_tokens": 100,
            "completion_tokens": 50,
            "total_tokens": 150,
            "prompt_tokens_details": {"cached_tokens": 80, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 30},
        },
        Usage(prompt_tokens=100, completion_tokens=50, cached_tokens=80, reasoning_tokens=30),
    ),
    (
        "OpenAI, nothing cached",
        {
            "prompt_tokens": 100,
            "completion_tokens": 50,
            "total_tokens": 150,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        Usage(prompt_tokens=100, completion_tokens=50, cached_tokens=0, reasoning_tokens=0),
    ),
    (
        "DeepSeek",
        {
            "prompt_tokens": 100,
            "completion_tokens": 50,
            "total_tokens": 150,
            "prompt_cache_hit_tokens": 64,
            "prompt_cache_miss_tokens": 36,
        },
        Usage(prompt_tokens=100, completion_tokens=50, cached_tokens=64),
    ),
    (
        "Moonshot",
        {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150, "cached_tokens": 9},
        Usage(prompt_tokens=100, completion_tokens=50, cached_tokens=9),
    ),
    (
        "xAI: reasoning beside the completion",
        {
            "prompt_tokens": 32,
            "completion_tokens": 9,
            "total_tokens": 135,
            "completion_tokens_details": {"reasoning_tokens": 94},
        },
        Usage(prompt_tokens=32, completion_tokens=103, reasoning_tokens=94),
    ),
    (
        "vLLM",
        {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": None,
        },
        Usage(prompt_tokens=7, completion_tokens=2),
    ),
    ("no usage", None, Usage()),
    ("empty usage", {}, Usage()),
    ("half a usage", {"prompt_tokens": 5}, Usage(prompt_tokens=5)),
    ("nonsense", {"prompt_tokens": "5", "completion_tokens": -1, "cached_tokens": True}, Usage()),
    ("a list", [1, 2], Usage()),
]


@pytest.mark.parametrize(("said", "meant"), [row[1:] for row in USAGES], ids=[r[0] for r in USAGES])
def test_usage_of_several_providers(said: object, meant: Usage) -> None:
    assert _usage(said) == meant


def test_a_server_that_tells_no_usage_leaves_it_unknown() -> None:
    with LoopbackServer(in_turn(Reply(usage="absent"))) as server:
        completion = asyncio.run(answer(endpoint(server)))
    assert completion.usage == Usage()
    assert cost(completion.usage, Price(prompt=1, completion=1)) is None


def test_neither_cached_nor_reasoning_tokens_are_charged_twice() -> None:
    reply = Reply(
        prompt_tokens=1_000_000, completion_tokens=10, cached_tokens=900_000, reasoning_tokens=4
    )
    prices = {"m": Price(prompt=5.0, completion=100_000.0, cached=0.5)}
    with LoopbackServer(in_turn(reply)) as server:
        model = endpoint(server, prices=prices)
        completion = asyncio.run(answer(model))
    money = cost(completion.usage, model.price(None))
    assert money == pytest.approx(0.1 * 5.0 + 0.9 * 0.5 + 10 * 0.1)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'"a\\u0000b"', "a\x00b"),
        (b'"a\x00b\n"', "a\x00b\n"),
        (b'"a\\ud800b"', "a\ufffdb"),
        (b'"\\ud83d\\ude00 \\ude00"', "\U0001f600 \ufffd"),
        (b'"a\xffb"', "a\ufffdb"),
        (b'[{"type": "text", "text": "a"}, {"type": "image"}, 3, {"text": "b"}]', "ab"),
        (b"null", ""),
        (b"17", ""),
    ],
)
def test_odd_texts_become_texts(body: bytes, text: str) -> None:
    raw = b'{"choices": [{"message": {"content": ' + body + b"}}]}"
    with LoopbackServer(in_turn(Reply(fault="raw", body=raw))) as server:
        completion = asyncio.run(answer(endpoint(server)))
    assert completion.text == text
    assert completion.model == "m"
    assert Completion.model_validate_json(completion.model_dump_json()) == completion


def test_a_refusal_is_the_text_of_a_reply_without_content() -> None:
    raw = b'{"choices": [{"message": {"content": null, "refusal": "I may not."}}]}'
    with LoopbackServer(in_turn(Reply(fault="raw", body=raw))) as server:
        assert asyncio.run(answer(endpoint(server))).text == "I may not."


@pytest.mark.parametrize(
    ("calls", "requests"),
    [
        (None, ()),
        ("search", ()),
        ([None, {"function": None}, {"type": "custom", "custom": {}}], ()),
        ([{"function": {}}], (ToolRequest(id="call_0", name="", arguments=""),)),
        (
            [{"id": "a\ud800", "function": {"name": "f", "arguments": {"q": 1}}}],
            (ToolRequest(id="a\ufffd", name="f", arguments='{"q": 1}'),),
        ),
    ],
)
def test_odd_tool_calls_are_data(calls: object, requests: tuple[ToolRequest, ...]) -> None:
    answer = {"choices": [{"message": {"content": "", "tool_calls": calls}}]}
    completion = _parse(json.dumps(answer).encode(), "m")
    assert isinstance(completion, Completion)
    assert completion.tool_requests == requests


@pytest.mark.parametrize(
    "logprobs",
    [None, [], {}, {"content": None}, {"content": [{}]}, {"content": [{"token": 1, "logprob": 0}]}],
)
def test_log_probabilities_in_another_form_are_left_out(logprobs: object) -> None:
    body = json.dumps({"choices": [{"message": {"content": "a"}, "logprobs": logprobs}]})
    completion = _parse(body.encode(), "m")
    assert isinstance(completion, Completion)
    assert completion.logprobs is None


def test_log_probabilities_that_are_no_numbers_are_left_out() -> None:
    completion = _parse(
        b'{"choices": [{"message": {"content": "a"}, "logprobs": {"content": '
        b'[{"token": "a", "logprob": NaN}]}}]}',
        "m",
    )
    assert isinstance(completion, Completion)
    assert completion.logprobs is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(
        st.sampled_from(
            ["choices", "message", "content", "tool_calls", "function", "name", "arguments",
             "usage", "logprobs", "token", "prompt_tokens", "error", "finish_reason", "model"]
        ),
        inner,
    ),
    max_leaves=15,
)  # fmt: skip


@settings(deadline=None, max_examples=100)
@given(
    answer=json_values
    | json_values.map(lambda value: {"choices": [value]})
    | json_values.map(lambda value: {"choices": [{"message": value, "logprobs": value}]})
)
def test_no_answer_of_a_server_breaks_the_reader(answer: object) -> None:
    outcome = _parse(json.dumps(answer).encode(), "m")
    if isinstance(outcome, Completion):
        assert Completion.model_validate_json(outcome.model_dump_json()) == outcome
    else:
        assert outcome.reason in ("bad_response", "empty_choices")


@settings(deadline=None, max_examples=100)
@given(content=st.binary())
def test_no_bytes_break_the_reader(content: bytes) -> None:
    _parse(content, "m")


# Failures that are repeated


@pytest.mark.parametrize(
    ("fault", "reason", "status"),
    [
        (Reply(status=408), "timeout", 408),
        (Reply(status=409), "server_error", 409),
        (Reply(status=429), "rate_limit", 429),
        (Reply(status=500), "server_error", 500),
        (Reply(status=503), "server_error", 503),
        (Reply(fault="drop"), "connection", None),
        (Reply(fault="cut"), "connection", None),
        (Reply(fault="invalid_json"), "bad_response", 200),
        (Reply(fault="raw", body=b"[]"), "bad_response", 200),
        (Reply(fault="raw", body=b"<html>"), "bad_response", 200),
        (Reply(fault="raw", body=b'{"error": {"message": "overloaded"}}'), "bad_response", 200),
        (Reply(fault="raw", body=b'{"choices": {"0": 1}}'), "bad_response", 200),
        (Reply(fault="raw", body=b'{"choices": [{}]}'), "bad_response", 200),
        (Reply(fault="raw", body=b"{}"), "empty_choices", 200),
        (Reply(fault="empty_choices"), "empty_choices", 200),
    ],
)
def test_a_passing_failure_is_repeated_and_told_of(
    fault: Reply, reason: str, status: int | None
) -> None:
    retries = Retries()
    with LoopbackServer(in_turn(fault, fault, Reply(text="Doha"))) as server:
        completion = asyncio.run(answer(endpoint(server), retries=retries))
    assert completion.text == "Doha"
    assert retries == [(reason, status)] * 2
    assert server.n_requests == 3


@pytest.mark.parametrize(
    ("fault", "reason", "status", "words"),
    [
        (Reply(status=429, error="slow down"), "rate_limit", 429, "slow down"),
        (Reply(status=500), "server_error", 500, "The server failed"),
        (Reply(fault="cut"), "connection", None, "hung up"),
        (Reply(fault="invalid_json"), "bad_response", 200, "not JSON"),
        (Reply(fault="empty_choices"), "empty_choices", 200, "no choice"),
    ],
)
def test_a_lasting_failure_ends_after_the_last_attempt(
    fault: Reply, reason: str, status: int | None, words: str
) -> None:
    retries = Retries()
    with LoopbackServer(lambda request: fault) as server:
        error = failure(server, retries, max_attempts=3)
    assert (error.reason, error.status) == (reason, status)
    assert server.n_requests == 3
    assert len(retries) == 2, "the last attempt is no retry"
    assert words in str(error)
    assert "3 attempts" in str(error)
    assert server.base_url in str(error)


@pytest.mark.parametrize("fault", ["hang", "trickle"])
def test_a_server_that_never_finishes_is_given_up(fault: Any) -> None:
    retries = Retries()
    with LoopbackServer(in_turn(Reply(fault=fault), Reply(text="Doha"))) as server:
        completion = asyncio.run(answer(endpoint(server, timeout_s=1.0), retries=retries))
    assert completion.text == "Doha"
    assert retries == [("timeout", None)]


def test_a_timeout_says_how_long_it_waited() -> None:
    with LoopbackServer(lambda request: Reply(fault="hang")) as server:
        error = failure(server, timeout_s=0.05, max_attempts=1)
    assert error.reason == "timeout"
    assert error.status is None
    assert "0.05 s" in str(error)
    assert "1 attempt)" in str(error)


def test_a_server_that_is_not_there_is_named() -> None:
    with LoopbackServer() as server:
        url = server.base_url
    waits = Waits()
    model = Endpoint(model="m", base_url=url, sleep=waits, max_attempts=2)
    with pytest.raises(ModelError, match=f"{url} .*Check that it runs.*OPENAI_BASE_URL") as caught:
        asyncio.run(answer(model))
    assert caught.value.reason == "connection"
    assert len(waits) == 1


@pytest.mark.parametrize(
    ("headers", "waited"),
    [
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": "7"}, 7.0),
        ({"Retry-After": "0.25"}, 0.25),
        ({"retry-after": "3600"}, 60.0),
        ({"retry-after-ms": "inf"}, 60.0),
        ({"retry-after": "Fri, 31 Dec 2100 23:59:59 GMT"}, 60.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 -0000"}, 0.0),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_the_server_decides_how_long_to_wait(
    headers: dict[str, str], waited: float, status: int
) -> None:
    waits = Waits()
    with LoopbackServer(in_turn(Reply(status=status, headers=headers), Reply())) as server:
        asyncio.run(answer(endpoint(server, sleep=waits)))
    assert waits == [waited]


@settings(deadline=None)
@given(value=st.text() | st.sampled_from(["nan", "-1", "1e999", "31 Feb", "Mon, 99 Jan 99999"]))
def test_any_retry_after_is_a_wait_or_nothing(value: str) -> None:
    seconds = _asked_wait_s({"retry-after": value})
    assert seconds is None or seconds >= 0


def test_without_a_word_from_the_server_the_waits_grow_and_differ() -> None:
    def waits_of_one() -> Waits:
        waits = Waits()
        with LoopbackServer(lambda request: Reply(status=500)) as server:
            failure(server, sleep=waits, max_attempts=9)
        return waits

    waits = waits_of_one()
    assert waits == waits_of_one(), "the same endpoint waits the same"
    assert len(set(waits)) == 8
    assert all(0 <= wait <= min(30.0, 2.0**i) for i, wait in enumerate(waits))
    assert max(waits) > 1.0


# Failures that are not


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (400, "bad_request", "refused the request"),
        (401, "auth", "OPENAI_API_KEY"),
        (402, "bad_request", "refused the request"),
        (403, "auth", "OPENAI_API_KEY"),
        (404, "not_found", "name of the model"),
        (422, "bad_request", "refused the request"),
    ],
)
def test_a_refusal_fails_at_once_and_says_what_to_do(status: int, reason: str, words: str) -> None:
    retries = Retries()
    with LoopbackServer(lambda request: Reply(status=status, error="said so")) as server:
        error = failure(server, retries)
    assert (error.reason, error.status) == (reason, status)
    assert server.n_requests == 1
    assert retries == []
    for part in (words, "said so", server.base_url, "'m'"):
        assert part in str(error)


def test_a_context_that_is_too_long_keeps_the_servers_words() -> None:
    said = "This model's maximum context length is 4096 tokens, you asked for 5000."
    with LoopbackServer(lambda request: Reply(status=400, error=said)) as server:
        assert said in str(failure(server))


def test_a_page_instead_of_an_answer_is_cut_short() -> None:
    with LoopbackServer(lambda request: Reply(status=400, error="x" * 10**6)) as server:
        assert len(str(failure(server))) < 3000


def test_a_wrong_path_is_not_found() -> None:
    with LoopbackServer() as server:
        error = failure(server, base_url=server.base_url + "/v1")
    assert error.reason == "not_found"


# Fields that some servers refuse


def test_a_server_without_reply_formats_is_asked_once_more_without_and_remembered() -> None:
    def respond(request: Json) -> Reply:
        is_refused = "response_format" in request
        return Reply(status=400, error="unknown field") if is_refused else Reply(text="{}")

    async def twice(model: Endpoint, retries: Retries) -> None:
        await model.complete(ask(response_schema=SCHEMA), retries)
        await answer(model, ask("Again?", response_schema=SCHEMA), retries)

    retries, waits = Retries(), Waits()
    with LoopbackServer(respond) as server:
        asyncio.run(twice(endpoint(server, sleep=waits, max_attempts=1), retries))
    assert ["response_format" in request for request in server.requests] == [True, False, False]
    assert retries == [("bad_request", 400)]
    assert waits == []


def test_a_request_refused_with_and_without_reply_format_is_not_held_against_the_format() -> None:
    def respond(request: Json) -> Reply:
        is_refused = request["messages"][0]["content"] == "too long"
        return Reply(status=400, error="too long") if is_refused else Reply(text="{}")

    async def long_then_short(model: Endpoint) -> None:
        with pytest.raises(ModelError, match="too long"):
            await model.complete(ask("too long", response_schema=SCHEMA), Retries())
        await answer(model, ask("short", response_schema=SCHEMA))

    with LoopbackServer(respond) as server:
        asyncio.run(long_then_short(endpoint(server)))
    assert ["response_format" in request for request in server.requests] == [True, False, True]


def test_one_refused_schema_says_nothing_about_another() -> None:
    def respond(request: Json) -> Reply:
        schema = request.get("response_format", {}).get("json_schema", {}).get("schema")
        return Reply(status=400) if schema == SCHEMA else Reply(text="{}")

    async def both(model: Endpoint) -> None:
        await model.complete(ask(response_schema=SCHEMA), Retries())
        await answer(model, ask(response_schema={"type": "object"}))

    with LoopbackServer(respond) as server:
        asyncio.run(both(endpoint(server)))
    assert ["response_format" in request for request in server.requests] == [True, False, True]


def test_a_model_that_wants_another_name_for_max_tokens_gets_it() -> None:
    def respond(request: Json) -> Reply:
        if "max_tokens" in request:
            return Reply(status=400, error="Unsupported: use 'max_completion_tokens' instead.")
        return Reply(text="Doha")

    async def twice(model: Endpoint, retries: Retries) -> Completion:
        await model.complete(ask(), retries)
        return await answer(model, ask("Again?"), retries)

    retries = Retries()
    with LoopbackServer(respond) as server:
        assert asyncio.run(twice(endpoint(server), retries)).text == "Doha"
    assert [request.get("max_completion_tokens") for request in server.requests] == [None, 512, 512]
    assert retries == [("bad_request", 400)]


# Secrets


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 429, 500])
def test_the_key_never_shows_even_if_the_server_repeats_it(status: int) -> None:
    said = f"Incorrect API key provided: {KEY} (password hunter22)"
    with LoopbackServer(lambda request: Reply(status=status, error=said)) as server:
        url = server.base_url.replace("//", "//me:hunter22@")
        model = endpoint(server, base_url=url, max_attempts=2)
        with pytest.raises(ModelError) as caught:
            asyncio.run(answer(model))
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(model)
    assert "Incorrect API key provided" in shown
    assert KEY not in shown
    assert "hunter22" not in shown
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None, "the SDK's error holds what the server said"


def test_the_key_never_shows_in_what_a_successful_answer_complains_about() -> None:
    body = json.dumps({"error": {"message": f"bad key {KEY}"}}).encode()
    with LoopbackServer(lambda request: Reply(fault="raw", body=body)) as server:
        error = failure(server, max_attempts=1)
    assert "bad key [key]" in str(error)


def test_a_stand_in_for_a_key_does_not_garble_messages() -> None:
    with LoopbackServer(lambda request: Reply(status=400, error="max context-length")) as server:
        assert "max context-length" in str(failure(server, api_key="-"))


@pytest.mark.parametrize("key", ["sk-geheim\u00e4", "sk-secret\nX-Evil: 1"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(SettingsError, match="API key") as caught:
        Endpoint(model="m", api_key=key)
    assert "sk-" not in str(caught.value)


def test_spaces_around_a_key_are_ignored() -> None:
    with LoopbackServer() as server:
        asyncio.run(answer(endpoint(server, api_key=f" {KEY}\n")))
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


# Settings


def test_without_key_and_base_url_both_variables_are_named() -> None:
    with pytest.raises(SettingsError, match=r"OPENAI_API_KEY.*OPENAI_BASE_URL"):
        Endpoint(model="m")


def test_empty_variables_count_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "")
    monkeypatch.setenv("OPENAI_BASE_URL", "")
    with pytest.raises(SettingsError, match="no model server"):
        Endpoint(model="m")


def test_the_variables_of_the_sdk_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with LoopbackServer() as server:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-from-the-environment")
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        asyncio.run(answer(Endpoint(model="m")))
    assert server.headers[0]["authorization"] == "Bearer sk-from-the-environment"


def test_a_server_of_ones_own_needs_no_key() -> None:
    with LoopbackServer() as server:
        asyncio.run(answer(Endpoint(model="m", base_url=server.base_url)))
    assert server.headers[0]["authorization"] == "Bearer no-key"


@pytest.mark.parametrize(
    "changes",
    [
        {"base_url": "127.0.0.1:8000/v1"},
        {"base_url": "ftp://127.0.0.1/v1"},
        {"base_url": "http:///v1"},
        {"base_url": "http://[::1/v1"},
        {"timeout_s": 0.0},
        {"max_attempts": 0},
        {"extra_body": {"a": float("nan")}},
        {"extra_body": {"a": object()}},
    ],
)
def test_settings_that_can_not_work_are_refused(changes: Json) -> None:
    with pytest.raises(SettingsError):
        Endpoint(**{"model": "m", "api_key": KEY, **changes})


def test_identity_and_price_go_by_the_name_of_the_model() -> None:
    price = Price(prompt=1, completion=2)
    model = Endpoint(model="m", api_key=KEY, prices={"m": price})
    assert model.identity(None) == ModelIdentity(name="m", provider="endpoint")
    assert model.identity("n") == ModelIdentity(name="n", provider="endpoint")
    assert model.price(None) == model.price("m") == price
    assert model.price("n") is None


def test_a_given_identity_stands_for_the_endpoints_own_model_only() -> None:
    known = ModelIdentity(name="qwen", provider="mine", digest="d", version="v")
    model = Endpoint(model="m", api_key=KEY, identity=known)
    assert model.identity(None) == model.identity("m") == model.identity("qwen") == known
    assert model.identity("n") == ModelIdentity(name="n", provider="endpoint")


def test_extra_fields_make_another_identity() -> None:
    plain = Endpoint(model="m", api_key=KEY)
    one = Endpoint(model="m", api_key=KEY, extra_body={"think": True})
    other = Endpoint(model="m", api_key=KEY, extra_body={"think": False})
    assert len({model.identity(None).model_dump_json() for model in (plain, one, other)}) == 3


# Event loops and concurrency


def test_an_endpoint_serves_one_event_loop_after_the_other_and_leaves_nothing_open() -> None:
    async def some(model: Endpoint) -> list[str]:
        completions = [await model.complete(ask(), Retries()) for _ in range(2)]
        return [completion.text for completion in completions]

    with warnings.catch_warnings(), LoopbackServer() as server:
        warnings.simplefilter("error")
        model = endpoint(server)
        assert asyncio.run(some(model)) == asyncio.run(some(model)) == ["ok", "ok"]
        assert server.n_connections == 2, "one connection for each loop, kept alive in it"
        del model
        gc.collect()


async def test_an_endpoint_works_on_after_it_was_closed() -> None:
    with LoopbackServer() as server:
        model = endpoint(server)
        await model.aclose()
        for _ in range(2):
            assert (await model.complete(ask(), Retries())).text == "ok"
            await model.aclose()
            await model.aclose()
        assert server.n_connections == 2


async def test_a_cancelled_request_is_cancelled_at_the_server_too() -> None:
    arrived = threading.Event()

    def respond(request: Json) -> Reply:
        arrived.set()
        return Reply(fault="hang")

    with LoopbackServer(respond) as server:
        model = endpoint(server)
        call = asyncio.create_task(model.complete(ask(), Retries()))
        assert await asyncio.to_thread(arrived.wait, 10)
        call.cancel()
        # A server that hangs is idle again only when the client hangs up.
        assert await asyncio.to_thread(server.idle.wait, 10)
        assert call.cancelled()
        await model.aclose()


def echo(request: Json) -> Reply:
    return Reply(text="echo " + request["messages"][0]["content"])


async def gather_texts(model: Endpoint, texts: list[str]) -> list[str]:
    completions = await asyncio.gather(*(model.complete(ask(text), Retries()) for text in texts))
    await model.aclose()
    return [completion.text for completion in completions]


def test_of_200_requests_at_once_each_gets_its_own_answer() -> None:
    texts = [f"nonce-{i}-{random.Random(i).getrandbits(64)}" for i in range(200)]
    with LoopbackServer(echo) as server:
        replies = asyncio.run(gather_texts(endpoint(server, limits=Limits(concurrency=64)), texts))
    assert replies == [f"echo {text}" for text in texts]
    assert server.n_requests == 200


def test_the_server_never_sees_more_requests_at_once_than_the_limit() -> None:
    def respond(request: Json) -> Reply:
        return Reply(latency_s=0.02)

    with LoopbackServer(respond) as server:
        model = endpoint(server, limits=Limits(concurrency=5))
        asyncio.run(gather_texts(model, [str(i) for i in range(40)]))
    assert server.max_in_flight == 5
    assert server.n_connections <= 5


def flaky(seed: int) -> Callable[[Json], Reply]:
    """Fail about every second request, each time in another way."""
    dice = random.Random(seed)
    faults = [
        Reply(status=429, headers={"retry-after-ms": "5"}),
        Reply(status=500),
        Reply(fault="cut"),
        Reply(fault="drop"),
        Reply(fault="invalid_json"),
        Reply(fault="empty_choices"),
    ]

    def respond(request: Json) -> Reply:
        if dice.random() < 0.5:
            return dice.choice(faults)
        return Reply(
            text="word " * dice.randint(1, 9),
            prompt_tokens=dice.randint(50, 90),
            cached_tokens=dice.choice([None, 7, 40]),
            reasoning_tokens=dice.choice([None, 1]),
        )

    return respond


@pytest.mark.parametrize("seed", range(3))
def test_tokens_told_equal_tokens_served_under_failures_and_concurrency(seed: int) -> None:
    async def many(model: Endpoint, retries: Retries) -> list[Completion]:
        requests = [ask(f"question {i}") for i in range(100)]
        completions = await asyncio.gather(*(model.complete(r, retries) for r in requests))
        await model.aclose()
        return completions

    retries = Retries()
    with LoopbackServer(flaky(seed)) as server:
        model = endpoint(server, max_attempts=50, limits=Limits(concurrency=16))
        completions = asyncio.run(many(model, retries))
    usages = [completion.usage for completion in completions]
    told = {name: sum(getattr(usage, name) or 0 for usage in usages) for name in Usage.model_fields}
    assert told == vars(server.served)
    assert server.n_served == len(completions) == 100
    assert server.n_requests == len(completions) + len(retries)
    assert len(retries) > 30


def test_the_sdk_is_not_imported_before_it_is_needed() -> None:
    script = (
        "import sys; from splice.models.endpoint import Endpoint; "
        "Endpoint(model='m', api_key='k').identity(None); print('openai' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


async def test_the_loopback_server_lists_its_models() -> None:
    from openai import AsyncOpenAI

    with LoopbackServer() as server:
        async with AsyncOpenAI(base_url=server.base_url, api_key=KEY) as client:
            assert [model.id async for model in client.models.list()] == ["loopback"]
