"""Merging probe pools: one pool of several, such as one for each data set.

Reads   pools
Writes  a pool of the same format, in which each shard of each pool is a shard with a new number

Traces are copied as they are, so the trace ids of a shard's records stay valid. What is in more
than one pool is kept once, where most of its probes are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from probes.plan import ProbeSettings
from probes.pool import (
    Damage,
    Manifest,
    Shard,
    read_manifest,
    read_shards,
    shard_path,
)
from probes.records import BaseRecord, ProbeRecord
from probes.rewriting import new_pool, require_empty, write_shard
from splice.errors import SettingsError
from splice.queries import Split
from splice.records import Record, digest

_MAY_DIFFER: Final = frozenset(
    {
        "n_edges",
        "control_share",
        "n_rollouts",
        "seed",
        "metric",
        "run.node_timeout_s",
        "run.run_timeout_s",
        "run.budget",
    }
)
"""Settings that decide which probes a pool has, not what a probe means: how many, which are drawn,
when a run counts as failed for reasons outside of the workflow. The metric is compared by the
name that it resolved to."""

_AT_LEAST: Final = ("n_edges", "control_share", "n_rollouts")
"""Settings of which the merged pool states the least of its parts: so much each question has."""


class Merged(Record):
    """What a merge wrote."""

    manifest: Manifest
    n_repeated: int
    """Base runs that were in a pool and again in a later one."""
    damage: tuple[Damage, ...] = ()
    """Lines of the pools that are no records; they were left out."""


class _Part(NamedTuple):
    """A pool that was generated, and the folder that it comes from."""

    folder: Path
    manifest: Manifest


class _Place(NamedTuple):
    """A shard of a pool that is read."""

    folder: Path
    number: int


class _Kept(NamedTuple):
    """A base run with its probes, and where they are taken from."""

    place: _Place
    records: Mapping[str, str]
    """Digest by id, of the base record and of each probe record."""


def merge(folders: Sequence[str | Path], out: str | Path) -> Merged:
    """Write one pool that holds what is in several.

    Args:
        folders: of the pools, in the order that their shards are to have.
        out: folder of the new pool; it must not exist, or be empty.

    Raises:
        SettingsError: the pools don't go together; the message names pools and field.
        StoreError: a pool can't be read, or the new one can't be written; there is none then.
    """
    sources, out = [Path(folder) for folder in folders], Path(out)
    if not sources:
        raise SettingsError("name at least one pool")
    require_empty(out)
    parts = [part for folder in sources for part in _parts(folder, read_manifest(folder))]
    _require_comparable(parts)
    damage: list[Damage] = []
    index = _Index()
    for folder in sources:
        index.add(folder, damage)
    with new_pool(out, _combined(parts)) as new:
        _write_shards(sources, index, new)
    return Merged(manifest=read_manifest(out), n_repeated=index.n_repeated, damage=tuple(damage))


def _parts(folder: Path, manifest: Manifest) -> Iterator[_Part]:
    """The pools that were generated, where one was merged itself."""
    for part in manifest.parts or (manifest,):
        yield _Part(folder, part)


# --- what goes together ----------------------------------------------------------------------


def _require_comparable(parts: Sequence[_Part]) -> None:
    """Refuse pools whose probes mean different things.

    Raises:
        SettingsError: they do.
    """
    first_of: dict[str, _Part] = {}
    for part in parts:
        _require_same(parts[0], part, _meaning)
        _require_same(first_of.setdefault(part.manifest.workload, part), part, _workload)


def _meaning(manifest: Manifest) -> dict[str, object]:
    """By name, what all pools must have in common."""
    models = [model.model_dump(exclude_none=True) for model in manifest.models]
    return {"metric": manifest.metric, "models": models, **_fixed(manifest.settings)}


def _fixed(settings: ProbeSettings) -> dict[str, object]:
    """By name, the settings that say what a probe means."""
    groups = {"message": settings.message, "run": settings.run}
    names = [name for name in ProbeSettings.model_fields if name not in groups]
    found = {name: getattr(settings, name) for name in names}
    for group, record in groups.items():
        found |= {f"{group}.{name}": getattr(record, name) for name in type(record).model_fields}
    return {name: value for name, value in found.items() if name not in _MAY_DIFFER}


def _workload(manifest: Manifest) -> dict[str, object]:
    """By name, what pools of one workload must have in common."""
    return {"workflow": manifest.workflow, "metrics": manifest.metrics}


def _require_same(
    first: _Part, other: _Part, view: Callable[[Manifest], Mapping[str, object]]
) -> None:
    old, new = view(first.manifest), view(other.manifest)
    for name, value in old.items():
        if value != new[name]:
            raise SettingsError(
                f"{first.folder} and {other.folder} can't be merged: {name} is {value!r} in the "
                f"first and {new[name]!r} in the second"
            )


# --- what is kept, and from where ------------------------------------------------------------


class _Question(NamedTuple):
    """What a question is wherever it stands, and where it was first met."""

    split: Split
    query: str
    folder: Path


class _Index:
    """Which records the new pool takes from which shard."""

    def __init__(self) -> None:
        self.kept: dict[str, _Kept] = {}
        """By id of the base record."""
        self.n_repeated = 0
        self._questions: dict[tuple[str, str], _Question] = {}
        """By workload and id."""

    def add(self, folder: Path, damage: list[Damage]) -> None:
        """Take note of a pool.

        Raises:
            SettingsError: it and a pool before contradict each other.
        """
        found: list[Damage] = []
        for shard in read_shards(folder, found):
            place = _Place(folder, shard.number)
            records = {id: {id: _digest(base)} for id, base in shard.bases.items()}
            for probe in shard.probes.values():
                records[probe.base][probe.id] = _digest(probe)
            for base in shard.bases.values():
                self._require_one_question(base, folder)
                self._keep(base, _Kept(place, records[base.id]))
        damage += [line.model_copy(update={"file": f"{folder}/{line.file}"}) for line in found]

    def _require_one_question(self, base: BaseRecord, folder: Path) -> None:
        new = _Question(base.split, base.query, folder)
        old = self._questions.setdefault((base.workload, base.query_id), new)
        where = f"question {base.query_id!r} of {base.workload}"
        if old.split != new.split:
            raise SettingsError(
                f"{where} stands in split {old.split} in {old.folder} and in split {new.split} in "
                f"{folder}"
            )
        if old.query != new.query:
            raise SettingsError(f"{where} is one question in {old.folder}, another in {folder}")

    def _keep(self, base: BaseRecord, new: _Kept) -> None:
        """Choose between the places of a base run: the one with more probes, else the first."""
        old = self.kept.setdefault(base.id, new)
        if old is new:
            return
        self.n_repeated += 1
        common = old.records.keys() & new.records.keys()
        where = f"{old.place.folder} and {new.place.folder}"
        if differing := sorted(id for id in common if old.records[id] != new.records[id]):
            raise SettingsError(
                f"{where} differ in record {differing[0]} of question {base.query_id!r} of "
                f"{base.workload}; leave one of the pools out"
            )
        if len(common) < min(len(old.records), len(new.records)):
            # A probe and its base run share a shard, and a shard has the traces of one pool.
            raise SettingsError(
                f"{where} each have probes of question {base.query_id!r} of {base.workload} that "
                "the other lacks; leave one of the pools out"
            )
        if len(new.records) > len(old.records):
            self.kept[base.id] = new

    def taken(self, folder: Path, shard: Shard) -> tuple[list[BaseRecord], list[ProbeRecord]]:
        """The records of a shard that the new pool takes from there."""
        here = _Place(folder, shard.number)
        ids = {
            id
            for base in shard.bases
            if (kept := self.kept.get(base)) is not None and kept.place == here
            for id in kept.records
        }
        bases = [base for id, base in shard.bases.items() if id in ids]
        probes = [probe for id, probe in shard.probes.items() if id in ids]
        return bases, probes


def _digest(record: BaseRecord | ProbeRecord) -> str:
    return digest(record.model_dump_json())


# --- the new pool ----------------------------------------------------------------------------


def _write_shards(sources: Sequence[Path], index: _Index, new: Path) -> None:
    numbers = itertools.count()
    for folder in sources:
        for shard in read_shards(folder):
            bases, probes = index.taken(folder, shard)
            if not bases:
                continue
            traces = shard_path(folder, "traces", shard.number)
            write_shard(new, next(numbers), bases, probes, traces)


def _combined(parts: Sequence[_Part]) -> Manifest:
    """The manifest of the new pool, without counts."""
    manifests = list({part.manifest.model_dump_json(): part.manifest for part in parts}.values())
    first = manifests[0]
    least = {name: min(getattr(m.settings, name) for m in manifests) for name in _AT_LEAST}
    return Manifest(
        workload=_joined(m.workload for m in manifests),
        about=_joined((m.about for m in manifests), "\n"),
        workflow=_joined(m.workflow for m in manifests),
        metrics=tuple(dict.fromkeys(name for m in manifests for name in m.metrics)),
        metric=first.metric,
        models=first.models,
        settings=first.settings.model_copy(update=least),
        sources=_sources(manifests),
        parts=tuple(manifests),
    )


def _joined(texts: Iterator[str], by: str = ", ") -> str:
    return by.join(dict.fromkeys(texts))


def _sources(manifests: Sequence[Manifest]) -> dict[str, str]:
    """Hash by name of each data file; a name that stands for several files says of which part."""
    hashes: dict[str, set[str]] = {}
    for manifest in manifests:
        for name, hash_ in manifest.sources.items():
            hashes.setdefault(name, set()).add(hash_)
    return {
        name if len(hashes[name]) == 1 else f"part{number}/{name}": hash_
        for number, manifest in enumerate(manifests, 1)
        for name, hash_ in manifest.sources.items()
    }
