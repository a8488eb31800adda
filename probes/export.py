"""A probe pool's two tables as files for other tools: Parquet or CSV.

Reads   a pool
Writes  probes.parquet and bases.parquet (or .csv), and manifest.json as it stands in the pool

The same pool gives the same bytes, with the same version of whatever writes Parquet.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, TypeAlias

from probes.pool import Damage, Manifest, read_manifest, read_shards, shard_numbers
from probes.table import (
    Column,
    Kind,
    Row,
    Value,
    base_columns,
    probe_columns,
    rows_of_bases,
    rows_of_probes,
)
from splice.errors import SettingsError, StoreError
from splice.files import read_text
from splice.records import Record

Format: TypeAlias = Literal["parquet", "csv"]


class Exported(Record):
    """What an export wrote."""

    n_bases: int
    n_probes: int
    damage: tuple[Damage, ...] = ()
    """Lines of the pool that are no records; they were left out."""


def export(folder: str | Path, out: str | Path, *, format: Format) -> Exported:
    """Write the tables of a pool, one shard after another.

    In CSV the first line names the columns, booleans are 1 and 0, and what is not known is empty.
    In Parquet each shard is a row group.

    Args:
        folder: of the pool.
        out: folder to write to, made if need be; an earlier export there is replaced.
        format: of the tables.

    Raises:
        SettingsError: `out` is a pool, or what writes Parquet is not installed.
        StoreError: the pool can't be read, or a file can't be written: an earlier export stays.
    """
    folder, out = Path(folder), Path(out)
    manifest = read_manifest(folder)
    if shard_numbers(out) or (out / "lock").exists():
        raise SettingsError(f"{out} is a probe pool; export into a folder of its own")
    table = _Parquet if format == "parquet" else _Csv
    original = read_text(folder / "manifest.json", StoreError)
    damage: list[Damage] = []
    n_bases = n_probes = 0
    names = (f"bases.{format}", f"probes.{format}")
    with _replacing(out, (*names, "manifest.json")) as new:
        (new / "manifest.json").write_text(original, "utf-8")
        with ExitStack() as opened:
            bases = table(new / names[0], base_columns(manifest.metrics), manifest)
            opened.callback(bases.close)
            probes = table(new / names[1], probe_columns(manifest.metrics), manifest)
            opened.callback(probes.close)
            for shard in read_shards(folder, damage):
                n_bases += bases.write(list(rows_of_bases(shard, manifest)))
                n_probes += probes.write(list(rows_of_probes(shard, manifest)))
    return Exported(n_bases=n_bases, n_probes=n_probes, damage=tuple(damage))


@contextmanager
def _replacing(out: Path, names: Sequence[str]) -> Iterator[Path]:
    """A folder to write to, from which the files take their places if nothing was raised.

    Raises:
        StoreError: a file can't be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out, prefix=".export.") as scratch:
            yield Path(scratch)
            for name in names:
                os.replace(Path(scratch) / name, out / name)
    except OSError as error:
        raise StoreError(f"{out} can't be written: {error.strerror or error}") from error


class _Csv:
    """A CSV file."""

    def __init__(self, path: Path, columns: Sequence[Column], manifest: Manifest) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow([column.name for column in columns])

    def write(self, rows: Sequence[Row]) -> int:
        self._writer.writerows(_plain(row.values()) for row in rows)
        return len(rows)

    def close(self) -> None:
        self._file.close()


def _plain(values: Iterable[Value]) -> list[Value]:
    return [int(value) if isinstance(value, bool) else value for value in values]


_ARROW_TYPES: Final[Mapping[Kind, str]] = {
    "id": "string",
    "int": "int64",
    "float": "float64",
    "bool": "bool",
}


class _Parquet:
    """A Parquet file; each write is a row group."""

    def __init__(self, path: Path, columns: Sequence[Column], manifest: Manifest) -> None:
        self._arrow, parquet = _arrow()
        fields = [
            self._arrow.field(
                column.name,
                self._arrow.type_for_alias(_ARROW_TYPES[column.kind]),
                metadata={"meaning": column.meaning},
            )
            for column in columns
        ]
        metadata = {
            "splice.pool_version": str(manifest.schema_version),
            "splice.engine_version": manifest.engine_version,
        }
        self._schema = self._arrow.schema(fields, metadata=metadata)
        self._writer = parquet.ParquetWriter(path, self._schema, compression="zstd")

    def write(self, rows: Sequence[Row]) -> int:
        if rows:
            self._writer.write_table(self._arrow.Table.from_pylist(rows, schema=self._schema))
        return len(rows)

    def close(self) -> None:
        self._writer.close()


def _arrow() -> tuple[Any, Any]:
    """The modules `pyarrow` and `pyarrow.parquet`.

    Raises:
        SettingsError: they are not installed.
    """
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise SettingsError(
            "writing Parquet needs pyarrow: pip install 'splice-repair[parquet]'; or export CSV"
        ) from None
