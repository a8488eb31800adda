"""A model that answers from a script: strict, public, for tests and demos."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from splice.errors import ScriptExhausted
from splice.models.protocol import OnRetry
from splice.records import Completion, ModelIdentity, Price, Request, Usage

Reply: TypeAlias = str | Completion | Exception
"""What a script holds: a text, a whole completion, or an error to raise."""

Responder: TypeAlias = Callable[[Request], Reply]


class ScriptedModel:
    """Replies given per node, in order, or computed from the request.

    Keyed by node, so that parallel nodes can't take each other's replies. A call with no node, such
    as the writing of a message, is scripted under its stage: `{"generate": [...]}`.

    >>> model = ScriptedModel({"writer": ["Doha"]})
    >>> model.requests
    []
    """

    def __init__(
        self,
        replies: Mapping[str, Sequence[Reply]] | Responder,
        *,
        name: str = "scripted",
        latency_s: float = 0.0,
        price: Price | None = None,
    ) -> None:
        """Keep the script.

        Args:
            replies: replies by node, each used once and in order; or a function of the request.
            name: the model's name in traces.
            latency_s: seconds that each call takes.
            price: what a call costs; None: unknown.
        """
        self._responder = replies if callable(replies) else None
        self._replies = {} if callable(replies) else {k: deque(v) for k, v in replies.items()}
        self._name = name
        self._latency_s = latency_s
        self._price = price
        self.requests: list[Request] = []
        """Every request that was made, in order of arrival."""

    async def complete(self, request: Request, on_retry: OnRetry) -> Completion:
        """Give the next reply for the node of `request`.

        Raises:
            ScriptExhausted: the script holds no further reply for it.
        """
        self.requests.append(request)
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        reply = self._responder(request) if self._responder else self._next(request)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Completion):
            return reply
        n_prompt = sum(len(message.content.split()) for message in request.messages)
        usage = Usage(prompt_tokens=n_prompt, completion_tokens=len(reply.split()))
        return Completion(text=reply, usage=usage, model=self._name)

    def _next(self, request: Request) -> Reply:
        place = request.node if request.node is not None else request.stage
        queue = self._replies.get(place)
        if not queue:
            raise ScriptExhausted(
                f"no reply left for {place!r}; the script has replies for "
                f"{', '.join(repr(name) for name in self._replies) or 'nothing'}",
                reason="script_exhausted",
            )
        return queue.popleft()

    def identity(self, name: str | None) -> ModelIdentity:
        """Scripted models differ by name alone."""
        return ModelIdentity(name=name or self._name, provider="scripted")

    def price(self, name: str | None) -> Price | None:
        """The price given at construction, for every name."""
        return self._price

    async def aclose(self) -> None:
        """Nothing to let go of."""
