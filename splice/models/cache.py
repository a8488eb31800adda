"""A response cache, and record and replay, around another model."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal, TypeAlias
from weakref import WeakValueDictionary

from splice.errors import ModelError, SettingsError, StoreError
from splice.models.limits import PerLoop
from splice.models.protocol import ChatModel, OnRetry
from splice.records import Completion, ModelIdentity, Price, Request

Mode: TypeAlias = Literal["cache", "record", "replay"]
"""`cache`: ask only for what is not stored. `record`: always ask, and store. `replay`: never ask."""

_KEY_VERSION: Final = 1
"""Part of every key. Raised when a request is put to models in another form than before."""

_FILE_VERSION: Final = 1

_TABLES: Final = f"""
    BEGIN IMMEDIATE;
    CREATE TABLE IF NOT EXISTS completions (key TEXT PRIMARY KEY, completion TEXT NOT NULL)
        WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS identities (
        position INTEGER PRIMARY KEY, name TEXT NOT NULL, identity TEXT NOT NULL,
        UNIQUE (name, identity)
    );
    PRAGMA user_version = {_FILE_VERSION};
    COMMIT;
"""


class CachedModel:
    """Answers requests it has seen before from a file, and asks another model for the rest.

    A request is known by what the model sees of it: who answers, messages, tools, reply schema,
    sampling parameters and rollout. It is not known by its stage, its node or its query.
    """

    def __init__(
        self, inner: ChatModel | None, path: Path | str | None = None, mode: Mode = "cache"
    ) -> None:
        """Open the store.

        Args:
            inner: the model that is asked; in mode `replay` it says only who would answer, and
                None takes the file's word for it.
            path: the SQLite file, made if need be; None: in memory.
            mode: when to ask, and when to store.

        Raises:
            SettingsError: a model to ask, or a file to replay, is missing.
            StoreError: the file can't be used; in mode `replay` also if there is none.
        """
        if mode == "replay" and path is None:
            raise SettingsError("replay needs the path of the file that was recorded")
        if mode != "replay" and inner is None:
            raise SettingsError(f"mode {mode!r} needs a model to ask")
        self._inner = inner
        self._mode = mode
        self._store = _Store(path, is_read_only=mode == "replay")
        self._locks: PerLoop[WeakValueDictionary[str, asyncio.Lock]] = PerLoop(WeakValueDictionary)

    @classmethod
    def replay(cls, path: Path | str) -> CachedModel:
        """Answer from a recorded file alone, as the model that the file names.

        Raises:
            StoreError: there is no such file, or it is no store of completions.
        """
        return cls(None, path, "replay")

    async def complete(self, request: Request, on_retry: OnRetry) -> Completion:
        """Answer from the store if it may, else ask.

        Of equal requests at the same time one is sent; the others wait and find its answer.

        Raises:
            ModelError: the model gave no answer, which is not stored; or, with the reason
                `not_recorded`, the store has none and mode `replay` doesn't ask.
            StoreError: the file can't be read or written.
        """
        if self._inner is None or self._mode == "replay":
            return self._replayed(request)
        if self._mode == "record":
            return await self._asked(self._inner, request, on_retry)
        key = _key(request, self._inner.identity(request.settings.name))
        async with self._locks.get().setdefault(key, asyncio.Lock()):
            stored = self._store.read(key)
            if stored is not None:
                return stored
            return await self._asked(self._inner, request, on_retry)

    def identity(self, name: str | None) -> ModelIdentity:
        """Who answers, or answered when the file was recorded (the last one, if several did).

        Raises:
            ModelError: nothing was recorded for the model `name`.
        """
        if self._inner is not None:
            return self._inner.identity(name)
        identities = self._store.identities(name)
        if not identities:
            raise ModelError(
                f"nothing is recorded for {_named(name)} in {self._store.path}",
                reason="not_recorded",
            )
        return identities[0]

    def price(self, name: str | None) -> Price | None:
        """Price of the model that is asked; None if only a file is replayed."""
        return None if self._inner is None else self._inner.price(name)

    async def aclose(self) -> None:
        """Let the model that is asked close its connections; bring the file up to date."""
        self._store.settle()
        if self._inner is not None:
            await self._inner.aclose()

    async def _asked(self, inner: ChatModel, request: Request, on_retry: OnRetry) -> Completion:
        completion = await inner.complete(request, on_retry)
        name = request.settings.name
        identity = inner.identity(name)
        self._store.write(_key(request, identity), completion, name, identity)
        return completion

    def _replayed(self, request: Request) -> Completion:
        name = request.settings.name
        identities = (
            self._store.identities(name) if self._inner is None else (self._inner.identity(name),)
        )
        for identity in identities:
            stored = self._store.read(_key(request, identity))
            if stored is not None:
                return stored
        place = f"node {request.node!r}" if request.node else f"stage {request.stage!r}"
        raise ModelError(
            f"no completion is recorded for this request of {place} to {_named(name)} (rollout "
            f"{request.rollout}) in {self._store.path}; record it again if the workflow or its "
            f"settings changed since",
            reason="not_recorded",
        )


def _named(name: str | None) -> str:
    return "the default model" if name is None else f"model {name!r}"


def _key(request: Request, identity: ModelIdentity) -> str:
    """Digest of everything that the answer depends on."""
    content = {
        "version": _KEY_VERSION,
        "identity": identity.model_dump(),
        "model": request.settings.name or identity.name,
        "settings": request.settings.model_dump(exclude={"name"}),
        "messages": [message.model_dump() for message in request.messages],
        "tools": [tool.model_dump() for tool in request.tools],
        "response_schema": request.response_schema,
        "rollout": request.rollout,
    }
    return sha256(_json(content).encode()).hexdigest()


def _json(value: object) -> str:
    """Canonical JSON. ASCII only, so that lone surrogates in a text can't break it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


