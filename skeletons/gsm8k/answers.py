"""Numbers in answers to word problems, read exactly."""

from __future__ import annotations

import re
from fractions import Fraction

from splice.text import last_answer_line

_MARKS = str.maketrans({"−": "-", "–": "-", "⁄": "/", "，": ",", "．": "."})
_NUMBER = re.compile(
    # A hyphen after a word, a number or a bracket subtracts or joins; elsewhere it is a sign.
    r"(?P<sign>(?<![\w)\]%])-\s?[$€£]?|[$€£]\s?-)?"
    # Digits inside a word or after a point are part of something else.
    r"(?<![\w.])(?:(?P<whole>\d{1,12})[ ](?=\d+/\d))?"
    r"(?P<value>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:\s?/\s?(?P<divisor>\d+(?:\.\d+)?))?"
)


def last_number(text: str) -> Fraction | None:
    """The last number of a text, exactly; None if there is none.

    Separators of thousands, currency, `%` and units don't count: `$1,250.50` is 1250.5, and `50%`
    is 50. Fractions are divided out.

    >>> last_number("2 boxes cost $1,250.50."), last_number("It takes 3 1/2 hours")
    (Fraction(2501, 2), Fraction(7, 2))
    """
    found = list(_NUMBER.finditer(text.translate(_MARKS)))
    return _value(found[-1]) if found else None


def _value(match: re.Match[str]) -> Fraction | None:
    try:
        value = Fraction(match["value"].replace(",", "")) / Fraction(match["divisor"] or 1)
    except (ValueError, ZeroDivisionError):
        # More digits than Python converts, or a division by zero.
        return None
    value += int(match["whole"] or 0)
    return -value if match["sign"] else value


def is_correct(answer: str | None, gold: Fraction) -> bool:
    """Whether the last number of the answer line is the gold number, exactly.

    The answer line is the last one that starts with `Answer:`; without one, the whole answer.
    """
    if answer is None:
        return False
    return last_number(last_answer_line(answer) or answer) == gold
