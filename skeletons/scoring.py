"""Scores of short answers: exact match, token F1 and containment, after the usual normalisation.

The normalisation is that of SQuAD, which HotpotQA, 2WikiMultihopQA and MuSiQue use as well: lower
case, no punctuation, no English articles, single spaces. A question with several accepted answers
scores by the best of them.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

from splice.text import is_refusal

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation + "‘’“”´`–—…«»")

METRICS = ("f1", "exact_match", "contains")


def normalised(text: str) -> str:
    """An answer without case, punctuation, articles and superfluous spaces.

    >>> normalised("The  Beatles' 1st  LP!")
    'beatles 1st lp'

    Source: Rajpurkar et al. 2016, the evaluation of SQuAD 1.1. Two departures: the text is brought
    into Unicode form NFKC first, and typographic quotes and dashes count as punctuation.
    """
    text = unicodedata.normalize("NFKC", text).lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(answer: str, reference: str) -> float:
    """1.0 if both are the same once normalised, else 0.0."""
    return float(normalised(answer) == normalised(reference))


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of token precision and recall, in [0, 1].

    As in HotpotQA, `yes`, `no` and `noanswer` share no credit with longer answers.
    """
    said, wanted = normalised(answer), normalised(reference)
    if said != wanted and {said, wanted} & {"yes", "no", "noanswer"}:
        return 0.0
    a, b = said.split(), wanted.split()
    common = sum((Counter(a) & Counter(b)).values())
    if not common:
        return float(a == b)
    precision, recall = common / len(a), common / len(b)
    return 2 * precision * recall / (precision + recall)


def contains(answer: str, reference: str) -> float:
    """1.0 if the reference stands in the answer as whole tokens, once both are normalised."""
    said, wanted = normalised(answer), normalised(reference)
    return float(bool(wanted) and f" {wanted} " in f" {said} ")


def short_answer_scores(answer: str | None, references: Sequence[str]) -> dict[str, float]:
    """The three scores, each by the reference that suits the answer best.

    No answer, and an answer that says it has none, score 0.
    """
    if answer is None or is_refusal(answer):
        return dict.fromkeys(METRICS, 0.0)
    functions = {"f1": token_f1, "exact_match": exact_match, "contains": contains}
    return {
        name: max((function(answer, reference) for reference in references), default=0.0)
        for name, function in functions.items()
    }