class _Store:
    """Completions by key, and who gave them, in one SQLite file of JSON texts."""

    def __init__(self, path: Path | str | None, *, is_read_only: bool) -> None:
        self.path = "memory" if path is None else str(path)
        self._is_read_only = is_read_only
        self._lock = threading.Lock()
        self._written: set[tuple[str, str]] = set()
        with self._errors():
            if path is None:
                self._connection = _connect(":memory:")
            elif is_read_only:
                self._connection = _connect_for_reading(Path(path))
            else:
                self._connection = _connect_for_writing(Path(path))
        weakref.finalize(self, self._connection.close)
        with self._errors():
            self._check_version()

    def read(self, key: str) -> Completion | None:
        """The completion under `key`, marked as cached."""
        rows = self._select("SELECT completion FROM completions WHERE key = ?", key)
        if not rows:
            return None
        try:
            completion = Completion.model_validate(json.loads(rows[0]))
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{self.path} holds a completion that can't be read") from error
        return completion.model_copy(update={"is_cached": True})

    def write(
        self, key: str, completion: Completion, name: str | None, identity: ModelIdentity
    ) -> None:
        """Keep a completion, and who answers for `name`."""
        identified = (_json(name), _json(identity.model_dump()))
        text = _json(completion.model_copy(update={"is_cached": False}).model_dump())
        with self._errors(), self._connection:
            if identified not in self._written:
                self._connection.execute(
                    "INSERT OR REPLACE INTO identities (name, identity) VALUES (?, ?)", identified
                )
            self._connection.execute(
                "INSERT OR REPLACE INTO completions (key, completion) VALUES (?, ?)", (key, text)
            )
        self._written.add(identified)

    def identities(self, name: str | None) -> tuple[ModelIdentity, ...]:
        """Who answered for `name`, the latest first."""
        rows = self._select(
            "SELECT identity FROM identities WHERE name = ? ORDER BY position DESC", _json(name)
        )
        return tuple(ModelIdentity.model_validate(json.loads(row)) for row in rows)

    def settle(self) -> None:
        """Move what was written into the file itself, so that the file alone can be copied."""
        if not self._is_read_only:
            with self._errors():
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _select(self, query: str, value: str) -> list[str]:
        with self._errors():
            return [row[0] for row in self._connection.execute(query, (value,))]

    def _check_version(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version == 0 and not self._is_read_only:
            self._connection.executescript(_TABLES)
        elif version != _FILE_VERSION:
            raise StoreError(
                f"{self.path} is no store of completions of version {_FILE_VERSION} (it says "
                f"{version})"
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Hold the connection, which threads share, and name the file in what goes wrong."""
        try:
            with self._lock:
                yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"can't use {self.path} as a store of completions: {error}") from error


def _connect(database: str, *, is_uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(database, uri=is_uri, check_same_thread=False)


def _connect_for_writing(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = _connect(str(path))
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # A power cut may then cost the last completions, never the file.
        connection.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _connect_for_reading(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise StoreError(f"there is no file {path} to replay")
    address = f"{path.resolve().as_uri()}?mode=ro"
    connection = _connect(address, is_uri=True)
    try:
        connection.execute("PRAGMA user_version")
    except sqlite3.OperationalError:
        # A folder that can't be written to, such as that of an installed package, has no room for
        # the files with which SQLite watches for writers.
        connection.close()
        connection = _connect(f"{address}&immutable=1", is_uri=True)
    return connection
