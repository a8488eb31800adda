r"""A probe pool: a folder that outlives every process that works on it.

    pool/
        manifest.json           what makes the pool this one, and what is in it
        bases-00000.jsonl       a `BaseRecord` a line: a question with its base run
        probes-00000.jsonl      a `ProbeRecord` a line
        traces-00000.jsonl      the traces that both refer to: a trace store (docs/traces.md)
        lock                    held by the one process that may write

Records and traces come in shards of a few hundred questions, so that a process holds little of a
large pool at a time. Each file only grows, by whole lines. A record is written after the trace that
it refers to, and one that is there is finished: a process that is killed loses what is in flight
and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from probes.plan import ProbeSettings
from probes.probing import Finished, Known
from probes.records import POOL_VERSION, BaseRecord, ProbeRecord
from splice._version import __version__
from splice.errors import SettingsError, StoreError
from splice.files import Closing, read_text, write_whole
from splice.ledger import total_cost
from splice.lines import LineFile, resumed
from splice.prompts import without_surrogates
from splice.queries import Split
from splice.records import ModelIdentity, Record
from splice.store import TraceStore

SHARD: Final = 256
"""Questions with their probes in one shard."""

Name: TypeAlias = Literal["bases", "probes", "traces"]

R = TypeVar("R", BaseRecord, ProbeRecord)


class Counts(Record):
    """What is in a pool."""

    n_questions: int = 0
    n_bases: int = 0
    n_failed_bases: int = 0
    n_probes: int = 0
    by_outcome: Mapping[str, int] = {}
    by_arm: Mapping[str, int] = {}
    n_calls: int = 0
    n_tokens: int = 0
    cost: float | None = 0.0
    """None: the price of at least one call is unknown."""


class Manifest(Record):
    """What makes a pool this one, and what is in it: `manifest.json`."""

    schema_version: Literal[1] = 1
    engine_version: str = __version__
    workload: str
    about: str
    workflow: str
    """Fingerprint of the workload's workflow."""
    metrics: tuple[str, ...]
    metric: str
    """The score that classes are made of."""
    models: tuple[ModelIdentity, ...]
    settings: ProbeSettings
    sources: Mapping[str, str] = {}
    """SHA-256 by name of each data file that was read."""
    splits: Mapping[Split, tuple[str, ...]] = {}
    """Ids of the questions that have a base run, by split."""
    counts: Counts | None = None
    """None until a command that writes has come to its end."""
    files: Mapping[str, str] = {}
    """SHA-256 by name, as of the last such command."""
    n_wanted: int | None = None
    """Base runs that the last command was asked for."""
    parts: tuple[Manifest, ...] = ()
    """Manifests of the pools that this one was merged from."""


class Damage(Record):
    """A line of a pool that could not be used."""

    file: str
    line: int
    reason: str


class Shard(NamedTuple):
    """The records of one shard; traces stay on the disk."""

    number: int
    bases: Mapping[str, BaseRecord]
    """By id, in the order of writing."""
    probes: Mapping[str, ProbeRecord]
    """By id, in the order of writing; those whose base record is missing are left out."""


def read_shards(folder: str | Path, damage: list[Damage] | None = None) -> Iterator[Shard]:
    """Read a pool shard by shard, also one that is being written.

    Args:
        folder: of the pool.
        damage: gets the lines that are no records; they are left out.

    Raises:
        StoreError: there is no pool, its format is newer, or a file can't be read.
    """
    folder = Path(folder)
    read_manifest(folder)
    damage = damage if damage is not None else []
    for number in shard_numbers(folder):
        bases = _by_id(shard_path(folder, "bases", number), BaseRecord, damage)
        probes = _by_id(shard_path(folder, "probes", number), ProbeRecord, damage)
        own = {id: probe for id, probe in probes.items() if probe.base in bases}
        yield Shard(number, bases, own)


def _by_id(path: Path, kind: type[R], damage: list[Damage]) -> dict[str, R]:
    return {record.id: record for record in shard_records(path, kind, damage)}


