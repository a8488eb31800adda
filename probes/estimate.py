"""What the rest of a pool will take, judged by the questions that are finished."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from probes.pool import read_shards
from probes.records import BaseRecord, ProbeRecord
from splice.ledger import total_cost
from splice.records import Record


class Amount(Record):
    """A total that is estimated."""

    mean: float
    low: float | None
    high: float | None
    """95% interval by Student's t, as if questions were drawn from a normal distribution; None: one
    question alone gives none. It says nothing about an endpoint that slows down."""


class Estimate(Record):
    """What the questions that are left will take."""

    n_seen: int
    """Finished questions that it is judged by."""
    n_left: int
    calls: Amount
    prompt_tokens: Amount
    completion_tokens: Amount
    cost: Amount | None
    """None: the price of a call is unknown."""
    seconds: Amount
    """With `concurrency` questions in flight, if the endpoint keeps its pace."""
    concurrency: int


def estimate(folder: str | Path, n_left: int, concurrency: int) -> Estimate | None:
    """Judge what `n_left` more questions will take; None if not one is finished.

    Args:
        folder: of the pool.
        n_left: questions that are not complete.
        concurrency: questions that will be in flight.
    """
    totals = list(_totals(folder))
    if not totals:
        return None

    def amount(value: Callable[[_Total], float], scale: float = 1.0) -> Amount:
        return _extrapolated([value(total) for total in totals], n_left * scale)

    is_priced = all(total.cost is not None for total in totals)
    return Estimate(
        n_seen=len(totals),
        n_left=n_left,
        calls=amount(lambda total: total.n_calls),
        prompt_tokens=amount(lambda total: total.prompt_tokens),
        completion_tokens=amount(lambda total: total.completion_tokens),
        cost=amount(lambda total: total.cost or 0.0) if is_priced else None,
        seconds=amount(lambda total: total.elapsed_s, 1 / max(1, min(concurrency, n_left))),
        concurrency=concurrency,
    )


class _Total(Record):
    n_calls: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    elapsed_s: float


def _totals(folder: str | Path) -> Iterator[_Total]:
    """What each base run took with its probes; those that failed or have none are left out."""
    for shard in read_shards(folder):
        probes: dict[str, list[ProbeRecord]] = {}
        for probe in shard.probes.values():
            probes.setdefault(probe.base, []).append(probe)
        for id, base in shard.bases.items():
            if base.failure is None and id in probes:
                yield _total(base, probes[id])


def _total(base: BaseRecord, probes: Sequence[ProbeRecord]) -> _Total:
    ledgers = [base.ledger, *(probe.ledger for probe in probes)]
    return _Total(
        n_calls=sum(ledger.n_calls for ledger in ledgers),
        prompt_tokens=sum(ledger.prompt_tokens for ledger in ledgers),
        completion_tokens=sum(ledger.completion_tokens for ledger in ledgers),
        cost=total_cost(ledger.cost for ledger in ledgers),
        elapsed_s=base.elapsed_s + sum(probe.elapsed_s for probe in probes),
    )


def _extrapolated(values: Sequence[float], n: float) -> Amount:
    """`n` times the mean, with its interval."""
    from scipy.stats import t

    mean = sum(values) / len(values)
    if len(values) == 1:
        return Amount(mean=n * mean, low=None, high=None)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    half = float(t.ppf(0.975, len(values) - 1)) * deviation / math.sqrt(len(values))
    return Amount(mean=n * mean, low=n * max(0.0, mean - half), high=n * (mean + half))
