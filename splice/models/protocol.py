"""The seam between the engine and whatever answers chat requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

from splice.records import Completion, ModelIdentity, Price, Request, Usage

OnRetry: TypeAlias = Callable[[str, int | None, float], None]
"""Called as `on_retry(reason, status, elapsed_s)` for each failed attempt that another follows."""


@runtime_checkable
class ChatModel(Protocol):
    """Anything that can answer a chat request."""

    async def complete(self, request: Request, on_retry: OnRetry) -> Completion:
        """Answer one request.

        Args:
            request: what to send; `request.settings.name` is None for the model's own default.
            on_retry: told of each failed attempt that is repeated, so that none is missing from
                the ledger. A model that never repeats ignores it.

        Raises:
            ModelError: no usable answer after the client's own retries. The engine records the
                node as failed.
        """
        ...

    def identity(self, name: str | None) -> ModelIdentity:
        """Say what answers requests for the model `name` (None: the default)."""
        ...

    def price(self, name: str | None) -> Price | None:
        """Price of the model `name`; None if it is not known."""
        ...

    async def aclose(self) -> None:
        """Let go of connections of the running event loop; the model can be used again."""
        ...


def cost(usage: Usage, price: Price | None) -> float | None:
    """Money for one call; None if the price or a token count is unknown.

    Cached tokens are part of the prompt tokens and reasoning tokens part of the completion tokens,
    so neither is charged twice.
    """
    if price is None or usage.prompt_tokens is None or usage.completion_tokens is None:
        return None
    cached = usage.cached_tokens or 0
    cached_price = price.prompt if price.cached is None else price.cached
    money = (
        (usage.prompt_tokens - cached) * price.prompt
        + cached * cached_price
        + usage.completion_tokens * price.completion
    )
    return money / 1_000_000
