"""Several servers of one model behind one name: each request goes to the least loaded of them.

A request waits here, not at a server, until a place is free somewhere. So none of the servers
idles while requests queue at another, and a full load divides as the places do.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from splice.errors import ModelError, SettingsError
from splice.models.limits import PerLoop
from splice.models.protocol import ChatModel, OnRetry
from splice.records import Completion, ModelIdentity, Price, Request

_OUT: Final = frozenset(
    {"connection", "timeout", "server_error", "rate_limit", "bad_response", "auth"}
)
"""Reasons of a `ModelError` after which a member rests.

They tell of the server, not of the request. `auth` is among them, though waiting does not mend a
key: a server that refuses every request at once always looks idle, and would draw most of the
load and fail it.
"""

_ELSEWHERE: Final = _OUT | {"not_found"}
"""Reasons after which another member is asked.

After `not_found` without a rest: it may tell of one name of a model, and of no other.
"""

_FIRST_REST_S: Final = 5.0
"""An endpoint fails after attempts of its own, which have taken some seconds already."""
_LONGEST_REST_S: Final = 60.0
"""A server that was started again is in use again within about a minute."""


@dataclass(slots=True, eq=False)
class _Member:
    """One model, and how it fares."""

    model: ChatModel
    n_places: int
    rest_s: float = 0.0
    """Length of the last rest; 0 if it answered since."""
    back_at: float = -math.inf
    """When the last rest ends, by the clock."""

    def rest(self, now: float) -> None:
        """Take no new requests for twice as long as the last time."""
        self.rest_s = min(max(2 * self.rest_s, _FIRST_REST_S), _LONGEST_REST_S)
        self.back_at = now + self.rest_s

    def recover(self) -> None:
        """Forget the failures: it has answered."""
        self.rest_s, self.back_at = 0.0, -math.inf


class Spread:
    """One chat model over several that serve the same.

    A member that fails as a server rests: it gets no new requests for 5 seconds, and after each
    further failure for twice as long as before, up to a minute. After a rest it gets one request
    at a time until it answers one. If all members that a request may go to rest, none does.
    """

    def __init__(
        self,
        members: Sequence[tuple[ChatModel, int]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Settle who serves.

        Args:
            members: models and their numbers of places: requests in flight at each, at least 1,
                in each event loop. For an `Endpoint` the concurrency of its limits.
            clock: seconds, from any origin.

        Raises:
            SettingsError: there is no member, one has no place, or two answer as different models.
        """
        if not members:
            raise SettingsError("a spread needs at least one model")
        for model, n_places in members:
            if n_places < 1:
                raise SettingsError(f"{model!r} needs at least 1 place, not {n_places!r}")
        for (model, _), (other, _) in combinations(members, 2):
            _check_same(model, other)
        self._members = tuple(_Member(model, n_places) for model, n_places in members)
        self._clock = clock
        self._desks = PerLoop(lambda: _Desk(self._members, clock))

    async def complete(self, request: Request, on_retry: OnRetry) -> Completion:
        """Answer by the least loaded member; if its server fails, by another one.

        Each member is asked once at most, with all the attempts that it makes of its own.

        Raises:
            ModelError: the last member asked gave no usable answer, and none is left or the
                reason would be the same at the others.
        """
        desk = self._desks.get()
        tried: frozenset[_Member] = frozenset()
        while True:
            async with desk.place(tried) as member:
                watch = _Watch(on_retry, self._clock)
                try:
                    completion = await member.model.complete(request, watch.on_retry)
                except ModelError as error:
                    if error.reason in _OUT:
                        desk.note_failure(member, watch.started)
                    tried |= {member}
                    if error.reason not in _ELSEWHERE or len(tried) == len(self._members):
                        raise
                    on_retry(error.reason, error.status, watch.elapsed_s())
                else:
                    member.recover()
                    return completion

    def identity(self, name: str | None) -> ModelIdentity:
        """What holds for all members; the digest only if all know it."""
        first, *others = [member.model.identity(name) for member in self._members]
        if any(other.digest != first.digest for other in others):
            return first.model_copy(update={"digest": None})
        return first

    def price(self, name: str | None) -> Price | None:
        """The price at every member; None if they differ."""
        first, *others = [member.model.price(name) for member in self._members]
        return first if all(other == first for other in others) else None

    async def aclose(self) -> None:
        """Close all members, also those after one that can't be closed."""
        async with AsyncExitStack() as closing:
            for member in self._members:
                closing.push_async_callback(member.model.aclose)


