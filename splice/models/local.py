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

_HEADER_BYTES = 24
"""Magic, version and two counts, with which every GGUF file begins."""
_TIMEOUT_S = 600.0
"""For one reply. A long one of the larger model takes minutes on a busy machine."""


class Server(NamedTuple):
    """A running server; it stops when the last reference to `handle` is gone."""

    base_url: str
    api_key: str
    handle: Any


class _Loaded(NamedTuple):
    """What a server has loaded."""

    file: Path
    adapter: str | None
    """SHA-256 of the adapter; None: there is none."""


_servers: dict[tuple[_Loaded, int, int], Server] = {}
"""Running servers by what they have loaded, threads and context."""
_lock = threading.Lock()
# llama.cpp's threads must end before the interpreter is taken apart around them.
atexit.register(_servers.clear)


class LocalModel:
    """A GGUF model that runs in this process, on the CPU, and costs nothing.

    The weights are loaded at the first request, which stops the whole process for some seconds.
    Objects with the same files, threads and context share one server.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        path: Path | None = None,
        adapter: Path | None = None,
        threads: int = 1,
        context: int = 4096,
    ) -> None:
        """Choose the weights and check that they can be used.

        Args:
            name: one of `splice.models.weights.known()`, by name or alias; with `path`, any name to
                call the model by. None: the file that the environment variable
                `SPLICE_LOCAL_MODEL` names, else the default model. `NAME+FILE` names an adapter
                too, and `+FILE` one for what None would choose.
            path: a GGUF file of one's own.
            adapter: a LoRA adapter for these weights as a GGUF file, such as `splice selector pack`
                writes. With it the model is called `name+stem`, after both files.
            threads: llama.cpp's threads. More than one is slower as soon as anything else keeps the
                machine busy, since its threads wait for each other at every step.
            context: most tokens of prompt and reply together.

        Raises:
            SettingsError: the extra `local` is not installed, the name is unknown, or a number is
                below 1.
            WeightsError: the weights are not here, or a file is no GGUF file.
        """
        if threads < 1 or context < 1:
            raise SettingsError(
                f"threads and context must be at least 1, not {threads} and {context}"
            )
        if adapter is None and path is None:
            name, adapter = split_name(name)
        self._file, self._names = choose(name, path)
        self._adapter = None if adapter is None else adapter.expanduser()
        self._threads = threads
        self._context = context
        digests = [weights.sha256_of(self._file)]
        self._loaded = _Loaded(self._file.resolve(), None)
        if self._adapter is not None:
            _check_gguf(self._adapter)
            digests.append(weights.sha256_of(self._adapter))
            self._names = tuple(f"{known}+{self._adapter.stem}" for known in self._names)
            self._loaded = self._loaded._replace(adapter=digests[-1])
        self._identity = ModelIdentity(
            name=self._names[0],
            provider="local",
            digest="+".join(digests),
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
        """Name, SHA-256 of the weights (and of an adapter) and version of the software.

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
        """Make a client of the server for these files, which is started if none is running."""
        from splice.models.endpoint import Endpoint
        from splice.models.limits import Limits

        key = (self._loaded, self._threads, self._context)
        with _lock:
            if key not in _servers:
                _servers[key] = start_server(
                    self._file,
                    name=self._names[0],
                    threads=self._threads,
                    context=self._context,
                    adapter=self._adapter,
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


def split_name(name: str | None) -> tuple[str | None, Path | None]:
    """The two parts of `NAME+FILE`: a model, None for the default, and its adapter.

    >>> split_name("smollm2-135m+./adapter.gguf")
    ('smollm2-135m', PosixPath('adapter.gguf'))
    >>> split_name("smollm2-135m")
    ('smollm2-135m', None)

    Raises:
        SettingsError: there is no file after the `+`.
    """
    known, plus, file = (name or "").partition("+")
    if not plus:
        return name, None
    if not file:
        raise SettingsError(f"model {name!r}: no adapter after the +, such as {known}+adapter.gguf")
    return known or None, Path(file)


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
        _check_gguf(path)
        return path, (name or path.stem,)
    known = weights.find(name or weights.DEFAULT_NAME)
    if not weights.is_present(known.name):
        raise WeightsError(
            f"the weights of {known.name} are not in {weights.cache_folder()}; "
            f"`splice models pull {known.name}` fetches them ({known.n_bytes / 1e6:,.0f} MB)"
        )
    return weights.path_of(known.name), (known.name, known.alias)


def start_server(
    path: Path,
    *,
    name: str,
    threads: int,
    context: int,
    port: int = 0,
    adapter: Path | None = None,
) -> Server:
    """Start an OpenAI-compatible server of one slot on 127.0.0.1, and wait until it is ready.

    Args:
        path: a GGUF file.
        name: what the server calls the model.
        threads: llama.cpp's threads.
        context: most tokens of prompt and reply together.
        port: 0: any free one.
        adapter: a GGUF file of a LoRA adapter for the model.

    Raises:
        SettingsError: llama.cpp does not start with these.
    """
    import xllamacpp

    api_key = secrets.token_urlsafe()
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.model_alias = {name}
    if adapter is not None:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
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
            f"llama.cpp can't serve {path}{f' with {adapter}' if adapter else ''} with a context "
            f"of {context} tokens{f' on port {port}' if port else ''}: "
            f"{'the adapter is for another model, ' if adapter else ''}"
            "a file is damaged or of an unknown kind, memory is short, or the port is taken"
        ) from error
    return Server(f"{handle.listening_address}/v1", api_key, handle)


def _check_gguf(path: Path) -> None:
    """Refuse what can't be weights before llama.cpp reads it."""
    try:
        # Of a pipe not even the first bytes may come.
        if path.exists() and not path.is_file():
            raise WeightsError(f"{path} is no GGUF file: it is no file")
        with path.open("rb") as file:
            start = file.read(_HEADER_BYTES)
    except OSError as error:
        raise WeightsError(f"can't read the weights {path}: {error}") from error
    if not start.startswith(b"GGUF"):
        raise WeightsError(f"{path} is no GGUF file")
    if len(start) < _HEADER_BYTES:
        raise WeightsError(f"{path} is cut short: it has {len(start)} bytes")
