r"""The trace store: node runs, traces and results in one file that only grows.

The file is JSON Lines in UTF-8. The first line is a header, each further line one record:

    {"kind":"header","schema_version":1,"engine_version":"0.1.0"}
    {"kind":"query", ...}       what was asked, with the private context
    {"kind":"workflow", ...}    name and fingerprints of a workflow
    {"kind":"model", ...}       what answered
    {"run":"writer", ...}       one run of the node `writer`; refers to its model
    {"kind":"trace", ...}       refers to its query, its workflow and its node runs
    {"kind":"result", ...}      refers to its traces

**Each thing is written once.** The id of a record is the digest of its content and is therefore
not in the file. The id of a node run leaves its times out: two runs that did the same are one
record with the times of the first, and a trace that holds the second says what its times were. So
a trial adds the node runs that changed and one line for its trace.

A text is written once as well. A string of at least 24 characters that stands in a record may be
referred to by any later one, and so may what is left of it without the spaces, tabs, newlines
and carriage returns around it. In place of a string, `{"$": [piece, ...]}` is the concatenation of

    "=some text"      the text itself
    "@0123456789"     the text with this digest
    "<some text"      the text itself, quoted: each line after "> "
    ">0123456789"     the text with this digest, quoted
    "+From a:\x7f"    the text itself, each DEL replaced by one of the pieces that follow
    "%0123456789"     the same with the text of this digest

So in a rendered input the parents' outputs are references of a dozen bytes, and what the prompt
templates put around them, which is the same for all queries, is another. References are the first 10
hex digits of a digest, or all of them where 10 would be ambiguous. A mapping that has a key "$" of
its own is written as `{"$": mapping}`.

What is at its default is left out, and in a node run also: `status` if it is "ok", `received` if it
equals `expected`, the list around an input of one user message, and the names of the two `times`;
in a trace the versions that the header gives; in a result the calls of its base trace, with
`"after_base": true` if the others follow them.

A line is written by one call to the operating system as soon as there is something to write. A
writer that is killed leaves at most one incomplete line at the end, which is reported by
`read_store` and cut off when the store is opened for writing again. A line that is damaged later
takes with it what refers to it; all the rest is read.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import is_
from pathlib import Path
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    BinaryIO,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
)

from pydantic import ValidationError

from splice._version import __version__
from splice.errors import StoreError
from splice.files import Closing
from splice.lines import LineFile, check_regular
from splice.records import (
    SCHEMA_VERSION,
    ModelIdentity,
    NodeRun,
    Query,
    Record,
    RepairResult,
    Trace,
    digest,
)
from splice.redact import Redactor

Kind: TypeAlias = Literal["query", "workflow", "model", "run", "trace", "result"]

_KINDS: Final = frozenset(get_args(Kind))

Fields: TypeAlias = dict[str, Any]
"""A record as JSON data."""

_SHORT: Final = 10
"""Hex digits of a digest in a reference."""

_SHARED: Final = 24
"""Characters from which a text may be referred to: nearly twice as long as a reference."""

_BLANK: Final = " \t\r\n"
"""What is left out around an answer. Not all that Unicode calls white space: that may differ between
versions of Python."""

_MOST_CHARS: Final = 1 << 30
"""Characters of one text put together from pieces: a few bytes of references could ask for all of
the memory."""

_MOST_HEADER: Final = 4096
"""Bytes; no header is longer."""

_MOST_RECENT: Final = 1024
"""Records that a store remembers to have put: those of some dozen questions at once."""

_HEADER_START: Final = b'{"kind":"header"'

_SHAPES_ONLY: Final = Redactor()

_R = TypeVar("_R", bound=Record)


class Damage(Record):
    """A line of a store that could not be used, and why."""

    line: int
    """From 1."""
    offset: int
    """Bytes before the line."""
    reason: str


@dataclass(frozen=True)
class StoreContents:
    """What a store holds, by id and in the order of writing."""

    path: Path
    schema_version: int
    engine_version: str
    """Version of the engine that began the store."""
    node_runs: Mapping[str, NodeRun]
    traces: Mapping[str, Trace]
    results: Mapping[str, RepairResult]
    memo: Mapping[str, NodeRun]
    """Node runs to go on from, by `NodeRun.key`: the first that ended `ok` or `abstained`. Left out
    are runs that redaction changed in more than their input: a node would read `[redacted]`."""
    damage: tuple[Damage, ...]

    def get(self, id: str) -> NodeRun | Trace | RepairResult:
        """The record with an id.

        Raises:
            StoreError: there is none.
        """
        for records in (self.node_runs, self.traces, self.results):
            if id in records:
                return records[id]
        raise StoreError(f"{self.path} holds no node run, trace or result {id!r}")


def read_store(path: str | os.PathLike[str]) -> StoreContents:
    """Read a store, also one that is being written.

    Damaged lines, and records that refer to something that is missing, are left out and listed in
    `damage`.

    Raises:
        StoreError: the file can't be read, is no trace store, or is of a newer schema.
    """
    return _load(Path(path)).contents()


class TraceStore(Closing):
    """A store opened for writing, by one writer at a time.

    Secrets are redacted before anything else is done with a record, so ids are those of the
    redacted content and what is read back is what was written. Calls from several threads are safe.

    The file is read when it is opened. From then on `memo` and `in` are answered from memory: a
    store holds the node runs of its memo, with all their texts, and a digest of each other record
    and text. Other records are read when they are asked for: after a write, the next of
    `contents`, `node_runs`, `traces`, `results` and `get` reads the whole file again, and what it
    found is held until the write after it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        redactor: Redactor | None = _SHAPES_ONLY,
        create: bool = True,
        sync: bool = False,
    ) -> None:
        """Open a store; a line that was left incomplete at its end is cut off.

        Args:
            path: the file.
            redactor: what removes secrets; by default secrets of well-known shapes. None: nothing.
            create: whether to begin a store where there is no file.
            sync: wait after each trace and result until the disk has it, so that it outlives a
                loss of power. Without, it outlives the end of this process.

        Raises:
            StoreError: the file can't be opened or is no trace store, its schema is newer, or
                another writer has it.
        """
        self.path = Path(path)
        self.recovered: Damage | None = None
        """What was done about an incomplete last line, if there was one."""
        self._redact: Callable[[str], str] = redactor or str
        self._lock = threading.Lock()
        self._file = LineFile(self.path, create=create, sync=sync)
        try:
            loaded = self._take_over()
        except BaseException:
            self.close()
            raise
        self._header = loaded.header
        self._records = loaded.record_names
        self._texts = loaded.text_names
        self._times = {id: (run.started_s, run.elapsed_s) for id, run in loaded.node_runs.items()}
        self._contents: StoreContents | None = loaded.contents()
        self._memo = dict(self._contents.memo)
        self._recent: dict[int, tuple[Record, _Id]] = {}
        """Records that were put of late with their ids, by the address of the object."""
        self._memo_ids = {
            run.key: _Id(id)
            for id, run in loaded.node_runs.items()
            if run.key is not None and self._memo.get(run.key) is run
        }

    def close(self) -> None:
        """Let go of the file. What was written is in it already."""
        self._file.close()

    def contents(self) -> StoreContents:
        """Everything in the store; the file is read again if something was written since."""
        with self._lock:
            if self._contents is None:
                self._contents = read_store(self.path)
            return self._contents

    def node_runs(self) -> Mapping[str, NodeRun]:
        """Node runs by id, in the order of writing."""
        return self.contents().node_runs

    def traces(self) -> Mapping[str, Trace]:
        """Traces by id, in the order of writing."""
        return self.contents().traces

    def results(self) -> Mapping[str, RepairResult]:
        """Results by id, in the order of writing."""
        return self.contents().results

    def memo(self) -> Mapping[str, NodeRun]:
        """Node runs to go on from, by `NodeRun.key`; see `StoreContents.memo`.

        A live view: it also shows what is written later. Never reads the file.
        """
        return MappingProxyType(self._memo)

    def __contains__(self, id: str) -> bool:
        """Whether the store holds the record with an id. Never reads the file."""
        return id in self._records

    def get(self, id: str) -> NodeRun | Trace | RepairResult:
        """The record with an id.

        Raises:
            StoreError: there is none.
        """
        return self.contents().get(id)

    def put_node_run(self, run: NodeRun) -> str:
        """Write a node run unless the store holds it, and return its id.

        Raises:
            StoreError: the file can't be written; what was written before is safe.
        """
        with self._lock:
            return self._put_run(run)

    def put_trace(self, trace: Trace) -> str:
        """Write a trace, with those of its node runs that are new, and return its id.

        Raises:
            StoreError: the file can't be written; what was written before is safe.
        """
        with self._lock:
            id = self._put_trace(trace)
            self._file.flush()
            return id

    def put_result(self, result: RepairResult) -> str:
        """Write a result, with what is new of its traces, and return its id.

        Raises:
            StoreError: the file can't be written; what was written before is safe.
        """
        with self._lock:
            id = self._put_result(result)
            self._file.flush()
            return id

    def _put_run(self, run: NodeRun) -> _Id:
        if run.key is not None and self._memo.get(run.key) is run:
            # The usual case: each run comes once when it ends, and again with all that it is in.
            return self._memo_ids[run.key]
        return self._once(run, self._put_new_run)

    def _once(self, record: _R, put: Callable[[_R], _Id]) -> _Id:
        """The id of a record that may be an object that was put already, as in each trial."""
        known = self._recent.get(id(record))
        if known is not None:
            return known[1]
        name = put(record)
        if len(self._recent) >= _MOST_RECENT:
            self._recent.clear()
        # With the object, so that no other one can come to stand at its address.
        self._recent[id(record)] = record, name
        return name

    def _put_new_run(self, run: NodeRun) -> _Id:
        clean = _redacted(run, self._redact)
        content = _run_content(clean)
        if clean.model is not None:
            content["model"] = self._put("model", content["model"])
        id = _identity("run", content)
        if id in self._records:
            return id
        times = clean.started_s, clean.elapsed_s
        more: Fields = {"times": times} if any(times) else {}
        is_changed = clean is not run and clean.model_copy(update={"input": run.input}) != run
        if is_changed:
            more["redacted"] = True
        self._append("run", id, content | more)
        self._times[id] = times
        _memorize(self._memo, clean, is_changed)
        if clean.key is not None and self._memo.get(clean.key) is clean:
            self._memo_ids[clean.key] = id
        return id

    def _put_trace(self, trace: Trace) -> _Id:
        runs = [self._put_run(run) for run in trace.node_runs]
        times = [(run.started_s, run.elapsed_s) for run in trace.node_runs]
        clean = _redacted(trace, self._redact, leave=frozenset({"query"}))
        content = {
            "query": self._once(trace.query, self._put_query),
            "workflow": self._put("workflow", clean.model_dump(include=_WORKFLOW)),
            "node_runs": [(run, *pair) for run, pair in zip(runs, times, strict=True)],
            **clean.model_dump(exclude=_WORKFLOW | {"query", "node_runs"}, exclude_defaults=True),
            "schema_version": clean.schema_version,
        }
        id = _identity("trace", content)
        if id in self._records:
            return id
        stored = {
            name: value
            for name, value in content.items()
            if name not in _VERSIONS or value != getattr(self._header, name)
        }
        stored["node_runs"] = [
            run if pair == self._times[run] else (run, *pair)
            for run, pair in zip(runs, times, strict=True)
        ]
        self._append("trace", id, stored)
        return id

    def _put_query(self, query: Query) -> _Id:
        clean = _redacted(query, self._redact)
        return self._put("query", clean.model_dump(exclude_defaults=True))

    def _put_result(self, result: RepairResult) -> _Id:
        base = self._put_trace(result.base)
        trial = self._put_trace(result.trial.trace) if result.trial else None
        clean = _redacted(result, self._redact)
        content = clean.model_dump(exclude=_REFERRED_TO, exclude_defaults=True)
        content["query"] = self._put("query", clean.query.model_dump(exclude_defaults=True))
        content["base"] = base
        if trial is not None:
            content["trial"]["trace"] = trial
        n_base = len(result.base.calls)
        if n_base and result.calls[:n_base] == result.base.calls:
            content["calls"] = content["calls"][n_base:]
            content["after_base"] = True
        return self._put("result", content)

    def _put(self, kind: Kind, content: Fields) -> _Id:
        id = _identity(kind, content)
        if id not in self._records:
            self._append(kind, id, content)
        return id

    def _append(self, kind: Kind, id: _Id, fields: Fields) -> None:
        """Write one record as one line, or nothing at all."""
        new: list[str] = []
        packer = _Packer(self._texts, self._records, new)
        line = {name: packer.pack(name, value) for name, value in fields.items()}
        try:
            self._file.append(_line(line if kind == "run" else {"kind": kind} | line))
        except BaseException:
            for name in reversed(new):
                self._texts.discard(name)
            raise
        self._records.add(id)
        self._contents = None

    def _take_over(self) -> _Loader:
        """Read the file, and make its end fit to be added to."""
        loaded = _load(self.path)
        self._file.end = loaded.end
        tail = loaded.tail
        if tail is not None and tail.offset == loaded.end:
            self._file.cut()
            loaded.damage.pop()
            self.recovered = tail.model_copy(update={"reason": f"{tail.reason}; it was cut off"})
        elif tail is not None:
            self._file.append(b"\n")
            self.recovered = tail.model_copy(update={"reason": f"{tail.reason}; it was added"})
        if self._file.end == 0:
            header = {
                "kind": "header",
                "schema_version": SCHEMA_VERSION,
                "engine_version": __version__,
            }
            self._file.append(_line(header))
        return loaded


