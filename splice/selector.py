"""After a trial: how likely the candidate answer is better, and whether it is adopted (method 2.8).

Three tiers of selectors share one protocol: documented rules (here), a model of the process
evidence, and a language model. All give three likelihoods; the rule that decides is apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from splice.records import Decision, Evidence, Likelihoods, Probability, Record
from splice.text import is_refusal


class SelectorInput(Record):
    """Everything that a selector may look at; no reference answer is among it."""

    question: str
    workflow: str
    """What the workflow does, or its name."""
    base_score: Probability
    base_answer: str | None
    candidate_answer: str | None
    evidence: Evidence


@runtime_checkable
class Selector(Protocol):
    """Anything that can tell how a trial turned out."""

    async def judge(self, case: SelectorInput) -> Likelihoods:
        """Likelihoods that the candidate answer is better, as good, or worse."""
        ...


class Rule(NamedTuple):
    """One reason to think well or ill of a trial."""

    reason: str
    strength: Callable[[SelectorInput], float]
    """How much the rule applies, from 0 to 1."""
    beneficial: float = 0.0
    neutral: float = 0.0
    harmful: float = 0.0
    """What the rule adds, at full strength, to the log-odds of each outcome."""


def _untraceable(evidence: Evidence) -> float:
    """Share of the receiver's new content that it can't have read; words or numbers, the higher."""
    return max(evidence.untraceable, evidence.num_untraceable)


def _traceable(evidence: Evidence) -> float:
    """The rest; one half, which is no evidence either way, if it added neither word nor number."""
    has_added = evidence.n_add or evidence.num_msg or evidence.num_ctx or evidence.num_untraceable
    return 1 - _untraceable(evidence) if has_added else 0.5


def _strongly_traceable(evidence: Evidence) -> float:
    """From 0 where half of the new content can be traced to 1 where all of it can."""
    return max(0.0, 2 * _traceable(evidence) - 1)


def _survives(evidence: Evidence) -> bool:
    """Whether the receiver's new content can be what changed the answer."""
    return evidence.surv_final > 0 or not evidence.n_add


def _looked_up(evidence: Evidence) -> float:
    """How much more of the new content than of the old stands where the message points to."""
    return max(0.0, evidence.focus_new - evidence.focus_old)


def _is_resolved(case: SelectorInput) -> bool:
    return case.evidence.is_abstention_resolved or case.evidence.is_answer_refusal_resolved


def _replaced(case: SelectorInput) -> float:
    """How much of an answer that said something gave way to another."""
    if _is_resolved(case) or is_refusal(case.base_answer) or is_refusal(case.candidate_answer):
        return 0.0
    return case.evidence.ans_change


RULES: tuple[Rule, ...] = (
    Rule(
        "The receiver had nothing to say before and answers now, with content that it could read. "
        "On real two-hop questions this alone fixed answers and broke none.",
        lambda case: case.evidence.is_abstention_resolved * _traceable(case.evidence),
        beneficial=2.0,
    ),
    Rule(
        "The old answer declined and the new one does not: there was nothing to lose.",
        lambda case: case.evidence.is_answer_refusal_resolved * _traceable(case.evidence),
        beneficial=1.5,
    ),
    Rule(
        "The new content stands in the message or in the receiver's own context, and reaches the "
        "answer: the message did what it was sent for.",
        lambda case: _survives(case.evidence) * _strongly_traceable(case.evidence),
        beneficial=2.0,
    ),
    Rule(
        "The new content stands in the receiver's documents about what the message names, and the "
        "old did not: it looked up the right entry instead of another.",
        lambda case: _survives(case.evidence) * _looked_up(case.evidence),
        beneficial=2.0,
    ),
    Rule(
        "An answer that said something is replaced: the trials that broke answers were those in "
        "which the receiver had answered already.",
        _replaced,
        harmful=1.5,
    ),
    Rule(
        "The new answer declines and the old one did not: what was known is lost.",
        lambda case: float(case.evidence.is_answer_refusal_new),
        harmful=3.0,
    ),
    Rule(
        "Both answers decline: nothing is won or lost.",
        lambda case: float(is_refusal(case.base_answer) and is_refusal(case.candidate_answer)),
        neutral=3.0,
    ),
    Rule(
        "A node abstains that did not: the message took something away or confused it.",
        lambda case: float(case.evidence.is_abstention_new),
        harmful=1.5,
    ),
    Rule(
        "New content that stands neither in the message nor in the receiver's context is made up.",
        lambda case: _untraceable(case.evidence),
        harmful=1.5,
    ),
    Rule(
        "The receiver dropped words that its own context supports: it gave up something right, "
        "unless these words are about something else than the message names.",
        lambda case: case.evidence.del_supported * (1 - _looked_up(case.evidence)),
        harmful=1.0,
    ),
    # Only mildly: a receiver that looks up what the message named need not repeat it.
    Rule(
        "Nothing of the message shows in the receiver's reply, so the change may be chance.",
        lambda case: float(case.evidence.is_ignored) * (1 - _looked_up(case.evidence)),
        neutral=1.0,
        harmful=0.5,
    ),
    Rule(
        "Nothing that the receiver added reached the answer: what changed it is not the message.",
        lambda case: float(not _survives(case.evidence)),
        neutral=0.5,
        harmful=0.5,
    ),
    Rule(
        "The answer moved to the source's own answer: a copied answer closes no gap.",
        lambda case: max(0.0, case.evidence.copies_source),
        harmful=0.5,
    ),
)
"""All rules that `RuleSelector` goes by. The weights are judgement, not fitted; the directions and
the order of sizes come from runs on two-hop questions and from method 2.7."""

