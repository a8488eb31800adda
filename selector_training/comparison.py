"""Selectors of whatever tier on the same decisive trials: what they would adopt, and what of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Final

from selector_training.counting import by_question, gain
from selector_training.pairs import OUTCOMES, TrainingExample
from selector_training.tables import Question
from splice.language import LanguageSelector, selector_messages
from splice.records import Likelihoods, Probability, Record
from splice.report.display import aligned, wrap
from splice.selector import Selector, decide
from splice.statistics import Gain


class Adoption(Record):
    """What adopting some of the examples comes to."""

    n: int
    """Examples, adopted or not."""
    n_adopted: int
    n_fixed: int
    """Adopted and beneficial."""
    n_broken: int
    """Adopted and harmful."""
    expected_gain: Gain
    """Score change of an example, mean by question; what is not adopted changes nothing."""


class Evaluation(Adoption):
    """How a selector did on examples of known outcome; `splice.selector.decide` decides."""

    accuracy: Probability
    """Share of the examples whose likeliest class is theirs."""
    log_loss: float
    """Mean of -log of the likelihood of what came true."""


_LEAST_LIKELIHOOD: Final = 1e-12
"""A selector that rules out what came true pays as if it had thought it this likely."""


async def evaluate(selector: Selector, examples: Sequence[TrainingExample]) -> Evaluation:
    """Measure a selector of whatever tier on the same examples.

    Raises:
        ValueError: there are no examples.
        ModelError: the selector's model gave no usable answer.
    """
    if not examples:
        raise ValueError("no examples to measure a selector on")
    judged: Sequence[Likelihoods]
    if isinstance(selector, LanguageSelector):
        judged = await selector.judge_prompts(
            [selector_messages(example.case, example.block) for example in examples]
        )
    else:
        judged = await asyncio.gather(*(selector.judge(example.case) for example in examples))
    both = tuple(zip(judged, examples, strict=True))
    likelihoods = [
        (found.beneficial, found.neutral, found.harmful)[OUTCOMES.index(example.outcome)]
        for found, example in both
    ]
    adopted = [
        decide(found, base_score=example.case.base_score).action == "adopt"
        for found, example in both
    ]
    n = len(examples)
    return Evaluation(
        **dict(adoption(examples, adopted)),
        accuracy=sum(_likeliest(found) == example.outcome for found, example in both) / n,
        log_loss=-sum(math.log(max(share, _LEAST_LIKELIHOOD)) for share in likelihoods) / n,
    )


def adoption(examples: Sequence[TrainingExample], adopted: Sequence[bool]) -> Adoption:
    """What it comes to if these of the examples are adopted.

    Args:
        examples: one or more.
        adopted: for each of them.

    Raises:
        ValueError: there are no examples, or lengths differ.
    """
    taken = [example for example, is_taken in zip(examples, adopted, strict=True) if is_taken]
    changes = [
        example.delta if is_taken else 0.0
        for example, is_taken in zip(examples, adopted, strict=True)
    ]
    questions = [Question(example.workload, example.group) for example in examples]
    return Adoption(
        n=len(examples),
        n_adopted=len(taken),
        n_fixed=sum(example.outcome == "beneficial" for example in taken),
        n_broken=sum(example.outcome == "harmful" for example in taken),
        expected_gain=gain(by_question(questions, changes)),
    )


def _likeliest(found: Likelihoods) -> str:
    shares = (found.beneficial, found.neutral, found.harmful)
    return OUTCOMES[shares.index(max(shares))]


# --- the page --------------------------------------------------------------------------------

_LEGEND: Final = (
    "adopt, fix, harm: trials adopted, of them beneficial and harmful; gain: score change of a trial, "
    "mean by question; interval: 95%, by a bootstrap over questions; accuracy, log loss: of the three "
    "classes."
)


def comparison_text(found: Mapping[str, Adoption]) -> str:
    """A table of selectors by name, and what its columns mean."""
    head = ("selector", "n", "adopt", "fix", "harm", "gain", "interval", "accuracy", "log loss")
    return "\n".join(
        [*aligned([head, *(_row(*each) for each in found.items())]), "", *wrap(_LEGEND, 100)]
    )


def _row(name: str, row: Adoption) -> tuple[str, ...]:
    known = (f"{row.accuracy:.2f}", f"{row.log_loss:.3f}") if isinstance(row, Evaluation) else None
    return (
        name,
        f"{row.n}",
        f"{row.n_adopted}",
        f"{row.n_fixed}",
        f"{row.n_broken}",
        f"{row.expected_gain.mean:+.3f}",
        f"{row.expected_gain.interval:+.3f}",
        *(known or ("-", "-")),
    )
