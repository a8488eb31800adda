"""Several servers behind one name: who gets which request, and what happens if one is out."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import LoopbackServer, Reply
from test_limits import leap

from splice.errors import ModelError, SettingsError
from splice.models.default import default_model
from splice.models.endpoint import Endpoint
from splice.models.limits import Limits
from splice.models.protocol import ChatModel, OnRetry
from splice.models.scripted import ScriptedModel
from splice.models.spread import Spread
from splice.records import (
    ChatMessage,
    Completion,
    ModelIdentity,
    ModelSettings,
    Price,
    Request,
)
from splice.workflow import Agent, Workflow

DOWN = ModelError("no answer", reason="connection")
OUTS = ("connection", "timeout", "server_error", "rate_limit", "bad_response", "auth")
Outcome: TypeAlias = BaseException | None


class Retries(list[tuple[str, int | None, float]]):
    """(reason, status, elapsed_s) of each failed attempt that was repeated."""

    def __call__(self, reason: str, status: int | None, elapsed_s: float) -> None:
        self.append((reason, status, round(elapsed_s, 2)))


class Member:
    """Takes its time, by the clock of the loop, and fails as it is told to."""

    def __init__(
        self,
        latency_s: float = 1.0,
        outcome: Callable[[str], Outcome] = lambda text: None,
        *,
        digest: str | None = None,
        price: Price | None = None,
    ) -> None:
        self.latency_s = latency_s
        self.outcome = outcome
        self.asked: list[tuple[str, float]] = []
        """Text of each request, and when it arrived."""
        self.n_in_flight = 0
        self.most_in_flight = 0
        self.n_closed = 0
        self._digest = digest
        self._price = price

    @property
    def texts(self) -> list[str]:
        return [text for text, _ in self.asked]

    @property
    def times(self) -> list[float]:
        return [round(moment, 2) for _, moment in self.asked]

    async def complete(self, request: Request, on_retry: OnRetry) -> Completion:
        text = request.messages[0].content
        self.asked.append((text, loop_time()))
        self.n_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.n_in_flight)
        try:
            await asyncio.sleep(self.latency_s)
            outcome = self.outcome(text)
        finally:
            self.n_in_flight -= 1
        if outcome is not None:
            raise outcome
        return Completion(text=f"{text}!", model="m")

    def identity(self, name: str | None) -> ModelIdentity:
        return ModelIdentity(name=name or "m", provider="fake", digest=self._digest)

    def price(self, name: str | None) -> Price | None:
        return self._price

    async def aclose(self) -> None:
        self.n_closed += 1


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def spread(*members: tuple[ChatModel, int]) -> Spread:
    return Spread(members, clock=loop_time)


def ask(text: str = "Where?", **fields: Any) -> Request:
    return Request(messages=(ChatMessage(role="user", content=text),), **fields)


async def say(model: ChatModel, text: str = "Where?", retries: Retries | None = None) -> str:
    on_retry = Retries() if retries is None else retries
    return (await model.complete(ask(text), on_retry)).text


async def say_all(model: ChatModel, n_requests: int) -> list[str]:
    return await asyncio.gather(*(say(model, str(i)) for i in range(n_requests)))


def always(error: BaseException) -> Callable[[str], Outcome]:
    return lambda text: error


def on(text: str, error: BaseException = DOWN) -> Callable[[str], Outcome]:
    """Fail the requests that say so."""
    return lambda said: error if text in said else None


def in_turn(*outcomes: Outcome) -> Callable[[str], Outcome]:
    """One after the other, then answers."""
    queue = iter(outcomes)
    return lambda text: next(queue, None)


# Who is asked


def test_a_spread_is_a_chat_model() -> None:
    assert isinstance(spread((Member(), 1)), ChatModel)


@pytest.mark.parametrize(("n_requests", "split"), [(64, (16, 48)), (32, (8, 24)), (4, (1, 3))])
def test_a_load_divides_as_the_places_do(n_requests: int, split: tuple[int, int]) -> None:
    small, large = Member(), Member()
    leap(say_all(spread((small, 16), (large, 48)), n_requests))
    assert (len(small.asked), len(large.asked)) == split


def test_under_more_load_than_there_are_places_all_places_are_in_use() -> None:
    small, large = Member(), Member()
    replies = leap(say_all(spread((small, 16), (large, 48)), 640))
    assert replies == [f"{i}!" for i in range(640)]
    assert (len(small.asked), len(large.asked)) == (160, 480)
    assert (small.most_in_flight, large.most_in_flight) == (16, 48)


def test_of_equally_loaded_members_the_first_is_asked() -> None:
    first, second = Member(), Member()

    async def one_after_the_other(model: Spread) -> None:
        for text in ("a", "b", "c"):
            await say(model, text)

    leap(one_after_the_other(spread((first, 1), (second, 100))))
    assert first.texts == ["a", "b", "c"]


def test_a_fast_member_does_not_idle_while_a_slow_one_works() -> None:
    slow, fast = Member(latency_s=10.0), Member(latency_s=1.0)

    async def main() -> float:
        await say_all(spread((slow, 1), (fast, 1)), 11)
        return loop_time()

    assert leap(main()) == pytest.approx(10.0, abs=0.01)
    assert (len(slow.asked), len(fast.asked)) == (1, 10)


def test_requests_wait_in_the_order_they_came() -> None:
    one, other = Member(latency_s=3.0), Member(latency_s=2.0)
    leap(say_all(spread((one, 1), (other, 2)), 12))
    arrived = sorted(one.asked + other.asked, key=lambda asked: asked[1])
    assert [text for text, _ in arrived] == [str(i) for i in range(12)]


def test_a_spread_serves_one_event_loop_after_the_other() -> None:
    member = Member()
    model = spread((member, 2))
    for _ in range(2):
        with pytest.raises(TimeoutError):
            leap(asyncio.wait_for(say_all(model, 5), 1.5))
        assert leap(say_all(model, 3)) == ["0!", "1!", "2!"]
    assert member.most_in_flight == 2


# A server is out


@pytest.mark.parametrize("reason", [*OUTS, "not_found"])
def test_a_request_that_a_server_fails_is_answered_by_another(reason: str) -> None:
    error = ModelError("no", reason=reason, status=418)
    first, second, retries = Member(3.0, always(error)), Member(), Retries()
    assert leap(say(spread((first, 1), (second, 1)), "a", retries)) == "a!"
    assert retries == [(reason, 418, 3.0)]
    assert (first.texts, second.texts) == (["a"], ["a"])


@pytest.mark.parametrize("reason", ["bad_request", "empty_choices", "script_exhausted", "error"])
def test_a_request_that_fails_for_itself_is_not_repeated(reason: str) -> None:
    error = ModelError("no", reason=reason)
    first, second, retries = Member(outcome=always(error)), Member(), Retries()
    with pytest.raises(ModelError) as caught:
        leap(say(spread((first, 1), (second, 1)), "a", retries))
    assert caught.value is error
    assert (retries, second.asked) == ([], [])


def test_a_request_that_all_servers_fail_was_tried_once_at_each() -> None:
    errors = [ModelError(str(i), reason=reason) for i, reason in enumerate(OUTS[:3])]
    members = [Member(outcome=always(error)) for error in errors]
    retries = Retries()
    with pytest.raises(ModelError) as caught:
        leap(say(spread(*((member, 2) for member in members)), "a", retries))
    assert caught.value is errors[-1]
    assert caught.value.__context__ is None
    assert [reason for reason, _, _ in retries] == ["connection", "timeout"]
    assert [member.texts for member in members] == [["a"]] * 3


def test_retries_of_a_member_are_passed_on_and_not_counted_twice() -> None:
    class Repeating(Member):
        async def complete(self, request: Request, on_retry: OnRetry) -> Completion:
            await asyncio.sleep(4.0)
            on_retry("timeout", None, 4.0)
            return await super().complete(request, on_retry)

    retries = Retries()
    leap(say(spread((Repeating(2.0, always(DOWN)), 1), (Member(), 1)), "a", retries))
    assert retries == [("timeout", None, 4.0), ("connection", None, 2.0)]


def test_a_repeated_request_goes_before_those_that_wait_for_their_first_try() -> None:
    first, second = Member(1.0, on("0")), Member(2.0)
    leap(say_all(spread((first, 1), (second, 1)), 4))
    assert second.texts[:2] == ["1", "0"]


def test_a_repeated_request_waits_for_a_member_that_it_has_not_tried() -> None:
    first, second = Member(1.0, on("0", ModelError("no", reason="not_found"))), Member(5.0)
    leap(say_all(spread((first, 1), (second, 1)), 2))
    assert (first.texts, second.texts) == (["0"], ["1", "0"])
    assert second.times == [0.0, 5.0]


# Rests


async def every_second(model: Spread, n_seconds: int) -> None:
    """One request at the start of each second."""
    for _ in range(n_seconds):
        call = asyncio.create_task(say(model))
        await asyncio.sleep(1.0)
        await call


@pytest.mark.parametrize("reason", OUTS)
def test_a_failed_server_is_left_alone_for_twice_as_long_each_time(reason: str) -> None:
    out = Member(0.0, always(ModelError("no", reason=reason)))
    leap(every_second(spread((out, 4), (Member(0.5), 4)), 220))
    # Rests of 5, 10, 20, 40, 60 and 60 seconds.
    assert [moment for _, moment in out.asked] == pytest.approx(
        [0, 5, 15, 35, 75, 135, 195], abs=1.1
    )


def test_a_server_that_does_not_know_a_name_does_not_rest() -> None:
    unknowing = Member(0.0, always(ModelError("no", reason="not_found")))
    leap(every_second(spread((unknowing, 4), (Member(0.5), 4)), 10))
    assert len(unknowing.asked) == 10


def test_a_server_that_has_answered_starts_again_with_a_short_rest() -> None:
    flaky = Member(0.0, in_turn(DOWN, DOWN, None, DOWN))
    leap(every_second(spread((flaky, 4), (Member(0.5), 4)), 23))
    # Out at 0 and at 5; back at 15 and out once more at 16, which counts as the first time.
    assert [moment for _, moment in flaky.asked[:5]] == pytest.approx([0, 5, 15, 16, 21], abs=1.1)


def test_requests_that_were_sent_before_the_rest_do_not_lengthen_it() -> None:
    falling = Member(outcome=on("old"))

    async def main(model: Spread) -> None:
        calls = []
        # The last two fail during and after the rest of five seconds that begins with the first.
        for falling.latency_s, text in (
            (1.0, "old 1"),
            (0.0, "other"),
            (3.0, "old 2"),
            (8.0, "old 3"),
        ):
            calls.append(asyncio.create_task(say(model, text)))
            await asyncio.sleep(0)
        await asyncio.gather(*calls)
        await say(model, "new")

    leap(main(spread((falling, 8), (Member(latency_s=0.5), 1))))
    assert falling.texts == ["old 1", "old 2", "old 3", "new"]


def test_an_answer_of_a_request_in_flight_ends_the_rest() -> None:
    member, busy = Member(2.0, on("bad")), Member(9.0)

    async def main(model: Spread) -> None:
        calls = [asyncio.create_task(say(model, text)) for text in ("good", "busy")]
        await asyncio.sleep(0)
        member.latency_s = 1.0
        calls += [asyncio.create_task(say(model, text)) for text in ("bad", "next")]
        await asyncio.gather(*calls)

    leap(main(spread((member, 2), (busy, 1))))
    assert list(zip(member.texts, member.times, strict=True)) == [
        ("good", 0.0),
        ("bad", 0.0),
        ("next", 2.0),
    ]


def test_after_a_rest_one_request_finds_out_for_all() -> None:
    out = Member(0.0, always(DOWN))
    model = spread((out, 10), (Member(latency_s=1.0), 10))

    async def main() -> None:
        await say(model)
        await asyncio.sleep(6.0)
        await say_all(model, 5)
        assert len(out.asked) == 2
        out.outcome, out.latency_s = in_turn(), 1.0
        await asyncio.sleep(11.0)
        await say(model)
        await say_all(model, 20)
        assert out.most_in_flight == 10

    leap(main())


def test_if_all_servers_are_out_none_is_left_alone() -> None:
    members = [Member(1.0, on("bad")), Member(1.0, on("bad"))]
    model = spread(*((member, 3) for member in members))

    async def main() -> list[str]:
        with pytest.raises(ModelError):
            await say(model, "bad")
        return await say_all(model, 6)

    assert len(leap(main())) == 6
    assert [member.most_in_flight for member in members] == [3, 3]


def test_requests_that_wait_get_a_server_as_soon_as_its_rest_is_over() -> None:
    out, busy = Member(0.0, on("bad")), Member(1.0)

    async def main(model: Spread) -> None:
        await say(model, "bad")
        busy.latency_s = 100.0
        await asyncio.gather(say(model, "long"), say(model, "waits"))

    leap(main(spread((out, 1), (busy, 1))))
    assert out.texts == ["bad", "waits"]
    assert out.times == [0.0, 5.0]


# Places


async def cancelled(*calls: asyncio.Task[str]) -> None:
    for call in calls:
        call.cancel()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, asyncio.CancelledError)


def test_a_cancelled_request_gives_its_place_back() -> None:
    member = Member(latency_s=1000.0)
    model = spread((member, 1))

    async def main() -> str:
        calls = [asyncio.create_task(say(model, text)) for text in ("sent", "waiting")]
        await asyncio.sleep(1.0)
        await cancelled(*calls)
        member.latency_s = 1.0
        return await say(model, "next")

    assert leap(asyncio.wait_for(main(), 10.0)) == "next!"
    assert member.texts == ["sent", "next"]


def test_a_request_cancelled_as_it_gets_its_place_gives_it_back() -> None:
    member = Member(latency_s=1.0)
    model = spread((member, 1))

    async def main() -> str:
        waiting = asyncio.create_task(say(model, "waiting"))
        await say(model, "first")
        # The place was handed on just now, and nobody else has run since.
        await cancelled(waiting)
        return await say(model, "third")

    assert leap(asyncio.wait_for(main(), 10.0)) == "third!"
    assert member.texts == ["first", "third"]


def test_any_error_gives_the_place_back() -> None:
    member = Member(outcome=in_turn(ZeroDivisionError(), ModelError("no", reason="bad_request")))

    async def main(model: Spread) -> str:
        for error in (ZeroDivisionError, ModelError):
            with pytest.raises(error):
                await say(model)
        return await say(model, "next")

    assert leap(asyncio.wait_for(main(spread((member, 1))), 10.0)) == "next!"


REASONS = st.sampled_from([None, None, None, *OUTS, "not_found", "bad_request", "cancel"])


@settings(max_examples=100)
@given(
    places=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    n_requests=st.integers(1, 40),
    data=st.data(),
)
def test_no_member_ever_exceeds_its_places_and_none_is_lost(
    places: list[int], n_requests: int, data: st.DataObject
) -> None:
    dice = random.Random(data.draw(st.integers(0, 2**32)))
    fates = data.draw(st.lists(REASONS, min_size=1, max_size=12))
    steady = False

    def outcome(text: str) -> Outcome:
        reason = None if steady else dice.choice(fates)
        if reason is None:
            return None
        return asyncio.CancelledError() if reason == "cancel" else ModelError("", reason=reason)

    members = [Member(dice.choice([0.0, 1.0, 7.0]), outcome) for _ in places]
    model = spread(*zip(members, places, strict=True))

    async def one(text: str) -> None:
        await asyncio.sleep(dice.choice([0.0, 0.0, 3.0]))
        told = Retries()
        call = asyncio.create_task(say(model, text, told))
        if dice.random() < 0.2:
            asyncio.get_running_loop().call_later(dice.uniform(0.0, 9.0), call.cancel)
        await asyncio.wait([call])
        tries = sum(member.texts.count(text) for member in members)
        assert all(member.texts.count(text) <= 1 for member in members)
        assert len(told) == max(tries - 1, 0) or call.cancelled()
        if not call.cancelled() and call.exception() is not None:
            error = call.exception()
            assert isinstance(error, ModelError)
            assert error.reason == "bad_request" or tries == len(members)

    async def main() -> None:
        nonlocal steady
        await asyncio.gather(*(one(f"{i};") for i in range(n_requests)))
        steady = True
        for member in members:
            member.latency_s = 1.0
        # Beyond every rest; then one answer of each shows that it is back.
        await asyncio.sleep(61.0)
        await asyncio.gather(*(say(model, f"back {i}") for i in range(2 * len(members))))
        await asyncio.gather(*(say(model, f"full {i}") for i in range(sum(places))))

    leap(main())
    assert all(member.most_in_flight <= n for member, n in zip(members, places, strict=True))
    assert [
        sum(text.startswith("full") for text in member.texts) for member in members
    ] == places, "every place was given back"


# Settings


def test_what_can_not_be_spread_over_is_refused() -> None:
    with pytest.raises(SettingsError, match="at least one model"):
        Spread([])
    with pytest.raises(SettingsError, match="at least 1 place, not 0"):
        Spread([(Member(), 0)])


def test_different_models_are_refused_and_both_are_named() -> None:
    one = Endpoint(model="qwen", base_url="http://127.0.0.1:1/v1")
    other = Endpoint(model="llama", base_url="http://me:s3cret@127.0.0.1:2/v1")
    with pytest.raises(
        SettingsError, match=r"'qwen'.*127.0.0.1:1/v1.*'llama'.*127.0.0.1:2/v1"
    ) as e:
        Spread([(one, 1), (other, 1)])
    assert "s3cret" not in str(e.value)


def test_another_version_or_other_weights_are_another_model() -> None:
    plain = Endpoint(model="m", api_key="k")
    thinking = Endpoint(model="m", api_key="k", extra_body={"think": True})
    with pytest.raises(SettingsError, match="different models"):
        Spread([(plain, 1), (thinking, 1)])
    with pytest.raises(SettingsError, match=r"'d1'.*'d2'"):
        Spread([(Member(digest="d1"), 1), (Member(), 1), (Member(digest="d2"), 1)])


def test_identity_is_what_holds_for_all() -> None:
    known, unknown = Member(digest="d"), Member()
    assert spread((known, 1), (known, 2)).identity(None) == known.identity(None)
    assert spread((known, 1), (known, 2), (unknown, 1)).identity(None) == unknown.identity(None)
    assert spread((unknown, 1), (known, 1)).identity("n").name == "n"


def test_price_is_known_where_it_is_the_same_everywhere() -> None:
    cheap, dear = Price(prompt=1, completion=2), Price(prompt=3, completion=4)
    assert spread((Member(price=cheap), 1), (Member(price=cheap), 1)).price(None) == cheap
    assert spread((Member(price=cheap), 1), (Member(price=dear), 1)).price(None) is None
    assert spread((Member(price=cheap), 1), (Member(), 1)).price(None) is None


async def test_all_members_are_closed_even_if_one_can_not_be() -> None:
    class Stuck(Member):
        async def aclose(self) -> None:
            raise OSError("stuck")

    first, last = Member(), Member()
    with pytest.raises(OSError, match="stuck"):
        await spread((first, 1), (Stuck(), 1), (last, 1)).aclose()
    assert (first.n_closed, last.n_closed) == (1, 1)


async def test_the_request_reaches_a_scripted_member_as_it_is() -> None:
    member = ScriptedModel({"n": ["Doha"]})
    request = ask(node="n", settings=ModelSettings(seed=3), rollout=2)
    completion = await Spread([(member, 1)]).complete(request, Retries())
    assert completion.text == "Doha"
    assert member.requests == [request]


# Real servers


def endpoint(url: str, n_places: int) -> tuple[Endpoint, int]:
    async def no_wait(seconds: float) -> None:
        return None

    return Endpoint(
        model="m",
        base_url=url,
        api_key="sk-secret-key",
        limits=Limits(concurrency=n_places),
        max_attempts=2,
        sleep=no_wait,
    ), n_places


async def say_all_and_close(model: ChatModel, n_requests: int) -> list[str]:
    try:
        return await say_all(model, n_requests)
    finally:
        await model.aclose()


def echo(request: dict[str, Any]) -> Reply:
    return Reply(text="echo " + request["messages"][0]["content"], latency_s=0.01)


def test_two_servers_share_a_load_within_their_places() -> None:
    with LoopbackServer(echo) as small, LoopbackServer(echo) as large:
        model = Spread([endpoint(small.base_url, 2), endpoint(large.base_url, 6)])
        assert len(asyncio.run(say_all_and_close(model, 8))) == 8
        assert (small.n_requests, large.n_requests) == (2, 6)
        replies = asyncio.run(say_all_and_close(model, 80))
    assert replies == [f"echo {i}" for i in range(80)]
    assert small.n_requests + large.n_requests == 88
    assert small.max_in_flight <= 2
    assert large.max_in_flight <= 6


def test_all_requests_are_answered_if_a_server_is_not_there() -> None:
    with LoopbackServer() as gone:
        pass
    with LoopbackServer(echo) as server:
        model = Spread([endpoint(gone.base_url, 4), endpoint(server.base_url, 4)])
        replies = asyncio.run(say_all_and_close(model, 40))
    assert replies == [f"echo {i}" for i in range(40)]
    assert server.n_served == 40


def test_all_requests_are_answered_if_a_server_fails_on_the_way() -> None:
    def fail_after_five(request: dict[str, Any]) -> Reply:
        return Reply(status=500) if failing.n_requests > 5 else echo(request)

    with LoopbackServer(fail_after_five) as failing, LoopbackServer(echo) as server:
        model = Spread([endpoint(failing.base_url, 4), endpoint(server.base_url, 4)])
        replies = asyncio.run(say_all_and_close(model, 40))
    assert replies == [f"echo {i}" for i in range(40)]
    assert (failing.n_served, server.n_served) == (5, 35)


async def test_each_failed_attempt_is_told_of_once() -> None:
    retries = Retries()
    with LoopbackServer(lambda request: Reply(status=503)) as server, LoopbackServer() as other:
        model = Spread([endpoint(server.base_url, 1), endpoint(other.base_url, 1)])
        await say(model, "a", retries)
        await model.aclose()
    assert [(reason, status) for reason, status, _ in retries] == [("server_error", 503)] * 2
    assert server.n_requests == 2


# Endpoints given as texts


def workflow(name: str | None = None) -> Workflow:
    agent = Agent(id="a", role="You answer.", model=ModelSettings(name=name))
    return Workflow(name="w", nodes=(agent,), edges=(), output="a")


def test_one_endpoint_takes_the_place_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    with LoopbackServer(echo) as server:
        model = default_model(workflow(), endpoints=[server.base_url])
        assert isinstance(model, Endpoint)
        assert model.identity(None).name == "loopback", "the only model that it serves"
        assert asyncio.run(say_all_and_close(model, 1)) == ["echo 0"]


def most_in_flight(n_requests: int, *ends: str, concurrency: int | None = None) -> list[int]:
    """Requests in flight at each of several servers, while all of them hold what they get."""
    counts = [0] * len(ends)
    everybody = threading.Event()

    def respond(position: int) -> Callable[[dict[str, Any]], Reply]:
        def count(request: dict[str, Any]) -> Reply:
            counts[position] += 1
            if sum(counts) == n_requests:
                everybody.set()
            return Reply(fault="hang")

        return count

    async def fill(model: ChatModel) -> None:
        calls = [asyncio.create_task(say(model)) for _ in range(2 * n_requests)]
        assert await asyncio.to_thread(everybody.wait, 10)
        # A request beyond the limits would have been sent by now.
        await asyncio.sleep(0)
        await cancelled(*calls)
        await model.aclose()

    with contextlib.ExitStack() as running:
        servers = [
            running.enter_context(LoopbackServer(respond(position)))
            for position in range(len(ends))
        ]
        texts = [server.base_url + end for server, end in zip(servers, ends, strict=True)]
        asyncio.run(fill(default_model(workflow("m"), endpoints=texts, concurrency=concurrency)))
    return counts


@pytest.mark.parametrize(
    ("ends", "concurrency", "places"),
    [
        (("", ""), None, [8, 8]),
        (("", ""), 2, [2, 2]),
        (("=3", ""), None, [3, 8]),
        (("=3", "=1"), 2, [3, 1]),
        (("=3",), 2, [3]),
        (("",), 2, [2]),
        (("",), None, [8]),
    ],
)
def test_requests_in_flight_are_those_stated_or_those_given_for_the_rest(
    ends: tuple[str, ...], concurrency: int | None, places: list[int]
) -> None:
    assert most_in_flight(sum(places), *ends, concurrency=concurrency) == places


def test_an_endpoint_of_the_environment_heeds_the_requests_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LoopbackServer(echo) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        model = default_model(workflow("m"), concurrency=2)
        asyncio.run(say_all_and_close(model, 12))
    assert server.max_in_flight <= 2


async def test_a_request_leaves_a_failing_server_sooner_where_there_is_another() -> None:
    failure = Reply(status=500, headers={"retry-after-ms": "0"})
    with LoopbackServer(lambda request: failure) as failing, LoopbackServer(echo) as other:
        both = default_model(workflow("m"), endpoints=[failing.base_url, other.base_url])
        assert await say(both, "a") == "echo a"
        assert failing.n_requests == 3
        alone = default_model(workflow("m"), endpoints=[failing.base_url])
        with pytest.raises(ModelError, match="5 attempts"):
            await say(alone, "a")
        await both.aclose()
        await alone.aclose()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://127.0.0.1:1/v1?key=a=b", "http://127.0.0.1:1/v1"),
        ("http://127.0.0.1:1/v1?key=7=12", "http://127.0.0.1:1/v1"),
        ("http://127.0.0.1:1/v1?key=abc=", "http://127.0.0.1:1/v1"),
        ("http://127.0.0.1:1=5", "http://127.0.0.1:1"),
        ("http://me:p=w@127.0.0.1:1/v1", "http://127.0.0.1:1/v1"),
        ("http://127.0.0.1:1/a=b/v1=16", "http://127.0.0.1:1/a=b/v1"),
    ],
)
def test_a_url_may_hold_equals_signs(text: str, shown: str) -> None:
    model = default_model(workflow("m"), endpoints=[text])
    assert repr(model) == f"Endpoint(model='m', base_url={shown!r})"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "''"),
        ("16", "'16'"),
        ("=16", "'=16'"),
        ("127.0.0.1:8000/v1=16", "'127.0.0.1:8000/v1=16'"),
        ("http:///v1", "'http:///v1'"),
        ("http://127.0.0.1/v1=0", "'http://127.0.0.1/v1=0'"),
        ("http://127.0.0.1/v1=1O", "'http://127.0.0.1/v1=1O'"),
        ("http://127.0.0.1/v1=-1", "'http://127.0.0.1/v1=-1'"),
        ("http://127.0.0.1/v1=", "'http://127.0.0.1/v1='"),
        ("http://127.0.0.1/v1=\u0663", "'http://127.0.0.1/v1=\u0663'"),
        ("http://me:s3cret@127.0.0.1/v1=0", "'...@127.0.0.1/v1=0'"),
        ("me:s3cret@127.0.0.1/v1", "'...@127.0.0.1/v1'"),
        ("http://127.0.0.1/v1?key=s3cret=0", "'http://127.0.0.1/v1?...'"),
    ],
)
def test_a_text_that_is_no_endpoint_is_named_with_the_form_expected(text: str, shown: str) -> None:
    with pytest.raises(SettingsError, match="neither URL nor URL=N") as caught:
        default_model(workflow(), endpoints=["http://127.0.0.1:1/v1", text])
    assert f"endpoint {shown} is" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_endpoints_that_serve_different_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["qwen", "llama"])
    monkeypatch.setattr("splice.models.default.only_model", lambda url, key: next(names))
    with pytest.raises(SettingsError, match=r"'qwen'.*'llama'"):
        default_model(workflow(), endpoints=["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"])


@pytest.mark.parametrize("concurrency", [0, -3])
def test_less_than_one_request_in_flight_is_refused(concurrency: int) -> None:
    with pytest.raises(SettingsError, match=f"at least 1, not {concurrency}"):
        default_model(workflow(), endpoints=["http://127.0.0.1:1/v1"], concurrency=concurrency)


def test_a_key_alone_still_means_the_servers_of_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    model = default_model(workflow())
    assert repr(model) == "Endpoint(model='gpt-4o-mini', base_url='https://api.openai.com/v1')"