_NEUTRAL_PRIOR = 0.5
"""Most trials that change the wording of an answer do not change its score."""


def normalised(scores: Sequence[float], temperature: float = 1.0) -> Likelihoods:
    """Likelihoods from unnormalised log-likelihoods of beneficial, neutral and harmful."""
    highest = max(scores)
    odds = [math.exp((score - highest) / temperature) for score in scores]
    beneficial, neutral, harmful = (share / sum(odds) for share in odds)
    return Likelihoods(beneficial=beneficial, neutral=neutral, harmful=harmful)


class RuleSelector:
    """Selector that needs no training: the sum of `RULES` as log-odds, normalised."""

    async def judge(self, case: SelectorInput) -> Likelihoods:
        """Likelihoods by the rules; never 0 or 1."""
        beneficial, neutral, harmful = 0.0, _NEUTRAL_PRIOR, 0.0
        for rule in RULES:
            strength = rule.strength(case)
            beneficial += strength * rule.beneficial
            neutral += strength * rule.neutral
            harmful += strength * rule.harmful
        return normalised((beneficial, neutral, harmful))


_TIE = 1e-12
"""Relative difference of the two sides up to which they are equal: rounding is no evidence."""


def decide(
    likelihoods: Likelihoods,
    *,
    base_score: float,
    weighting: Literal["headroom", "none"] = "headroom",
    margin: float = 0.0,
) -> Decision:
    r"""Adopt the candidate answer iff the gain side exceeds the loss side; ties are retained.

    With `headroom` weighting the sides are `p_beneficial * (1 - base_score)` and `p_harmful *
    base_score`, so a better original needs stronger evidence; with `none` they are the bare
    likelihoods. That of "neutral" does not matter.

    Args:
        likelihoods: what a selector says.
        base_score: predicted score of the base answer, in [0, 1].
        weighting: whether gain and loss are weighted by what there is to win and to lose.
        margin: by how much the gain side must exceed the loss side.

    Source: SPLICE 4.2 for the weighting in words. That the weights enter linearly is our reading.

    >>> decision = decide(Likelihoods(beneficial=0.5, neutral=0.3, harmful=0.2), base_score=0.6)
    >>> print(decision.action, "as", decision.reason.replace(" outweighs ", "\n  outweighs "))
    adopt as chance of better (0.50 x headroom 0.40 = 0.200)
      outweighs chance of worse (0.20 x base score 0.60 = 0.120)
    """
    gain, loss = likelihoods.beneficial, likelihoods.harmful
    gain_text, loss_text = f"{gain:.2f}", f"{loss:.2f}"
    if weighting == "headroom":
        gain, loss = gain * (1 - base_score), loss * base_score
        gain_text += f" x headroom {1 - base_score:.2f} = {gain:.3f}"
        loss_text += f" x base score {base_score:.2f} = {loss:.3f}"
    is_adopted = gain > loss + margin and not math.isclose(gain, loss + margin, rel_tol=_TIE)
    verb = "outweighs" if is_adopted else "does not outweigh"
    by_margin = f" by more than {margin:g}" if margin else ""
    return Decision(
        action="adopt" if is_adopted else "retain",
        reason=f"chance of better ({gain_text}) {verb} chance of worse ({loss_text}){by_margin}",
        base_score=base_score,
        likelihoods=likelihoods,
        weighting=weighting,
        margin=margin,
        gain_side=gain,
        loss_side=loss,
    )