class _Id(str):
    """The id of a record, where another one refers to it."""

    __slots__ = ()


_WORKFLOW: Final = {"workflow", "fingerprint", "node_fingerprints"}
"""Fields of a trace that traces of one workflow share."""

_VERSIONS: Final = ("schema_version", "engine_version")

_REFERRED_TO: Final[Mapping[str, Any]] = {"query": True, "base": True, "trial": {"trace"}}
"""Fields of a result that are records of their own."""


def _identity(kind: Kind, content: Fields) -> _Id:
    return _Id(digest(kind + _CANONICAL.encode(content)))


_COMPACT = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))
_CANONICAL = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, separators=(",", ":"), sort_keys=True
)


def _line(fields: Fields) -> bytes:
    text = _COMPACT.encode(fields) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:
        # What can't be encoded is a lone surrogate, and its Python escape is its JSON escape.
        return text.encode("utf-8", "backslashreplace")


def _run_content(run: NodeRun) -> Fields:
    """A node run without its times, in the short form."""
    dumped = run.model_dump(exclude={"started_s", "elapsed_s"}, exclude_defaults=True)
    fields = {"run": dumped.pop("node"), **dumped}
    if fields["status"] == "ok":
        del fields["status"]
    if run.received == run.expected:
        fields.pop("received", None)
    else:
        fields["received"] = run.received
    if len(run.input) == 1 and fields["input"][0].keys() == {"role", "content"}:
        message = run.input[0]
        if message.role == "user":
            fields["input"] = message.content
    return fields


