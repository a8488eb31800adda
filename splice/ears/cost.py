"""What judging costs: every query at the time of use, or once to train an agent that abstains.

Money is in one currency throughout. Published figures, as an example of the arguments: a call to
the cheapest judge costs 0.009 USD; four judges cost 1, 4.1, 6 and 9.3 such calls, together 20.4;
curation cost 2,525 USD and training 24 hours on 8 GPUs at 4 USD an hour (EARS Table 2, 4.5). They
are no defaults: prices are the user's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def ensemble_cost(relative_costs: Iterable[float]) -> float:
    """Cost of asking every judge once, in calls to the cheapest judge.

    Args:
        relative_costs: of one call to each judge, in calls to the cheapest one.

    Raises:
        ValueError: a cost is below 0 or not finite.

    >>> ensemble_cost([4.1, 6, 9.3, 1])
    20.4
    """
    costs = list(relative_costs)
    _require_amounts(*costs)
    return math.fsum(costs)


def gate_cost(n_queries: int, price: float, relative_cost: float) -> float:
    """Cost of judging every reply before it is used: `n_queries * price * relative_cost`.

    Args:
        n_queries: replies that are judged.
        price: of one call to the cheapest judge.
        relative_cost: of judging one reply, in calls to the cheapest judge (`ensemble_cost`).

    Raises:
        ValueError: an amount is below 0 or not finite.

    Source: EARS 4.5.
    """
    _require_amounts(n_queries, price, relative_cost)
    return n_queries * price * relative_cost


def offline_cost(curation: float, gpu_hours: float, hourly_rate: float) -> float:
    """Cost of an agent that needs no gate: `curation + gpu_hours * hourly_rate`.

    Args:
        curation: cost of the judges' labels for the training data.
        gpu_hours: of training, summed over the GPUs.
        hourly_rate: of one GPU.

    Raises:
        ValueError: an amount is below 0 or not finite.

    Source: EARS 4.5.
    """
    _require_amounts(curation, gpu_hours, hourly_rate)
    return curation + gpu_hours * hourly_rate


def break_even(offline: float, price: float, relative_cost: float) -> float | None:
    """Queries at which a gate has cost as much as training: `offline / (price * relative_cost)`.

    Not rounded. None if the gate costs nothing, as it then never does.

    Args:
        offline: cost of training (`offline_cost`).
        price: of one call to the cheapest judge.
        relative_cost: of judging one reply, in calls to the cheapest judge.

    Raises:
        ValueError: an amount is below 0 or not finite.

    Source: EARS 4.5.
    """
    _require_amounts(offline, price, relative_cost)
    per_query = price * relative_cost
    return offline / per_query if per_query else None


def _require_amounts(*amounts: float) -> None:
    for amount in amounts:
        if not (math.isfinite(amount) and amount >= 0.0):
            raise ValueError(f"an amount is finite and at least 0, not {amount!r}")
