"""The self-check: does the machinery find planted gaps, and does it find nothing where nothing is?

Every world of `splice.worlds` is evaluated over several seeds. A planted world must show that the
ranker finds the planted edge more often than chance does and that repairs gain. A null world must
not show a gain: neither in more seeds than chance explains, nor on the mean over all of them. That
a selector adopts something in a null world is no fault; that it wins by it would be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from splice._version import __version__
from splice.concurrency import Progress
from splice.diagnosis import Diagnoser, diagnose
from splice.evaluation import EvaluationResult, EvaluationSettings, PolicyResult, evaluate
from splice.models.scripted import ScriptedModel
from splice.records import Probability, Record, digest
from splice.report.display import WIDTH, aligned, wrap
from splice.selector import Selector
from splice.statistics import Interval, Share, share
from splice.workload import Workload
from splice.worlds import WORLDS, World

ALPHA = 0.001
"""Probability that a null world fails though nothing is wrong. It is shared equally by the tests of
the world: two for each of its policies."""

NOMINAL = 0.025
"""Share of 95% intervals that lie wholly above 0 where there is no gain."""


class SelfCheckSettings(Record):
    """How much is run; the default takes some ten seconds of one core."""

    n_seeds: Annotated[int, Field(ge=2)] = 8
    """Question sets of each world."""
    n_questions: Annotated[int, Field(ge=10)] = 14
    """Questions of each set. For fewer than ten an interval says little."""
    seed: int = 0


class PolicyCheck(Record):
    """One policy in one world, over all seeds."""

    policy: str
    fixed: int
    broken: int
    gain: float
    """Mean over all questions."""
    interval: Interval
    """95%, by the normal approximation."""
    n_above: int
    """Seeds whose 95% interval lies wholly above 0."""
    n_outside: int
    """Seeds whose 95% interval leaves out 0, on either side."""
    chance_above: Probability
    """Of one seed to be among `n_above` if the policy gained nothing; the mean over the seeds."""
    p_above: Probability
    """Of so many seeds above 0, or more, by chance; one-sided, exact."""
    p_gain: Probability
    """Of so high a gain, or a higher one, by chance; one-sided."""


class WorldCheck(Record):
    """One world, over all seeds."""

    world: str
    kind: Literal["planted", "null"]
    n_seeds: int
    n: int
    """Questions of all seeds."""
    base_score: Probability
    top_1: Share | None
    """Questions with a planted edge whose first candidate it is; None: there are no such."""
    top_1_by_chance: Probability | None
    """The same for an edge that is drawn uniformly from the candidates."""
    adopted_better: Share | None
    """Adopted answers among those that score higher than the base answer; None: there are none, or
    the world is not repaired."""
    adopted_worse: Share | None
    """Adopted answers among those that score lower."""
    policies: tuple[PolicyCheck, ...]
    problems: tuple[str, ...]


class SelfCheck(Record):
    """What was checked, and whether it holds."""

    schema_version: Literal[1] = 1
    engine_version: str = __version__
    settings: SelfCheckSettings
    worlds: tuple[WorldCheck, ...]
    ok: bool
    reasons: tuple[str, ...]
    """What is wrong, as `world: problem`."""


class _Run(NamedTuple):
    """One seed of one world."""

    workload: Workload
    result: EvaluationResult


async def run_selfcheck(
    settings: SelfCheckSettings,
    *,
    worlds: Mapping[str, World] = WORLDS,
    selector: Selector | None = None,
    diagnoser: Diagnoser = diagnose,
    progress: Progress | None = None,
) -> SelfCheck:
    """Evaluate all worlds and say what is wrong.

    Args:
        settings: how much is run.
        worlds: what is run.
        selector: the one to check; None: the documented rules.
        diagnoser: the one to check.
        progress: told of each seed that is done; a world is a stage.
    """
    checks = []
    for name, world in worlds.items():
        runs = []
        for place in range(settings.n_seeds):
            seed = _seed(settings.seed, place)
            runs.append(await _run(world, seed, settings.n_questions, selector, diagnoser))
            if progress is not None:
                progress(name, place + 1, settings.n_seeds)
        checks.append(_world_check(name, world, runs))
    reasons = tuple(f"{check.world}: {problem}" for check in checks for problem in check.problems)
    return SelfCheck(settings=settings, worlds=tuple(checks), ok=not reasons, reasons=reasons)


def _seed(seed: int, place: int) -> int:
    """The seed of one question set, so that neighbouring seeds share no set."""
    return int(digest(f"{seed}:{place}")[:8], 16)


async def _run(
    world: World, seed: int, n_questions: int, selector: Selector | None, diagnoser: Diagnoser
) -> _Run:
    workload = world.draw(seed, n_questions)
    result = await evaluate(
        workload,
        ScriptedModel(world.agents(seed)),
        split="synthetic",
        settings=EvaluationSettings(policies=world.policies, budgets=(1.0,), seed=seed),
        selector=selector,
        diagnoser=diagnoser,
    )
    return _Run(workload, result)


# --- what is counted -------------------------------------------------------------------------


def _world_check(name: str, world: World, runs: Sequence[_Run]) -> WorldCheck:
    results = {
        policy: [own for run in runs for own in run.result.policies if own.policy == policy]
        for policy in world.policies
    }
    policies = {policy: policy_check(policy, own) for policy, own in results.items()}
    splice, always = policies.get("splice"), policies.get("always")
    any_policy = results[world.policies[0]]
    n = _n(any_policy)
    check = WorldCheck(
        world=name,
        kind=world.kind,
        n_seeds=len(runs),
        n=n,
        base_score=sum(result.base_score * result.n for result in any_policy) / n,
        top_1=_top_1([run.result for run in runs]),
        top_1_by_chance=_top_1_by_chance([run.workload for run in runs]),
        # `always` makes the same trials, and adopts whatever they answer.
        adopted_better=share(splice.fixed, always.fixed) if splice and always else None,
        adopted_worse=share(splice.broken, always.broken) if splice and always else None,
        policies=tuple(policies.values()),
        problems=(),
    )
    find = planted_problems if world.kind == "planted" else null_problems
    return check.model_copy(update={"problems": tuple(find(check))})


def _n(results: Sequence[PolicyResult]) -> int:
    return sum(result.n for result in results)


def _top_1(results: Sequence[EvaluationResult]) -> Share | None:
    """How often the first edge is the planted one, over all seeds."""
    shares = [
        choice.share
        for result in results
        for choice in result.diagnosis.edge_choice
        if choice.ranker == "splice"
    ]
    return share(sum(share.n_hits for share in shares), sum(share.n for share in shares))


def _top_1_by_chance(workloads: Sequence[Workload]) -> float | None:
    shares = [
        len(example.gap_edges) / len(workload.workflow_of(example).candidate_edges)
        for workload in workloads
        for example in workload.examples
        if example.gap_edges
    ]
    return math.fsum(shares) / len(shares) if shares else None


def policy_check(policy: str, results: Sequence[PolicyResult]) -> PolicyCheck:
    """Pool one policy's results of all seeds of a world.

    Gain and seeds above 0 are taken as reported, so that a fault of the statistics shows. What
    chance explains follows from the numbers of fixed and broken questions alone: where nothing
    helps, each question whose score changed is as likely to be fixed as to be broken. (Scores of
    worlds are 0 or 1.)
    """
    from scipy.special import ndtr
    from scipy.stats import binom

    n = _n(results)
    fixed, broken = sum(r.fixed for r in results), sum(r.broken for r in results)
    gain = math.fsum(r.gain.mean * r.n for r in results) / n
    half = 1.96 * math.sqrt(max(0.0, (fixed + broken) / n - gain**2) / n)
    n_above = sum(r.gain.interval.low > 0 for r in results)
    by_chance = [max(NOMINAL, chance_above(r.n, r.fixed + r.broken)) for r in results]
    chance = math.fsum(by_chance) / len(by_chance)
    return PolicyCheck(
        policy=policy,
        fixed=fixed,
        broken=broken,
        gain=gain,
        interval=Interval(low=gain - half, high=gain + half),
        n_above=n_above,
        n_outside=n_above + sum(r.gain.interval.high < 0 for r in results),
        chance_above=chance,
        p_above=float(binom.sf(n_above - 1, len(results), chance)),
        p_gain=float(ndtr(-_z(gain, n, fixed + broken))),
    )


def _z(gain: float, n: int, n_changed: int) -> float:
    """Standard deviations of a mean gain above 0, if each changed question were a fair coin."""
    if n_changed:
        return gain * n / math.sqrt(n_changed)
    return math.copysign(math.inf, gain) if gain else 0.0


@cache
def chance_above(n: int, n_changed: int) -> float:
    """Probability that a 95% percentile interval lies wholly above 0 although nothing helps.

    Of `n` questions `n_changed` change their score, each up or down with probability one half.
    Computed exactly, for the plain percentile bootstrap with any number of resamples: on few
    questions it exceeds the nominal 2.5%. What the evaluation reports may lie above 0 less often
    than this, but not more often.

    >>> [round(chance_above(20, n_changed), 3) for n_changed in (3, 8, 15)]
    [0.0, 0.035, 0.018]
    """
    import numpy as np
    from scipy.stats import binom

    if not n_changed:
        return 0.0
    n_fixed = np.arange(n_changed + 1)
    # A resample holds any number of changed questions, and its mean is at most 0 if no more than
    # half of them are fixed.
    drawn = np.arange(n + 1)
    at_most_half = binom.cdf(drawn // 2, drawn, n_fixed[:, None] / n_changed)
    p_not_above = at_most_half @ binom.pmf(drawn, n, n_changed / n)
    return float(binom.pmf(n_fixed, n_changed, 0.5)[p_not_above < NOMINAL].sum())


# --- what is wrong ---------------------------------------------------------------------------


def null_problems(check: WorldCheck) -> Iterator[str]:
    """Gains in a world that has none to offer."""
    alpha = ALPHA / (2 * len(check.policies))
    for policy in check.policies:
        if policy.p_above < alpha:
            yield (
                f"{policy.policy} shows a gain in {policy.n_above} seeds, each by chance with "
                f"probability {policy.chance_above:.3f} (p = {policy.p_above:.2g})"
            )
        if policy.p_gain < alpha:
            yield (
                f"{policy.policy} gains {policy.gain:+.3f} where there is nothing to gain "
                f"(p = {policy.p_gain:.2g})"
            )


def planted_problems(check: WorldCheck) -> Iterator[str]:
    """A ranker no better than chance, or repairs without a gain, in a world that has gaps."""
    if check.top_1 is None or check.top_1_by_chance is None:
        yield "no question has a planted edge among its candidates"
    elif check.top_1.interval.low <= check.top_1_by_chance:
        yield (
            f"the planted edge comes first in {check.top_1.n_hits} of {check.top_1.n} questions; "
            f"by chance it would in {check.top_1_by_chance:.2f} of them"
        )
    for policy in check.policies:
        if policy.policy == "splice" and policy.interval.low <= 0:
            yield f"splice gains {policy.gain:+.3f}, which is not above 0 for certain"


# --- as text ---------------------------------------------------------------------------------


def selfcheck_text(check: SelfCheck) -> str:
    """The check as two tables and a verdict."""
    settings = check.settings
    return "\n".join(
        [
            f"{settings.n_seeds} seeds of {settings.n_questions} questions in each world; "
            f"seed: {settings.seed}. Scripted agents: this says nothing about real tasks.",
            "",
            *aligned([_WORLD_COLUMNS, *map(_world_cells, check.worlds)]),
            "",
            *aligned([_POLICY_COLUMNS, *_policy_rows(check.worlds)]),
            "",
            *wrap(_LEGEND, WIDTH),
            "",
            *(f"PROBLEM: {reason}" for reason in check.reasons),
            "The self-check holds." if check.ok else "The self-check FAILS.",
        ]
    )


_WORLD_COLUMNS = (
    "world",
    "kind",
    "n",
    "base",
    "top-1",
    "95% interval",
    "by chance",
    "adopted if better",
    "if worse",
)
_POLICY_COLUMNS = (
    "world",
    "policy",
    "fixed",
    "broken",
    "gain",
    "95% interval",
    "seeds above 0",
    "by chance",
    "without 0",
)
_LEGEND = (
    "top-1: the planted edge comes first. Adopted: of the trials that answered better, or worse. "
    "Seeds above 0: their own 95% interval lies above 0; in null worlds (no_gap, placebo_edge, "
    "same_again) about as many as the column beside it says should. Without 0: on either side."
)


def _world_cells(check: WorldCheck) -> tuple[str, ...]:
    top_1, by_chance = check.top_1, check.top_1_by_chance
    return (
        check.world,
        check.kind,
        f"{check.n}",
        f"{check.base_score:.2f}",
        "-" if top_1 is None else f"{top_1.value:.2f}",
        "-" if top_1 is None else f"{top_1.interval:.2f}",
        "-" if by_chance is None else f"{by_chance:.2f}",
        _hits(check.adopted_better),
        _hits(check.adopted_worse),
    )


def _hits(share: Share | None) -> str:
    return "-" if share is None else f"{share.n_hits}/{share.n}"


def _policy_rows(checks: Sequence[WorldCheck]) -> Iterator[tuple[str, ...]]:
    for check in checks:
        for policy in check.policies:
            yield (
                check.world,
                policy.policy,
                f"{policy.fixed}",
                f"{policy.broken}",
                f"{policy.gain:+.3f}",
                f"{policy.interval:+.3f}",
                f"{policy.n_above}",
                f"{policy.chance_above * check.n_seeds:.1f}" if check.kind == "null" else "-",
                f"{policy.n_outside}",
            )
