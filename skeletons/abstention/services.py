"""Services of the Schema-Guided Dialogue data set, and which of them an agent is told of."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from skeletons.abstention.functions import Name
from skeletons.reading import read_rows
from splice.errors import DataError
from splice.prompts import one_line
from splice.records import NodeId

N_ELSEWHERE = 10
"""Other services that an agent is told of. All of some forty would bury the request."""

_FILE = "services.json"
_SIBLING = "routing_sgd"


ServiceName = Annotated[NodeId, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
"""A name that a node can have."""


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Intent(_Row):
    """Something that a service does."""

    name: Name
    description: str

    @property
    def told(self) -> str:
        """What an agent is told of it: no slots, as a first turn seldom fills them."""
        return f"{self.name}: {one_line(self.description, limit=120)}"


class Service(_Row):
    """A service with what it says of itself."""

    name: ServiceName = Field(alias="service_name")
    description: str
    intents: tuple[Intent, ...]


Services = Mapping[str, Service]
"""Services by name."""


def family(name: str) -> str:
    """What the name of a service has in common with those that do the same.

    >>> family("RentalCars_2")
    'RentalCars'
    """
    return name.partition("_")[0]


def services_file(folder: Path) -> Path:
    """Where the services of a folder of requests are described.

    Raises:
        DataError: neither in the folder nor in the folder `routing_sgd` beside it.
    """
    places = (folder / _FILE, folder.resolve().parent / _SIBLING / _FILE)
    for path in places:
        if path.is_file():
            return path
    raise DataError(
        f"{folder}: misrouted requests need the descriptions of the services: neither "
        f"{' nor '.join(map(str, places))} is there"
    )


def read_services(path: Path) -> Services:
    """The services of a file.

    Raises:
        DataError: it can't be read, or a row is no service.
    """
    return {row.name: row for row in read_rows(path, Service)}


def elsewhere(request: str, received_by: str, gold: str, services: Services) -> Mapping[str, str]:
    """The other services that the one which received a request is told of, in a drawn order.

    One of each of some families, all drawn by the request's id, never of the family that received
    it. Where another service should have, that one stands for its family and is always there; its
    place is as good as any. So neither the length nor the order of the list tells anything.

    Args:
        request: id of the request.
        received_by: who got it.
        gold: who should have; `received_by` itself if it was routed correctly.
        services: all there are.
    """
    rng = random.Random(f"misrouting/{request}")
    families: dict[str, list[str]] = defaultdict(list)
    for name in sorted(services):
        families[family(name)].append(name)
    taken = {family(received_by), family(gold)}
    others = [rng.choice(names) for name, names in families.items() if name not in taken]
    listed = [] if gold == received_by else [gold]
    listed += rng.sample(others, min(len(others), N_ELSEWHERE - len(listed)))
    rng.shuffle(listed)
    return {name: one_line(services[name].description, limit=120) or name for name in listed}