def _check_same(model: ChatModel, other: ChatModel) -> None:
    """Raise if two models can't be the same.

    Weights may be unknown at one of them. A version may not: extra fields of requests show in it.
    """
    one, two = model.identity(None), other.identity(None)
    is_unknown = one.digest is None or two.digest is None
    if one != two.model_copy(update={"digest": one.digest} if is_unknown else {}):
        raise SettingsError(
            f"one model name can't stand for different models: {model!r} answers as ({one}), "
            f"{other!r} as ({two})"
        )


class _Desk:
    """Hands out the members' places in one event loop."""

    def __init__(self, members: Sequence[_Member], clock: Callable[[], float]) -> None:
        self._members = members
        self._clock = clock
        self._n_in_flight = dict.fromkeys(members, 0)
        self._queues: dict[frozenset[_Member], deque[asyncio.Future[_Member]]] = {}
        """Who waits, by the members that need not be offered to them."""

    @asynccontextmanager
    async def place(self, tried: frozenset[_Member]) -> AsyncIterator[_Member]:
        """Wait for a place at a member that was not tried, and hold it while the block runs."""
        member = await self._wait(tried)
        try:
            yield member
        finally:
            self._free(member)

    def note_failure(self, member: _Member, started: float) -> None:
        """Let a member rest whose server failed a request that was sent to it at `started`."""
        # Many requests in flight fail of one fault. Those sent before the last rest tell nothing
        # new, and each would double it.
        if started >= member.back_at:
            member.rest(self._clock())
            asyncio.get_running_loop().call_later(member.rest_s, self._hand_out)

    async def _wait(self, tried: frozenset[_Member]) -> _Member:
        turn: asyncio.Future[_Member] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tried, deque()).append(turn)
        self._hand_out()
        try:
            return await turn
        except asyncio.CancelledError:
            # A place may have been handed out already that nobody is left to take.
            if not turn.cancelled():
                self._free(turn.result())
            raise

    def _free(self, member: _Member) -> None:
        self._n_in_flight[member] -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Fill free places, first with requests that failed elsewhere, then as they came."""
        for tried in sorted(self._queues, key=len, reverse=True):
            queue = self._queues[tried]
            while queue and (member := self._least_loaded(tried)) is not None:
                turn = queue.popleft()
                if not turn.done():
                    self._n_in_flight[member] += 1
                    turn.set_result(member)

    def _least_loaded(self, tried: frozenset[_Member]) -> _Member | None:
        """The member with the largest share of its places free; None if there is no free place."""
        now = self._clock()
        untried = [member for member in self._members if member not in tried]
        n_places = {
            # After a rest, one request finds out for all whether the server is back.
            member: 1 if member.rest_s else member.n_places
            for member in untried
            if member.back_at <= now
        } or {member: member.n_places for member in untried}
        loads = {member: self._n_in_flight[member] / n for member, n in n_places.items()}
        least = min(loads, key=loads.__getitem__)
        return least if loads[least] < 1 else None


class _Watch:
    """Passes on what a member tells of its attempts, and times the one that runs."""

    def __init__(self, on_retry: OnRetry, clock: Callable[[], float]) -> None:
        self._on_retry = on_retry
        self._clock = clock
        self.started = self._latest = clock()

    def on_retry(self, reason: str, status: int | None, elapsed_s: float) -> None:
        self._latest = self._clock()
        self._on_retry(reason, status, elapsed_s)

    def elapsed_s(self) -> float:
        """Seconds since the last failed attempt that the member told of, or since the first."""
        return self._clock() - self._latest
