"""How fast one endpoint may be asked: calls at once, requests and tokens per minute."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Generic, TypeVar
from weakref import WeakKeyDictionary

from aiolimiter import AsyncLimiter
from pydantic import Field

from splice.records import Record

T = TypeVar("T")

AtLeastOne = Annotated[int, Field(ge=1)]


class Limits(Record):
    """What one endpoint allows."""

    concurrency: AtLeastOne = 8
    """Attempts in flight at once. Small servers on one machine rarely serve more in parallel."""
    requests_per_minute: AtLeastOne | None = None
    """Attempts per minute: up to so many at once, then evenly spaced. None: no limit."""
    tokens_per_minute: AtLeastOne | None = None
    """Tokens per minute, by the caller's estimate of each attempt. None: no limit."""


class PerLoop(Generic[T]):
    """One value for each event loop, made when a loop first asks for it.

    What asyncio hands out belongs to the loop it was first used in, while models outlive loops:
    each `asyncio.run` brings a new one.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        """Keep the function that makes a loop's value."""
        self._make = make
        self._values: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def get(self) -> T:
        """Value of the running loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            value = self._values.get(loop)
            if value is None:
                self._forget_closed()
                value = self._values[loop] = self._make()
            return value

    def pop(self) -> T | None:
        """Take the running loop's value away; None if there is none."""
        with self._lock:
            return self._values.pop(asyncio.get_running_loop(), None)

    def _forget_closed(self) -> None:
        # Values refer to their loop, which keeps its weak key alive for as long as they are here.
        for loop in list(self._values):
            if loop.is_closed():
                del self._values[loop]


class _Gate:
    """The limits at work in one event loop."""

    def __init__(self, limits: Limits) -> None:
        self.places = asyncio.Semaphore(limits.concurrency)
        self.turn = asyncio.Lock()
        self.requests = _per_minute(limits.requests_per_minute)
        self.tokens = _per_minute(limits.tokens_per_minute)


def _per_minute(amount: int | None) -> AsyncLimiter | None:
    return None if amount is None else AsyncLimiter(amount, time_period=60.0)


class Limiter:
    """Holds attempts back until the limits allow them. Each event loop starts anew."""

    def __init__(self, limits: Limits) -> None:
        """Keep the limits."""
        self._gates = PerLoop(lambda: _Gate(limits))

    @asynccontextmanager
    async def slot(self, n_tokens: int) -> AsyncIterator[None]:
        """Wait for room for one attempt, and hold its place while the block runs.

        Args:
            n_tokens: estimate of the attempt's tokens, prompt and completion. An attempt larger
                than the limit per minute counts as one that takes the whole minute.
        """
        gate = self._gates.get()
        async with gate.places:
            # One at a time, first come first served: left to itself, the limiter lets small
            # amounts pass before large ones, and a long prompt could wait forever.
            async with gate.turn:
                if gate.requests is not None:
                    await gate.requests.acquire()
                if gate.tokens is not None:
                    await gate.tokens.acquire(min(max(n_tokens, 0), gate.tokens.max_rate))
            yield
