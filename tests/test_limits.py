import asyncio
import gc
import heapq
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from splice.models.limits import Limiter, Limits, PerLoop

T = TypeVar("T")


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock leaps to the next timer, so that waiting takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        timers = [timer for timer in self._scheduled if not timer.cancelled()]
        if not self._ready and timers:
            # The extra bit gets past timers that rounding puts just ahead of the clock.
            self.now = max(self.now, heapq.nsmallest(1, timers)[0].when()) + 1e-6
        super()._run_once()


def leap(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        return runner.run(main)


async def starts(limiter: Limiter, sizes: list[int], held_s: float = 0.0) -> list[float]:
    """Loop time at which an attempt of each size was let go."""
    loop = asyncio.get_running_loop()
    times = [0.0] * len(sizes)

    async def attempt(position: int, size: int) -> None:
        async with limiter.slot(size):
            times[position] = loop.time()
            await asyncio.sleep(held_s)

    await asyncio.gather(*(attempt(i, size) for i, size in enumerate(sizes)))
    return times


@pytest.mark.parametrize("name", ["concurrency", "requests_per_minute", "tokens_per_minute"])
def test_a_limit_is_at_least_one(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        Limits(**{name: 0})


def test_no_more_attempts_run_at_once_than_the_limit_allows() -> None:
    limiter = Limiter(Limits(concurrency=2))
    assert leap(starts(limiter, [1] * 6, held_s=10.0)) == pytest.approx(
        [0, 0, 10, 10, 20, 20], abs=0.01
    )


def test_requests_beyond_the_minutes_worth_are_spaced_evenly() -> None:
    limiter = Limiter(Limits(concurrency=100, requests_per_minute=6))
    times = leap(starts(limiter, [1] * 9))
    assert times == pytest.approx([0.0] * 6 + [10.0, 20.0, 30.0], abs=0.01)


def test_tokens_beyond_the_minutes_worth_wait() -> None:
    limiter = Limiter(Limits(concurrency=100, tokens_per_minute=600))
    times = leap(starts(limiter, [400, 400, 100]))
    assert times == pytest.approx([0.0, 20.0, 30.0], abs=0.01)


def test_an_attempt_larger_than_the_minutes_worth_takes_the_whole_minute() -> None:
    limiter = Limiter(Limits(tokens_per_minute=100))
    assert leap(starts(limiter, [10_000, 10_000, 10_000])) == pytest.approx(
        [0.0, 60.0, 120.0], abs=0.01
    )


def test_a_large_attempt_is_not_overtaken_for_ever_by_small_ones() -> None:
    limiter = Limiter(Limits(concurrency=1000, tokens_per_minute=100))
    times = leap(starts(limiter, [100, 100] + [10] * 50))
    assert times[1] == pytest.approx(60.0, abs=0.01)
    assert min(times[2:]) > times[1]


def test_an_attempt_without_tokens_passes() -> None:
    assert leap(starts(Limiter(Limits(tokens_per_minute=1)), [0, -5])) == [0.0, 0.0]


def test_a_failed_attempt_gives_its_place_back() -> None:
    limiter = Limiter(Limits(concurrency=1))

    async def main() -> None:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                async with limiter.slot(1):
                    raise ZeroDivisionError
        async with limiter.slot(1):
            pass

    leap(asyncio.wait_for(main(), 1.0))


def test_a_cancelled_attempt_gives_its_place_and_its_turn_back() -> None:
    limiter = Limiter(Limits(concurrency=2, requests_per_minute=1))

    async def hold() -> None:
        async with limiter.slot(1):
            await asyncio.sleep(1000)

    async def main() -> float:
        holder, waiter = asyncio.create_task(hold()), asyncio.create_task(hold())
        await asyncio.sleep(1)
        holder.cancel()
        waiter.cancel()
        await asyncio.gather(holder, waiter, return_exceptions=True)
        async with limiter.slot(1):
            return asyncio.get_running_loop().time()

    assert leap(main()) == pytest.approx(60.0, abs=0.01)


def test_one_limiter_serves_one_event_loop_after_the_other() -> None:
    limiter = Limiter(Limits(concurrency=2, requests_per_minute=4, tokens_per_minute=100))
    first = leap(starts(limiter, [10] * 6, held_s=1.0))
    assert leap(starts(limiter, [10] * 6, held_s=1.0)) == first


def test_per_loop_makes_one_value_for_each_loop() -> None:
    values = PerLoop(object)

    async def twice() -> tuple[object, object]:
        return values.get(), values.get()

    first, again = asyncio.run(twice())
    other, _ = asyncio.run(twice())
    assert first is again
    assert first is not other


def test_per_loop_lets_go_of_closed_loops() -> None:
    class Bound:
        def __init__(self) -> None:
            self.loop = asyncio.get_running_loop()

    values = PerLoop(Bound)

    async def loop() -> weakref.ref[asyncio.AbstractEventLoop]:
        return weakref.ref(values.get().loop)

    references = [asyncio.run(loop()) for _ in range(4)]
    gc.collect()
    assert [reference() is None for reference in references] == [True, True, True, False]


def test_per_loop_gives_a_new_value_after_the_old_one_was_taken_away() -> None:
    values = PerLoop(object)

    async def main() -> None:
        assert values.pop() is None
        first = values.get()
        assert values.pop() is first
        assert values.get() is not first

    asyncio.run(main())


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 500), min_size=1, max_size=20),
    concurrency=st.integers(1, 5),
    requests=st.integers(1, 10) | st.none(),
    tokens=st.integers(1, 300) | st.none(),
)
def test_no_attempt_waits_for_ever_and_none_overtakes_another(
    sizes: list[int], concurrency: int, requests: int | None, tokens: int | None
) -> None:
    limiter = Limiter(
        Limits(concurrency=concurrency, requests_per_minute=requests, tokens_per_minute=tokens)
    )
    times = leap(asyncio.wait_for(starts(limiter, sizes, held_s=0.5), 10_000))
    assert times == sorted(times)
    if tokens is not None:
        granted = sum(min(size, tokens) for size in sizes)
        assert granted <= tokens * (1 + times[-1] / 60.0) + 1e-3
    if requests is not None:
        assert len(sizes) <= requests * (1 + times[-1] / 60.0) + 1e-3