def read_manifest(folder: Path) -> Manifest:
    """Read `manifest.json`.

    Raises:
        StoreError: there is none, or it is of a newer format.
    """
    path = folder / "manifest.json"
    if not path.exists():
        raise StoreError(f"{folder} is no probe pool: it has no manifest.json")
    text = read_text(path, StoreError)
    try:
        fields = json.loads(text)
        version = fields.get("schema_version") if isinstance(fields, dict) else None
        if isinstance(version, int) and version > POOL_VERSION:
            raise StoreError(
                f"{path} is of pool format {version}; this version reads up to {POOL_VERSION}"
            )
        return Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise StoreError(f"{path}: {place}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: not JSON: {error}") from None


def shard_numbers(folder: Path) -> list[int]:
    """Numbers of the shards of a pool, in order."""
    numbers = {
        _number(path) for name in ("bases", "probes") for path in folder.glob(f"{name}-*.jsonl")
    }
    return sorted(number for number in numbers if number is not None)


def shard_path(folder: Path, name: Name, number: int) -> Path:
    """Where one file of a shard is."""
    return folder / f"{name}-{number:05}.jsonl"


def _number(path: Path) -> int | None:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else None


def shard_records(path: Path, kind: type[R], damage: list[Damage]) -> Iterator[R]:
    """The records of one file, in the order of writing; a line that is none goes into `damage`."""
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return  # the writer was stopped in the middle of it, or is at it
                try:
                    yield kind.model_validate_json(line)
                except ValidationError as error:
                    first = error.errors(include_url=False, include_input=False)[0]
                    place = ".".join(map(str, first["loc"]))
                    reason = f"not a {name_of(kind)}: {place:.80}: {first['msg']:.120}"
                    damage.append(Damage(file=path.name, line=number, reason=reason))
    except OSError as error:
        raise StoreError(f"{path} can't be read: {error.strerror}") from error


def name_of(kind: type[BaseRecord] | type[ProbeRecord]) -> str:
    """What a record is called in messages."""
    return "base record" if kind is BaseRecord else "probe record"


