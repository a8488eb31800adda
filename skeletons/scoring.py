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
_SIGNS = frozenset(string.punctuation + "´−")
"""Punctuation by SQuAD, which Unicode counts as symbols in part, and two signs like it."""

_YES_NO = frozenset(("yes", "no"))
_CLOSED = _YES_NO | {"noanswer"}

METRICS = ("f1", "exact_match", "contains")


def normalised(text: str) -> str:
    """An answer without case, punctuation, articles and superfluous spaces.

    >>> normalised("The  Beatles' 1st  LP!")
    'beatles 1st lp'

    Source: Rajpurkar et al. 2016, the evaluation of SQuAD 1.1. Departures: the text is brought into
    Unicode form NFKC, all that Unicode counts as punctuation is dropped, and so are characters that
    can't be seen; an answer that is nothing but articles keeps them ("The The" is a band).

    As there, a decimal point is punctuation: "3.5" and "35" are the same.
    """
    # Before NFKC as well, which makes a space and a combining mark of an acute accent.
    text = _without_punctuation(unicodedata.normalize("NFKC", _without_punctuation(text)).lower())
    words = _ARTICLES.sub(" ", text).split() or text.split()
    return " ".join(words)


def _without_punctuation(text: str) -> str:
    return "".join(
        c for c in text if c not in _SIGNS and not unicodedata.category(c).startswith(("P", "Cf"))
    )


def exact_match(answer: str, reference: str) -> float:
    """1.0 if both are the same once normalised, and something is left of them, else 0.0."""
    wanted = normalised(reference)
    return float(bool(wanted) and normalised(answer) == wanted)


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of token precision and recall, in [0, 1].

    As in HotpotQA, `yes`, `no` and `noanswer` share no credit with longer answers.
    """
    said, wanted = normalised(answer), normalised(reference)
    if said != wanted and {said, wanted} & _CLOSED:
        return 0.0
    a, b = said.split(), wanted.split()
    common = sum((Counter(a) & Counter(b)).values())
    if not common:
        return 0.0
    precision, recall = common / len(a), common / len(b)
    return 2 * precision * recall / (precision + recall)


def contains(answer: str, reference: str) -> float:
    """1.0 if the reference stands in the answer as whole tokens, once both are normalised.

    `yes` and `no` count at either end of the answer only, and not if both are there: "there is no
    such film" answers nothing.
    """
    said, wanted = normalised(answer).split(), normalised(reference).split()
    if not said or not wanted:
        return 0.0
    if wanted[0] in _YES_NO and len(wanted) == 1:
        return float(_YES_NO & set(said) == set(wanted) and wanted[0] in (said[0], said[-1]))
    n = len(wanted)
    return float(any(said[start : start + n] == wanted for start in range(len(said) - n + 1)))


def short_answer_scores(answer: str | None, references: Sequence[str]) -> dict[str, float]:
    """The three scores, each by the reference that suits the answer best.

    No answer, and one that says it has none, score 0, unless a reference says just that.
    """
    if answer is None:
        return dict.fromkeys(METRICS, 0.0)
    if is_refusal(answer) and not any(exact_match(answer, wanted) for wanted in references):
        return dict.fromkeys(METRICS, 0.0)
    functions = {"f1": token_f1, "exact_match": exact_match, "contains": contains}
    return {
        name: max((function(answer, reference) for reference in references), default=0.0)
        for name, function in functions.items()
    }
