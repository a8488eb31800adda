"""Budgets: what a run may spend, reserved before each call and committed after it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from splice.errors import BudgetExceeded
from splice.records import CallRecord, Price, Record, Request, Usage

_MESSAGE_TOKENS = 16
"""Tokens that a chat template puts around one message, at most (measured on common templates)."""


class Budget(Record):
    """What may be spent; None: no limit."""

    max_calls: Annotated[int, Field(ge=0)] | None = None
    """Model calls, each counted once however often the client had to try."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Prompt and completion tokens together."""
    max_cost: Annotated[float, Field(ge=0)] | None = None
    """In the unit of the price table."""

    @property
    def is_unlimited(self) -> bool:
        """Whether nothing is limited."""
        return self.max_calls is None and self.max_tokens is None and self.max_cost is None


def most_tokens(request: Request) -> Usage:
    """The most tokens that one request can use.

    A byte-level tokenizer makes at most one token of each byte, so the UTF-8 length bounds the
    prompt; `max_tokens` bounds the reply. Being an upper bound, it keeps a cap a cap.
    """
    texts = [message.content for message in request.messages]
    for message in request.messages:
        texts += [part for asked in message.tool_requests for part in (asked.name, asked.arguments)]
    texts += [tool.model_dump_json() for tool in request.tools]
    if request.response_schema is not None:
        texts.append(json.dumps(dict(request.response_schema)))
    n_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return Usage(
        prompt_tokens=n_bytes + _MESSAGE_TOKENS * len(request.messages),
        completion_tokens=request.settings.max_tokens,
    )


@dataclass(slots=True)
class _Amount:
    calls: int = 0
    tokens: int = 0
    cost: float = 0.0


class Account:
    """Spending against one budget, shared by everything that runs under it.

    A call that fits only if calls in flight turn out cheaper than reserved waits for them; one that
    doesn't fit even then is refused. Belongs to one event loop.
    """

    def __init__(self, budget: Budget) -> None:
        """Open an account with nothing spent."""
        self.budget = budget
        self._spent = _Amount()
        self._reserved = _Amount()
        self._waiting: list[asyncio.Future[None]] = []

    async def reserve(self, tokens: int, cost: float | None) -> _Amount:
        """Set aside what one call may cost at most.

        Args:
            tokens: most tokens of the call.
            cost: most money of the call; None if the price is unknown, which a budget in money
                refuses.

        Raises:
            BudgetExceeded: the call does not fit into what is left.
        """
        if self.budget.max_cost is not None and cost is None:
            raise BudgetExceeded("the budget is in money and the model's price is unknown")
        amount = _Amount(1, tokens, cost or 0.0)
        while (short := self._short(amount, self._reserved)) is not None:
            if self._short(amount, _Amount()) is not None:
                raise BudgetExceeded(f"budget of {short} is used up")
            settled = asyncio.get_running_loop().create_future()
            self._waiting.append(settled)
            await settled
        _add(self._reserved, amount)
        return amount

    def settle(self, amount: _Amount, calls: tuple[CallRecord, ...]) -> None:
        """Replace a reservation by what was really spent.

        A call counts once however often it was tried, and not at all if a cache answered it. Where
        the server did not say what a successful call used, the reserved amount is booked: a cap
        must hold even then.
        """
        _add(self._reserved, amount, sign=-1)
        if not self._reserved.calls:
            self._reserved = _Amount()  # what rounding left of the money
        self._spent.calls += any(call.outcome != "cached" for call in calls)
        for call in calls:
            if call.outcome == "ok":
                counted = call.usage.prompt_tokens, call.usage.completion_tokens
                known = [n for n in counted if n is not None]
                self._spent.tokens += sum(known) if len(known) == 2 else amount.tokens
                self._spent.cost += amount.cost if call.cost is None else call.cost
        for settled in self._waiting:
            if not settled.done():
                settled.set_result(None)
        self._waiting.clear()

    def _short(self, amount: _Amount, reserved: _Amount) -> str | None:
        """Which limit `amount` would break beside what is spent and `reserved`."""
        limits = self.budget
        if (
            limits.max_calls is not None
            and self._spent.calls + reserved.calls + amount.calls > limits.max_calls
        ):
            return f"{limits.max_calls} calls"
        if (
            limits.max_tokens is not None
            and self._spent.tokens + reserved.tokens + amount.tokens > limits.max_tokens
        ):
            return f"{limits.max_tokens} tokens"
        if (
            limits.max_cost is not None
            and self._spent.cost + reserved.cost + amount.cost > limits.max_cost
        ):
            return f"{limits.max_cost} in money"
        return None


def open_account(budget: Budget) -> Account | None:
    """An account over `budget`; None if there is nothing to limit."""
    return None if budget.is_unlimited else Account(budget)


def _add(to: _Amount, amount: _Amount, sign: int = 1) -> None:
    to.calls += sign * amount.calls
    to.tokens += sign * amount.tokens
    to.cost += sign * amount.cost


class Spending(Record):
    """What a set of calls used."""

    n_calls: int = 0
    """Attempts that were sent: cached calls are not."""
    n_failed: int = 0
    """Attempts of these that gave nothing."""
    n_cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    n_uncounted: int = 0
    """Successful calls for which the server gave no token counts."""
    cost: float | None = 0.0
    """None: the price of at least one call is unknown."""

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens


def spending(calls: tuple[CallRecord, ...]) -> Spending:
    """Add up calls. Attempts that failed are counted, their tokens are unknown and left out."""
    ok = [call for call in calls if call.outcome == "ok"]
    return Spending(
        n_calls=sum(call.outcome != "cached" for call in calls),
        n_failed=sum(call.outcome in ("retried", "failed", "aborted") for call in calls),
        n_cached=sum(call.outcome == "cached" for call in calls),
        prompt_tokens=sum(call.usage.prompt_tokens or 0 for call in ok),
        completion_tokens=sum(call.usage.completion_tokens or 0 for call in ok),
        cached_tokens=sum(call.usage.cached_tokens or 0 for call in ok),
        reasoning_tokens=sum(call.usage.reasoning_tokens or 0 for call in ok),
        n_uncounted=sum(
            call.usage.prompt_tokens is None or call.usage.completion_tokens is None for call in ok
        ),
        cost=total_cost(call.cost for call in ok),
    )


def total_cost(costs: Iterable[float | None]) -> float | None:
    """Costs added up; None if one of them is unknown."""
    total = 0.0
    for cost in costs:
        if cost is None:
            return None
        total += cost
    return total


def most_cost(usage: Usage, price: Price | None) -> float | None:
    """Money that `usage` costs if nothing of it is cached; None if the price is unknown."""
    if price is None:
        return None
    prompt, completion = usage.prompt_tokens or 0, usage.completion_tokens or 0
    return (prompt * price.prompt + completion * price.completion) / 1_000_000
