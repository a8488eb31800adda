"""Pools that are written as a whole, out of others: there is a new pool in the end, or nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from probes.pool import Manifest, read_manifest, shard_path, summarised, write_manifest
from probes.records import BaseRecord, ProbeRecord
from splice.errors import SettingsError, StoreError
from splice.files import write_whole


def require_empty(out: Path) -> None:
    """Check that there is nothing where a pool is to be written.

    Raises:
        SettingsError: there is something.
        StoreError: the folder can't be read.
    """
    try:
        is_taken = out.exists() and any(out.iterdir())
    except OSError as error:
        raise StoreError(f"{out}: {error.strerror}") from None
    if is_taken:
        raise SettingsError(f"{out} is not empty; write into a folder of its own")


@contextmanager
def new_pool(out: Path, manifest: Manifest) -> Iterator[Path]:
    """A folder for the files of a pool, which becomes `out` when the block ends.

    Counts and hashes of the manifest are those of what was written.

    Raises:
        StoreError: the disk is full, or `out` was taken meanwhile; nothing is left behind.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
            # Inside of the scratch folder, which nobody else may read, unlike any other pool.
            new = Path(scratch) / "pool"
            new.mkdir()
            write_manifest(new, manifest)
            yield new
            write_manifest(new, summarised(new, read_manifest(new)))
            os.replace(new, out)
    except OSError as error:
        raise StoreError(f"{error.filename or out}: {error.strerror}") from error


def write_shard(
    new: Path,
    number: int,
    bases: Sequence[BaseRecord],
    probes: Sequence[ProbeRecord],
    traces: Path,
) -> None:
    """Write a shard with a copy of the file of traces that its records refer to."""
    _write_records(shard_path(new, "bases", number), bases)
    _write_records(shard_path(new, "probes", number), probes)
    if traces.exists():
        shutil.copyfile(traces, shard_path(new, "traces", number))


def _write_records(path: Path, records: Sequence[BaseRecord] | Sequence[ProbeRecord]) -> None:
    write_whole(path, "".join(f"{record.model_dump_json()}\n" for record in records))
