"""Requests with the APIs that are offered for them, from either form of the solvable requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from skeletons.reading import as_row, raw_rows, read_rows
from skeletons.toolbench.apis import Api, ApiRow, Row, Text, function_name, offered_api
from splice.errors import DataError
from splice.queries import Split
from splice.records import Record, digest

QUERIES, APIS = "queries.jsonl", "apis.jsonl"

_SHARES: tuple[Split, ...] = ("train", "validation", "test", "train", "train")


class Asked(Record):
    """A request."""

    id: str
    text: str
    kind: str
    """The subset that it belongs to."""
    apis: tuple[Api, ...]
    relevant: tuple[str, ...] = ()
    """Labels of the APIs that the request was written for, where the file says so."""


class _QueryRow(Row):
    id: Text
    subset: Text
    query: Annotated[Text, Field(min_length=1, pattern=r"\S")]
    api_ids: tuple[Text, ...]
    relevant_api_ids: tuple[Text, ...] = ()


class _IdentifiedApiRow(ApiRow):
    api_id: Text


class _InstructionRow(Row):
    query_id: int | Text
    query: Annotated[Text, Field(min_length=1, pattern=r"\S")]
    api_list: tuple[ApiRow, ...]
    relevant: tuple[tuple[Text, Text], ...] = Field(default=(), alias="relevant APIs")


def read_requests(data: Path) -> tuple[tuple[Asked, ...], tuple[Path, ...]]:
    """The requests of a folder or file, and the files that were read.

    A folder with `queries.jsonl` and `apis.jsonl`; or StableToolBench's `test_instruction` files,
    one or a folder of them.

    Raises:
        DataError: a file is missing or malformed, or a request names an API without a document.
    """
    if (data / QUERIES).is_file():
        paths: tuple[Path, ...] = (data / QUERIES, data / APIS)
        return tuple(_indexed(*paths)), paths
    paths = tuple(sorted(data.glob("*.json"))) if data.is_dir() else (data,)
    if not paths:
        raise DataError(f"{data}: neither {QUERIES} nor a JSON file of requests")
    return tuple(asked for path in paths for asked in _instructions(path)), paths


def part(requests: Iterable[Asked], split: Split) -> tuple[Asked, ...]:
    """The requests of a split, in their order: three in five to train on, one for each other.

    The sets that ToolBench publishes have no split. Requests are dealt in the order of a digest of
    their ids, so the same file always gives the same parts.
    """
    requests = tuple(requests)
    dealt = sorted(request.id for request in requests)
    dealt.sort(key=digest)
    chosen = {name for place, name in enumerate(dealt) if _SHARES[place % len(_SHARES)] == split}
    return tuple(request for request in requests if request.id in chosen)


def _indexed(queries: Path, apis: Path) -> Iterator[Asked]:
    documents = {row.api_id: row for row in read_rows(apis, _IdentifiedApiRow)}
    for place, raw in raw_rows(queries):
        row = as_row(raw, _QueryRow, place)
        for name in (*row.api_ids, *row.relevant_api_ids):
            if name not in documents:
                raise DataError(f"{place}: field 'api_ids': no API {name!r} in {apis.name}")
        yield Asked(
            id=row.id,
            text=row.query,
            kind=row.subset,
            apis=_offered(documents[name] for name in row.api_ids),
            relevant=row.relevant_api_ids,
        )


def _instructions(path: Path) -> Iterator[Asked]:
    for place, raw in raw_rows(path):
        row = as_row(raw, _InstructionRow, place)
        apis = _offered(row.api_list)
        wanted = set(row.relevant)
        yield Asked(
            id=f"{path.stem}/{row.query_id}",
            text=row.query,
            kind=path.stem,
            apis=apis,
            relevant=tuple(api.label for api in apis if api.place[1:] in wanted),
        )


def _offered(rows: Iterable[ApiRow]) -> tuple[Api, ...]:
    """Each API once, under a function name of its own."""
    by_place: Mapping[tuple[str, ...], ApiRow] = {
        (row.category_name, row.tool_name, row.api_name): row for row in rows
    }
    found: dict[str, Api] = {}
    for row in by_place.values():
        wanted = function_name(row.tool_name, row.api_name)
        place, free = 2, wanted
        while free in found:
            free, place = f"{wanted[:60]}_{place}", place + 1
        found[free] = offered_api(row, free)
    return tuple(found.values())
