"""The embedded local model: llama.cpp inside this process, spoken to like any other endpoint.

Greedy replies of llama.cpp depend on what shares a batch and on what a cache holds. So there is one
slot, no prompt cache, and one request at a time: the same request gives the same bytes, alone or
among others, today or in another process.
"""

from __future__ import annotations

import atexit
import secrets
import threading
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from splice.errors import SettingsError, WeightsError
from splice.models import weights
from splice.models.protocol import OnRetry
from splice.records import Completion, ModelIdentity, Price, Request

if TYPE_CHECKING:
    from splice.models.endpoint import Endpoint

_TIMEOUT_S = 600.0
"""For one reply. A long one of the larger model takes minutes on a busy machine."""


class Server(NamedTuple):
    """A running server; it stops when the last reference to `handle` is gone."""

    base_url: str
    api_key: str
    handle: Any


_servers: dict[tuple[Path, int, int], Server] = {}
"""Running servers by file, threads and context."""
_lock = threading.Lock()
# llama.cpp's threads must end before the interpreter is taken apart around them.
atexit.register(_servers.clear)


class LocalModel:
    """A GGUF model that runs in this process, on the CPU, and costs nothing.

    The weights are loaded at the first request, which stops the whole process for some seconds.
    Objects with the same file, threads and context share one server.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        path: Path | None = None,
        threads: int = 1,
        context: int = 4096,
    ) -> None:
        """Choose the weights and check that they can be used.

        Args:
            name: one of `splice.models.weights.known()`, by name or alias; with `path`, any name to
                call the model by. None: the file that the environment variable
                `SPLICE_LOCAL_MODEL` names, else the default model.
            path: a GGUF file of one's own.
            threads: llama.cpp's threads. More than one is slower as soon as anything else keeps the
                machine busy, since its threads wait for each other at every step.
            context: most tokens of prompt and reply together.

        Raises:
            SettingsError: the extra `local` is not installed, the name is unknown, or a number is
                below 1.
            WeightsError: the weights are not here, or the file is no GGUF file.
        """
        if threads < 1 or context < 1:
            raise SettingsError(
                f"threads and context must be at least 1, not {threads} and {context}"
            )
        self._file, self._names = choose(name, path)
        self._threads = threads
        self._context = context
        self._identity = ModelIdentity(
            name=self._names[0],
            provider="local",
            digest=weights.sha256_of(self._file),
            version=f"xllamacpp {version('xllamacpp')}",
        )
        self._client: Endpoint | None = None

    async def complete(self, request: Request, on_retry: OnRetry) -> Completion:
        """Answer one request; the first one starts the server.

        Raises:
            SettingsError: the request is for another model, or llama.cpp can't load this one.
            ModelError: no usable answer, as when the request exceeds the context.
        """
        self._check_name(request.settings.name)
        if self._client is None:
            self._client = self._connect()
        # A server is shared by file, so it may know the model by another name.
        settings = request.settings.model_copy(update={"name": None})
        completion = await self._client.complete(
            request.model_copy(update={"settings": settings}), on_retry
        )
        return completion.model_copy(update={"model": self._names[0]})

    def identity(self, name: str | None) -> ModelIdentity:
        """Name, SHA-256 of the weights and version of the software.

        Raises:
            SettingsError: `name` is another model.
        """
        self._check_name(name)
        return self._identity

    def price(self, name: str | None) -> Price | None:
        """Nothing.

        Raises:
            SettingsError: `name` is another model.
        """
        self._check_name(name)
        return Price(prompt=0.0, completion=0.0)

    async def aclose(self) -> None:
        """Let go of connections of the running event loop; the server stays for others."""
        if self._client is not None:
            await self._client.aclose()

    def _check_name(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise SettingsError(
                f"model {name!r} was asked for, but the local model {self._names[0]!r} runs; "
                "leave out the name of the model, or use an endpoint that has it"
            )

    def _connect(self) -> Endpoint:
        """Make a client of the server for this file, which is started if none is running."""
        from splice.models.endpoint import Endpoint
        from splice.models.limits import Limits

        key = (self._file.resolve(), self._threads, self._context)
        with _lock:
            if key not in _servers:
                _servers[key] = start_server(
                    self._file, name=self._names[0], threads=self._threads, context=self._context
                )
            server = _servers[key]
        return Endpoint(
            base_url=server.base_url,
            api_key=server.api_key,
            model=self._names[0],
            # One at a time also here, so that waiting for the slot is no part of the timeout.
            limits=Limits(concurrency=1),
            timeout_s=_TIMEOUT_S,
            max_attempts=2,
            identity=self._identity,
            extra_body={"cache_prompt": False},
        )


def choose(name: str | None, path: Path | None = None) -> tuple[Path, tuple[str, ...]]:
    """Find the file to run, and the names that it answers to, its own first.

    The arguments are those of `LocalModel`.

    Raises:
        SettingsError: the extra `local` is not installed, or the name is unknown.
        WeightsError: the weights are not here, or the file is no GGUF file.
    """
    if find_spec("xllamacpp") is None:
        raise SettingsError(
            "the embedded local model needs xllamacpp: pip install 'splice-repair[local]'"
        )
    if path is None and name is None:
        path = weights.own_file()
    if path is not None:
        path = path.expanduser()
        _check_magic(path)
        return path, (name or path.stem,)
    known = weights.find(name or weights.DEFAULT_NAME)
    if not weights.is_present(known.name):
        raise WeightsError(
            f"the weights of {known.name} are not in {weights.cache_folder()}; "
            f"`splice models pull {known.name}` fetches them ({known.n_bytes / 1e6:,.0f} MB)"
        )
    return weights.path_of(known.name), (known.name, known.alias)


def start_server(path: Path, *, name: str, threads: int, context: int, port: int = 0) -> Server:
    """Start an OpenAI-compatible server of one slot on 127.0.0.1, and wait until it is ready.

    Args:
        path: a GGUF file.
        name: what the server calls the model.
        threads: llama.cpp's threads.
        context: most tokens of prompt and reply together.
        port: 0: any free one.

    Raises:
        SettingsError: llama.cpp does not start with these.
    """
    import xllamacpp

    api_key = secrets.token_urlsafe()
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.model_alias = {name}
    params.n_parallel = 1
    params.n_ctx = context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.api_keys = [api_key]
    params.ui = False
    params.endpoint_slots = False
    # By default any web page that the user visits may talk to the server.
    params.cors_origins = ""
    params.cors_credentials = False
    # Standard output belongs to the caller's data.
    params.verbosity = 0
    try:
        handle = xllamacpp.Server(params)
    except RuntimeError as error:
        raise SettingsError(
            f"llama.cpp can't serve {path} with a context of {context} tokens"
            f"{f' on port {port}' if port else ''}: the file is damaged or of an unknown kind, "
            "memory is short, or the port is taken"
        ) from error
    return Server(f"{handle.listening_address}/v1", api_key, handle)


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise WeightsError(f"can't read the weights {path}: {error}") from error
    if magic != b"GGUF":
        raise WeightsError(f"{path} is no GGUF file")