class _Writer:
    """The three files of a shard, opened for writing."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.n_users = 0
        """Questions that are being worked on and write here."""
        self.store = TraceStore(shard_path(folder, "traces", number))
        self.bases, _ = resumed(shard_path(folder, "bases", number))
        self.probes, _ = resumed(shard_path(folder, "probes", number))

    def put(self, finished: Finished) -> None:
        """Write a record after its trace."""
        record = finished.record
        if finished.trace is not None:
            trace = self.store.put_trace(finished.trace)
            record = record.model_copy(update={"trace": trace})
        file = self.bases if isinstance(record, BaseRecord) else self.probes
        file.append(_line(record))

    def close(self) -> None:
        self.bases.close()
        self.probes.close()
        self.store.close()


def _line(record: BaseRecord | ProbeRecord) -> bytes:
    """A record as a line; lone surrogates, which the trace keeps, are replaced."""
    try:
        return record.model_dump_json().encode() + b"\n"
    except PydanticSerializationError:
        clean = _without_surrogates(record.model_dump())
        return type(record).model_validate(clean).model_dump_json().encode() + b"\n"


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, Mapping):
        return {key: _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_without_surrogates, value))
    return value


class Pool(Closing):
    """A pool opened for writing, by one process at a time."""

    def __init__(self, folder: str | Path, manifest: Manifest) -> None:
        """Begin a pool, or go on with one.

        Args:
            folder: of the pool; made if need be.
            manifest: what the pool is to be.

        Raises:
            SettingsError: the folder holds another pool; the message names what differs.
            StoreError: another process has the pool, or it can't be read or written.
        """
        self.folder = Path(folder)
        self.part = (0, 1)
        """(k, n): this is the k-th, from 0, of n processes that work on the pool. Its new shards have
        the numbers k, k + n, k + 2 n, ..."""
        self._writers: dict[int, _Writer] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self.folder}: {error.strerror}") from None
        self._lock = _locked(self.folder)
        try:
            self.manifest = _claimed(self.folder, manifest)
            self._read()
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Let go of all files. What was written is in them already."""
        for shard in self._writers.values():
            shard.close()
        self._writers.clear()
        self._lock.close()

    def _read(self) -> None:
        """Take note of what is there: ids and outcomes, not the records themselves."""
        self.damage: list[Damage] = []
        self.failed_bases: set[str] = set()
        self.queries: dict[str, tuple[str, Split]] = {}
        """Digest of the query, and its split, by id of the base record."""
        self.outcomes: dict[str, dict[str, str]] = {}
        """Outcome by id of the probe, by id of the base record."""
        self._shard_of: dict[str, int] = {}
        for number in shard_numbers(self.folder):
            path = shard_path(self.folder, "bases", number)
            for base in shard_records(path, BaseRecord, self.damage):
                self._shard_of[base.id] = number
                self.queries[base.id] = base.query, base.split
                self.outcomes.setdefault(base.id, {})
                if base.failure is not None:
                    self.failed_bases.add(base.id)
        for number in shard_numbers(self.folder):
            path = shard_path(self.folder, "probes", number)
            for probe in shard_records(path, ProbeRecord, self.damage):
                if probe.base in self.outcomes:
                    self.outcomes[probe.base][probe.id] = probe.outcome
        self._n_by_shard = Counter(self._shard_of.values())

    def shard_of(self, base_id: str) -> int | None:
        """Number of the shard that holds a base record; None if there is none."""
        return self._shard_of.get(base_id)

    def known(self, base_ids: Collection[str]) -> dict[str, Known]:
        """What is known of unfinished questions, by id; all of them of one shard."""
        numbers = {self._shard_of[id] for id in base_ids}
        (number,) = numbers
        wanted = set(base_ids)
        path = shard_path(self.folder, "bases", number)
        bases = {id: base for id, base in _by_id(path, BaseRecord, []).items() if id in wanted}
        probes: dict[str, dict[str, ProbeRecord]] = {id: {} for id in bases}
        path = shard_path(self.folder, "probes", number)
        for id, probe in _by_id(path, ProbeRecord, []).items():
            if probe.base in probes:
                probes[probe.base][id] = probe
        traces = self._opened(number).store.traces()
        found = {}
        for id, base in bases.items():
            trace = traces.get(base.trace or "")
            # Without its trace a base record is of no use: the line of the store is damaged.
            found[id] = Known(base, trace, probes[id]) if trace is not None else Known()
        return found

    def take(self, base_id: str) -> int:
        """Choose the shard of a question that is begun or gone on with, and keep it open."""
        number = self._shard_of.get(base_id)
        if number is None:
            first, step = self.part
            own = [n for n in self._n_by_shard if n % step == first]
            number = max(own, default=first)
            if self._n_by_shard[number] >= SHARD:
                number += step
            self._shard_of[base_id] = number
            self._n_by_shard[number] += 1
        self._opened(number).n_users += 1
        return number

    def release(self, number: int) -> None:
        """A question needs its shard no longer."""
        self._writers[number].n_users -= 1

    def put(self, number: int, finished: Finished) -> None:
        """Write a finished record into a shard.

        Raises:
            StoreError: the disk is full or broken; what was written before is safe.
        """
        self._writers[number].put(finished)

    def _opened(self, number: int) -> _Writer:
        if number not in self._writers:
            for other in [n for n, shard in self._writers.items() if not shard.n_users]:
                self._writers.pop(other).close()
            self._writers[number] = _Writer(self.folder, number)
        return self._writers[number]

    def forget_failed(self) -> int:
        """Take out what failed, so that it is made again; return the number of records."""
        n = 0
        for number in shard_numbers(self.folder):
            bases = shard_path(self.folder, "bases", number)
            probes = shard_path(self.folder, "probes", number)
            n += _filtered(bases, BaseRecord, lambda base: base.failure is None)
            n += _filtered(probes, ProbeRecord, lambda probe: probe.outcome != "failed")
        if n:
            self._read()
        return n

    def finish(self) -> Manifest:
        """Write counts and hashes into the manifest."""
        self.manifest = summarised(self.folder, self.manifest)
        write_manifest(self.folder, self.manifest)
        return self.manifest


class PoolInUse(StoreError):
    """Raised if another process works on a pool."""


def _locked(folder: Path) -> LineFile:
    try:
        return LineFile(folder / "lock")
    except StoreError as error:
        if "in use" in str(error):
            raise PoolInUse(f"{folder}: another process works on this pool") from None
        raise


def is_in_use(folder: Path) -> bool:
    """Whether a process is at work on a pool."""
    if not (folder / "lock").exists():
        return False
    try:
        _locked(folder).close()
    except StoreError as error:
        return isinstance(error, PoolInUse)
    return False