def _run_fields(content: Fields) -> Fields:
    """The inverse of `_run_content`."""
    fields = {"status": "ok", "received": content.get("expected", ()), **content}
    fields["node"] = fields.pop("run")
    if isinstance(content.get("input"), str):
        fields["input"] = [{"role": "user", "content": content["input"]}]
    return fields


def _memorize(memo: dict[str, NodeRun], run: NodeRun, is_changed: bool) -> None:
    """Let later runs go on from `run`, if it ended well and redaction changed no more than its input."""
    if run.key is not None and not is_changed and run.status in ("ok", "abstained"):
        memo.setdefault(run.key, run)


def _redacted(record: _R, redact: Callable[[str], str], leave: frozenset[str] = frozenset()) -> _R:
    """The record without secrets; the same object if it holds none.

    Traces and node runs inside are left as they are, and so are the fields in `leave`: they are
    stored, and redacted, on their own.
    """
    changed = {}
    for name in _text_fields(type(record)):
        if name in leave:
            continue
        value = getattr(record, name)
        clean = _redacted_value(value, redact)
        if clean is not value:
            changed[name] = clean
    return record.model_copy(update=changed) if changed else record


def _redacted_value(value: Any, redact: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        clean = redact(value)
        return value if clean == value else clean
    if isinstance(value, Record):
        return value if isinstance(value, Trace | NodeRun) else _redacted(value, redact)
    if isinstance(value, tuple):
        items = tuple(_redacted_value(item, redact) for item in value)
        return value if all(map(is_, items, value)) else items
    if isinstance(value, Mapping):
        by_key = {key: _redacted_value(item, redact) for key, item in value.items()}
        return value if all(by_key[key] is value[key] for key in value) else by_key
    return value


_NAMES: Final = {"node", "source", "receiver", "expected", "received", "changed", "origin"}
"""Fields that hold names of nodes, or a form that readers check."""


@cache
def _text_fields(model: type[Record]) -> tuple[str, ...]:
    """Fields that may hold free text, and with it a secret."""
    fields = model.model_fields.items()
    return tuple(n for n, field in fields if n not in _NAMES and _holds_text(field.annotation))


def _holds_text(annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin is None:
        return annotation not in (int, float, bool, type(None), Ellipsis)
    if origin is Literal:
        return False
    parts = get_args(annotation)
    return any(map(_holds_text, parts[:1] if origin is Annotated else parts))


class _Digests:
    """Digests that a file has introduced, and the short form in which it refers to them.

    The first digest with a given beginning owns it. A later one is always written in full, so no
    reference is ambiguous, not even if somebody looked for texts with the same beginning.
    """

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self._others: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._owners.get(name[:_SHORT]) == name or name in self._others

    def add(self, name: str) -> None:
        if self._owners.setdefault(name[:_SHORT], name) != name:
            self._others.add(name)

    def discard(self, name: str) -> None:
        """Forget the digest that was added last."""
        if self._owners.get(name[:_SHORT]) == name:
            del self._owners[name[:_SHORT]]
        self._others.discard(name)

    def short(self, name: str) -> str:
        return name[:_SHORT] if self._owners.get(name[:_SHORT]) == name else name

    def full(self, reference: str) -> str:
        return self._owners.get(reference, reference)


_QUOTED_LINES = re.compile(r"^> [^\n]*+(?:\n> [^\n]*+)*+", re.MULTILINE)
_BETWEEN_SURROGATES = re.compile("(?<=[\ud800-\udbff])(?=[\udc00-\udfff])")
_HOLE: Final = "\x7f"


def _quoted(text: str) -> str:
    """The text with "> " before each line.

    Part of the file format, and so on purpose not the quoting of prompts, which may change. A text
    that prompts alter beyond this is written a second time, as its first reader saw it.
    """
    return "> " + text.replace("\n", "\n> ")


def _unquoted(block: str) -> str:
    """The inverse of `_quoted`, for a block whose every line begins with "> "."""
    return block[2:].replace("\n> ", "\n")


def _bare(text: str) -> str | None:
    """The text without the blanks around it, where that is another one to refer to."""
    bare = text.strip(_BLANK)
    return bare if _SHARED <= len(bare) < len(text) else None


class _Packer:
    """Replaces texts that a file holds already by references, and takes note of the new ones."""

    def __init__(self, texts: _Digests, records: _Digests, new: list[str]) -> None:
        self._texts = texts
        self._records = records
        self._new = new

    def pack(self, name: str, value: Any) -> Any:
        """The value of a record's field `name` as it is written.

        Only rendered inputs are searched for quoted texts. Other strings are texts that inputs will
        quote as a whole, whatever they quote themselves.
        """
        return self._value(value, is_input=name == "input")

    def _value(self, value: Any, is_input: bool) -> Any:
        if isinstance(value, _Id):
            value = self._records.short(value)
        if isinstance(value, str):
            return self._text(value, is_input)
        if isinstance(value, dict):
            packed = {key: self._value(item, is_input) for key, item in value.items()}
            return {"$": packed} if "$" in packed else packed
        if isinstance(value, tuple | list):
            return [self._value(item, is_input) for item in value]
        return value

    def _text(self, text: str, is_input: bool) -> Any:
        if not text.isascii() and _BETWEEN_SURROGATES.search(text):
            # Side by side, the JSON escapes of two lone surrogates would be read as one character.
            parts = _BETWEEN_SURROGATES.split(text)
            return {"$": [self._piece("=", "@", part) for part in parts]}
        if is_input and _HOLE not in text and digest(text) not in self._texts:
            blocks = _QUOTED_LINES.findall(text)
            if blocks:
                frame = self._piece("+", "%", _QUOTED_LINES.sub(_HOLE, text))
                return {"$": [frame, *(self._piece("<", ">", _unquoted(b)) for b in blocks)]}
        piece = self._piece("=", "@", text)
        return {"$": [piece]} if piece[0] == "@" else text

    def _piece(self, literal: str, reference: str, text: str) -> str:
        """The text after the mark `literal`, or its digest after the mark `reference`."""
        if len(text) < _SHARED:
            return literal + text
        name = digest(text)
        if name in self._texts:
            return reference + self._texts.short(name)
        self._introduce(name)
        if bare := _bare(text):
            self._introduce(digest(bare))
        return literal + text

    def _introduce(self, name: str) -> None:
        if name not in self._texts:
            self._texts.add(name)
            self._new.append(name)


@dataclass(frozen=True)
class _Header:
    schema_version: int = SCHEMA_VERSION
    engine_version: str = __version__


class _Unusable(Exception):
    """Why a line is of no use; for `Damage.reason`."""


class _Unparsable(_Unusable):
    """The line is no JSON, so it may be the beginning of a record."""


class _Loader:
    """Takes the lines of a store one after another."""

    def __init__(self, path: Path, header: _Header) -> None:
        self.path = path
        self.header = header
        self.end = 0
        """Bytes up to the end of the last whole line."""
        self.tail: Damage | None = None
        """The last line, if nothing ends it. It is whole if it begins before `end`."""
        self.damage: list[Damage] = []
        self.record_names = _Digests()
        self.text_names = _Digests()
        self.node_runs: dict[str, NodeRun] = {}
        self._texts: dict[str, str] = {}
        self._queries: dict[str, Query] = {}
        self._workflows: dict[str, Fields] = {}
        self._models: dict[str, ModelIdentity] = {}
        self._traces: dict[str, Trace] = {}
        self._results: dict[str, RepairResult] = {}
        self._memo: dict[str, NodeRun] = {}
        self._takers: Mapping[object, Callable[[Fields], None]] = {
            "query": self._take_query,
            "workflow": self._take_workflow,
            "model": self._take_model,
            "run": self._take_run,
            "trace": self._take_trace,
            "result": self._take_result,
        }

    def contents(self) -> StoreContents:
        """What was taken."""
        return StoreContents(
            path=self.path,
            schema_version=self.header.schema_version,
            engine_version=self.header.engine_version,
            node_runs=self.node_runs,
            traces=self._traces,
            results=self._results,
            memo=self._memo,
            damage=tuple(self.damage),
        )

    def take(self, line: bytes) -> None:
        """Take one record.

        Raises:
            _Unusable: it is none, or refers to something that is missing.
        """
        try:
            fields = json.loads(line.decode())
            if type(fields) is not dict:
                raise _Unusable("not a JSON object")
            kind = "run" if "run" in fields else fields.pop("kind", None)
            if kind not in _KINDS:
                raise _Unusable(f"unknown kind of record {kind!r:.40}")
            self._takers[kind](self._unpack_all(fields))
        except UnicodeDecodeError as error:
            raise _Unparsable("not UTF-8") from error
        except json.JSONDecodeError as error:
            raise _Unparsable(f"not JSON: {error.msg} in column {error.colno}") from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise _Unusable(f"not a {kind}: {place:.80}: {first['msg']:.120}") from error
        except RecursionError as error:
            raise _Unusable("nested too deeply") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _Unusable(f"not a record: {type(error).__name__}: {error!s:.120}") from error

    def _take_query(self, fields: Fields) -> None:
        query = Query.model_validate(fields)
        self._queries.setdefault(self._name("query", fields), query)

    def _take_workflow(self, fields: Fields) -> None:
        if fields.keys() != _WORKFLOW:
            raise _Unusable(f"not a workflow: its fields are {sorted(fields)!r:.120}")
        self._workflows.setdefault(self._name("workflow", fields), fields)

    def _take_model(self, fields: Fields) -> None:
        model = ModelIdentity.model_validate(fields)
        self._models.setdefault(self._name("model", fields), model)

    def _take_run(self, content: Fields) -> None:
        started_s, elapsed_s = content.pop("times", (0.0, 0.0))
        is_changed = content.pop("redacted", False)
        fields = {**_run_fields(content), "started_s": started_s, "elapsed_s": elapsed_s}
        if "model" in content:
            content["model"] = self._full(content["model"])
            fields["model"] = _find(self._models, content["model"], "model")
        run = NodeRun.model_validate(fields)
        self.node_runs.setdefault(self._name("run", content), run)
        _memorize(self._memo, run, is_changed)

    def _take_trace(self, fields: Fields) -> None:
        content = {name: getattr(self.header, name) for name in _VERSIONS} | fields
        runs = [self._timed_run(entry) for entry in content["node_runs"]]
        query, workflow = self._full(content["query"]), self._full(content["workflow"])
        content |= {
            "query": query,
            "workflow": workflow,
            "node_runs": [(id, run.started_s, run.elapsed_s) for id, run in runs],
        }
        id = _identity("trace", content)
        trace = Trace.model_validate(
            {
                **content,
                **_find(self._workflows, workflow, "workflow"),
                "query": _find(self._queries, query, "query"),
                "node_runs": tuple(run for _, run in runs),
            }
        )
        self.record_names.add(id)
        self._traces.setdefault(id, trace)

    def _timed_run(self, entry: Any) -> tuple[str, NodeRun]:
        reference, *times = entry if isinstance(entry, list) else [entry]
        id = self._full(reference)
        run = _find(self.node_runs, id, "node run")
        if not times:
            return id, run
        started_s, elapsed_s = map(float, times)
        return id, run.model_copy(update={"started_s": started_s, "elapsed_s": elapsed_s})

    def _take_result(self, content: Fields) -> None:
        content["query"] = self._full(content["query"])
        content["base"] = self._full(content["base"])
        base = _find(self._traces, content["base"], "trace")
        fields = {**content, "base": base}
        fields["query"] = _find(self._queries, content["query"], "query")
        if "trial" in content:
            trial = self._full(content["trial"]["trace"])
            content["trial"] = content["trial"] | {"trace": trial}
            fields["trial"] = content["trial"] | {"trace": _find(self._traces, trial, "trace")}
        if fields.pop("after_base", False):
            fields["calls"] = [*base.calls, *content["calls"]]
        result = RepairResult.model_validate(fields)
        self._results.setdefault(self._name("result", content), result)

    def _name(self, kind: Kind, content: Fields) -> str:
        id = _identity(kind, content)
        self.record_names.add(id)
        return id

    def _full(self, reference: str) -> str:
        return self.record_names.full(reference)

    def _unpack_all(self, fields: Fields) -> Fields:
        return {name: self._unpack(value) for name, value in fields.items()}

    def _unpack(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._introduce(value) if len(value) >= _SHARED else value
        if isinstance(value, list):
            return [self._unpack(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$" not in value:
            return self._unpack_all(value)
        held = value["$"]
        return self._join(held) if isinstance(held, list) else self._unpack_all(held)

    def _join(self, pieces: list[str]) -> str:
        texts = []
        n_chars = 0
        for piece in pieces:
            texts.append(self._part(piece[0], piece[1:]))
            n_chars += len(texts[-1])
            if n_chars > _MOST_CHARS:
                raise _Unusable(f"a text of more than {_MOST_CHARS:,} characters")
        if pieces[0][0] in "+%":
            frame = texts[0].split(_HOLE)
            texts = [text for pair in zip(frame, [*texts[1:], ""], strict=True) for text in pair]
        # The join of one text is that text, not a copy of it.
        return "".join(texts)

    def _part(self, mark: str, rest: str) -> str:
        if mark in "=<+":
            text = self._introduce(rest) if len(rest) >= _SHARED else rest
        elif mark in "@>%":
            text = _find(self._texts, self.text_names.full(rest), "text")
        else:
            raise _Unusable(f"unknown mark {mark!r} of a text")
        return _quoted(text) if mark in "<>" else text

    def _introduce(self, text: str) -> str:
        """Let later records refer to a text, and return the copy that all records share."""
        shared = self._keep(text)
        if bare := _bare(text):
            self._keep(bare)
        return shared

    def _keep(self, text: str) -> str:
        name = digest(text)
        self.text_names.add(name)
        return self._texts.setdefault(name, text)


_T = TypeVar("_T")


def _find(records: Mapping[str, _T], id: str, what: str) -> _T:
    try:
        return records[id]
    except KeyError as error:
        raise _Unusable(f"refers to the {what} {id[:_SHORT]}, which is missing") from error


def _load(path: Path) -> _Loader:
    try:
        check_regular(path)
        with path.open("rb") as file:
            return _load_lines(path, file)
    except OSError as error:
        raise StoreError(f"{path} can't be read: {error.strerror}") from error


def _load_lines(path: Path, file: BinaryIO) -> _Loader:
    first = file.readline(_MOST_HEADER)
    header = _read_header(path, first)
    loader = _Loader(path, header or _Header())
    offset = 0
    for number, line in enumerate(chain([first] if first else [], file), 1):
        is_ended = line.endswith(b"\n")
        is_cut = False
        try:
            if number > 1:
                loader.take(line)
            elif header is None:
                raise _Unparsable("the header is incomplete")
        except _Unusable as problem:
            is_cut = not is_ended and isinstance(problem, _Unparsable)
            reason = "the last line is incomplete" if is_cut else str(problem)
            loader.damage.append(Damage(line=number, offset=offset, reason=reason))
        if not is_ended:
            reason = "the last line is incomplete" if is_cut else "the last newline was missing"
            loader.tail = Damage(line=number, offset=offset, reason=reason)
        offset += len(line)
        if not is_cut:
            loader.end = offset
    return loader


def _read_header(path: Path, line: bytes) -> _Header | None:
    """The header in the first line of a store; None if its writer was stopped in the middle of it.

    Raises:
        StoreError: the file is no store, or its schema is newer.
    """
    try:
        fields = json.loads(line.decode())
        kind, version, engine = (
            fields["kind"],
            fields["schema_version"],
            fields["engine_version"],
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        if not line.endswith(b"\n") and line[: len(_HEADER_START)] == _HEADER_START[: len(line)]:
            return None
        raise StoreError(f"{path} is no trace store: line 1 is not the header of one") from error
    if kind != "header" or type(version) is not int or version < 1 or type(engine) is not str:
        raise StoreError(f"{path} is no trace store: line 1 is not the header of one")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} was begun by engine {engine:.40} with schema {version}; "
            f"this engine, {__version__}, reads up to schema {SCHEMA_VERSION}"
        )
    return _Header(version, engine)
