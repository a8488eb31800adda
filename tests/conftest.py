"""What holds for every test: no name is resolved, and nothing is read from the user's settings."""

import os
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# The same examples on every machine; `--hypothesis-profile=default` looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches out fails at the call, not on a slow day."""

    resolve = socket.getaddrinfo

    def refuse(host: object, *rest: object, **named: object) -> object:
        if host in ("127.0.0.1", b"127.0.0.1"):
            return resolve(host, *rest, **named)
        raise AssertionError(f"a test tried to reach {host!r}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, endpoints and proxies of whoever runs the tests have no say in them."""
    for name in list(os.environ):
        if name.startswith("OPENAI_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