def _filtered(path: Path, kind: type[R], keep: Callable[[R], bool]) -> int:
    """Write a file anew without the records that are not wanted; return how many were left out."""
    records = list(shard_records(path, kind, []))
    kept = [record for record in records if keep(record)]
    if len(kept) < len(records):
        write_whole(path, "".join(f"{record.model_dump_json()}\n" for record in kept))
    return len(records) - len(kept)


_GROWING: Final = ("n_edges", "control_share", "n_rollouts")
"""Settings that may be raised later: a larger value only adds probes."""


def _claimed(folder: Path, wanted: Manifest) -> Manifest:
    """The manifest to go on with: the one that is there, if it is of the same pool."""
    if not (folder / "manifest.json").exists():
        write_manifest(folder, wanted)
        return wanted
    known = read_manifest(folder)
    if known.parts:
        raise SettingsError(f"{folder} was merged from other pools; generate into one of those")
    for name in ("workload", "workflow", "metric", "models"):
        _require_same(folder, name, getattr(known, name), getattr(wanted, name))
    for name in ProbeSettings.model_fields:
        old, new = getattr(known.settings, name), getattr(wanted.settings, name)
        if name not in _GROWING:
            _require_same(folder, name, old, new)
        elif new < old:
            raise SettingsError(
                f"{folder} was begun with {name}={old}; it can be raised, not lowered to {new}"
            )
    updated = known.model_copy(
        update={
            "settings": wanted.settings,
            "sources": {**known.sources, **wanted.sources},
            "n_wanted": wanted.n_wanted,
        }
    )
    if updated != known:
        write_manifest(folder, updated)
    return updated


def _require_same(folder: Path, name: str, old: object, new: object) -> None:
    if old != new:
        raise SettingsError(
            f"{folder} holds another pool: {name} is {_shown(old)} there and {_shown(new)} here; "
            "choose another folder"
        )


def _shown(value: object) -> str:
    if isinstance(value, tuple) and all(isinstance(item, ModelIdentity) for item in value):
        return ", ".join(f"{item.name} ({item.provider})" for item in value) or "no model"
    return repr(value)[:200]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, whole or not at all."""
    write_whole(folder / "manifest.json", f"{manifest.model_dump_json(indent=1)}\n")


def summarised(
    folder: Path,
    manifest: Manifest,
    damage: list[Damage] | None = None,
    *,
    is_hashed: bool = True,
) -> Manifest:
    """The manifest with counts and, unless it takes too long, hashes of what is there."""
    splits: dict[Split, dict[str, None]] = {}
    tally = Tally()
    for shard in read_shards(folder, damage):
        for base in shard.bases.values():
            splits.setdefault(base.split, {})[base.query_id] = None
        tally.add(shard)
    files = [
        shard_path(folder, name, number)
        for number in shard_numbers(folder)
        for name in get_args(Name)
        if is_hashed
    ]
    return manifest.model_copy(
        update={
            "splits": {split: tuple(sorted(ids)) for split, ids in sorted(splits.items())},
            "counts": tally.counts(),
            "files": {path.name: _sha256(path) for path in files if path.exists()},
        }
    )


class Tally:
    """Counts shard after shard."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._questions: set[tuple[str, str]] = set()
        self._n: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._arms: Counter[str] = Counter()
        self._cost: float | None = 0.0

    def add(self, shard: Shard) -> None:
        """Count the records of a shard, and add up what they used."""
        bases, probes = shard.bases.values(), shard.probes.values()
        self._questions |= {(base.workload, base.query_id) for base in bases}
        self._n["bases"] += len(bases)
        self._n["failed"] += sum(base.failure is not None for base in bases)
        self._n["probes"] += len(probes)
        self._outcomes.update(probe.outcome for probe in probes)
        self._arms.update(probe.arm for probe in probes)
        for ledger in [*(base.ledger for base in bases), *(probe.ledger for probe in probes)]:
            self._n["calls"] += ledger.n_calls
            self._n["tokens"] += ledger.tokens
            self._cost = total_cost((self._cost, ledger.cost))

    def counts(self) -> Counts:
        """What was counted."""
        return Counts(
            n_questions=len(self._questions),
            n_bases=self._n["bases"],
            n_failed_bases=self._n["failed"],
            n_probes=self._n["probes"],
            by_outcome=dict(sorted(self._outcomes.items())),
            by_arm=dict(sorted(self._arms.items())),
            n_calls=self._n["calls"],
            n_tokens=self._n["tokens"],
            cost=self._cost,
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
