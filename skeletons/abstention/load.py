"""Loading the workload: from folders of requests to workflows, examples and a scorer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from skeletons.abstention.references import METRICS, Asked, score
from skeletons.abstention.rows import Source, no_format, read_requests, source_of
from skeletons.abstention.services import Services, read_services, services_file
from skeletons.reading import raw_rows, sha256
from splice.errors import DataError
from splice.queries import Split
from splice.records import Query, digest
from splice.workflow import Agent, Workflow, load_workflow
from splice.workload import Example, Options, Workload, choose

SOURCES: Final[tuple[Source, ...]] = get_args(Source)

OPTIONS: Mapping[str, tuple[str, ...]] = {"sources": ("all", *SOURCES)}
"""Choices by option; the first is taken where none is given."""

Shares = Mapping[Split, float]
"""Which part of a file belongs to which split; the parts make up 1."""

FILES: Mapping[Source, Mapping[str, Shares]] = {
    "when2call": {"dev": {"train": 2 / 3, "validation": 1 / 3}, "test": {"test": 1.0}},
    "bfcl": {"single_turn": {"train": 0.4, "validation": 0.1, "test": 0.5}},
    "in3": {"train": {"train": 1.0}, "val": {"validation": 1.0}, "test": {"test": 1.0}},
    "misrouting": {"train": {"train": 2 / 3, "validation": 1 / 3}, "test": {"test": 1.0}},
}
"""Files of each data set by name without suffix, and how each is dealt over the splits."""

_STEMS = tuple(dict.fromkeys(stem for files in FILES.values() for stem in files))


class _Read(NamedTuple):
    requests: tuple[Asked, ...]
    hashes: Mapping[str, str]


def load(data: Path | None, *, split: Split, options: Options) -> Workload:
    """Load requests that are to be carried out or abstained from.

    Args:
        data: folder of one data set, or a folder that holds those of several; what else is in the
            latter is passed over.
        split: which part of each.
        options: `sources`, the one data set that is wanted, or `all` that are there.

    Raises:
        DataError: no data is given, a file is missing or malformed, a data set is there twice or
            not at all, or nothing is in the split.
        SettingsError: an option that does not exist.
    """
    chosen = choose(options, OPTIONS)["sources"]
    if data is None:
        raise DataError("abstention ships no requests: give a folder of them")
    found = _folders(data)
    wanted = [source for source in SOURCES if source in found and chosen in ("all", source)]
    if not wanted:
        raise DataError(f"{data}: no folder in it holds requests of {chosen}")
    read: Mapping[Source, _Read] = {
        source: _read(source, found[source], split) for source in wanted
    }
    if split != "test":
        read = _without_tested(read, found)
    host = load_workflow(Path(__file__).with_name("workflow.toml"))
    examples = tuple(
        _example(source, request, host)
        for source, part in read.items()
        for request in part.requests
    )
    if not examples:
        raise DataError(f"{data}: no request is in the {split} split")
    return Workload(
        name="abstention",
        about=_about(read),
        workflow=host,
        examples=examples,
        metrics=METRICS,
        score=score,
        sources={
            f"{source}/{name}": value
            for source, part in read.items()
            for name, value in part.hashes.items()
        },
    )


def _folders(data: Path) -> Mapping[Source, Path]:
    """Folders by the data set that they hold: `data` itself, or those in it.

    Raises:
        DataError: `data` is no folder, its files are of no known format, or two hold the same.
    """
    if not data.is_dir():
        raise DataError(f"{data}: not a folder")
    own = next(_files(data), None)
    if own is not None:
        place, row = next(raw_rows(own))
        source = source_of(row)
        if source is None:
            raise no_format(place)
        return {source: data}
    found: dict[Source, Path] = {}
    for folder in sorted(path for path in data.iterdir() if path.is_dir()):
        source = next(filter(None, map(source_of, map(_first_row, _files(folder)))), None)
        if source in found:
            raise DataError(f"{data}: both {found[source].name} and {folder.name} hold {source}")
        if source is not None:
            found[source] = folder
    return found


def _files(folder: Path) -> Iterator[Path]:
    paths = (folder / f"{stem}.jsonl" for stem in _STEMS)
    return (path for path in paths if path.is_file())


def _first_row(path: Path) -> Any:
    """The first row of a file that may be anything; None if there is none."""
    try:
        with path.open(encoding="utf-8") as lines:
            return json.loads(lines.readline())
    except (OSError, ValueError, RecursionError):
        return None


def _read(source: Source, folder: Path, split: Split) -> _Read:
    """The requests of one data set that belong to a split."""
    stem, shares = next((stem, parts) for stem, parts in FILES[source].items() if split in parts)
    path = folder / f"{stem}.jsonl"
    paths = [path]
    services: Services = {}
    if source == "misrouting":
        paths.append(services_file(folder))
        services = read_services(paths[-1])
    requests = tuple(read_requests(path, source, services))
    splits = dealt((request.text for request in requests), shares)
    return _Read(
        tuple(request for request in requests if splits[request.text] == split),
        {each.name: sha256(each) for each in paths},
    )


def _without_tested(
    read: Mapping[Source, _Read], found: Mapping[Source, Path]
) -> Mapping[Source, _Read]:
    """What was read, without requests that the test split of another data set that is there has."""
    tests = {
        source: {request.text for request in _read(source, folder, "test").requests}
        for source, folder in found.items()
    }
    return {
        source: part._replace(
            requests=tuple(
                request
                for request in part.requests
                if not any(
                    request.text in texts for other, texts in tests.items() if other != source
                )
            )
        )
        for source, part in read.items()
    }


def dealt(texts: Iterable[str], shares: Shares) -> Mapping[str, Split]:
    """The split of each text: so many of the distinct ones to each, in the order of their digests.

    Equal requests are never parted, and the order of the rows makes no difference.

    >>> dealt(["a", "b", "a", "c"], {"train": 2 / 3, "validation": 1 / 3})
    {'c': 'train', 'b': 'train', 'a': 'validation'}
    """
    distinct = sorted(set(texts), key=digest)
    ends = tuple(accumulate(shares.values()))
    splits = {}
    for place, text in enumerate(distinct):
        middle = (place + 0.5) / len(distinct)
        splits[text] = next(s for s, end in zip(shares, ends, strict=True) if middle < end)
    return splits


def _example(source: Source, request: Asked, host: Workflow) -> Example:
    return Example(
        query=Query(id=f"{source}/{request.id}", text=request.text),
        reference=request.reference(),
        kind=request.kind,
        workflow=_workflow(request, host),
    )


def _workflow(request: Asked, host: Workflow) -> Workflow:
    """The host with its agent as the one that received the request."""
    (agent,) = host.agents
    received: Agent = agent.model_copy(
        update={"id": request.agent, "role": request.role, "abilities": request.abilities}
    )
    return host.changed(nodes=(received,), output=received.id, elsewhere=request.elsewhere)


def _about(read: Mapping[Source, _Read]) -> str:
    counted = ", ".join(f"{len(part.requests)} of {source}" for source, part in read.items())
    labels = Counter(request.label for part in read.values() for request in part.requests)
    told = ", ".join(f"{count} {label}" for label, count in sorted(labels.items()))
    return (
        f"Requests to one agent with functions ({counted}), which it should carry out or abstain "
        f"from: {told}. Labels are those of the data sets, read as the four categories; scored is "
        "whether what should be carried out was called for, with the right arguments where the "
        "data set has them."
    )
