"""Yes or no in an answer."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from splice.text import is_refusal, last_answer_line, norm

YesNo: TypeAlias = Literal["yes", "no"]

_YES, _NO = (rf"\b{word}\b(?!-\w)" for word in ("yes", "no"))
_WORD = re.compile(f"{_YES}|{_NO}")
_LEADING = re.compile(rf"\W*({_YES}|{_NO})")
_JOINT = r"\W{1,3}(?:(?:and|or|but)\W{1,3})?"
_BOTH = re.compile(f"{_YES}{_JOINT}{_NO}|{_NO}{_JOINT}{_YES}")


def yes_or_no(answer: str | None) -> YesNo | None:
    """What an answer says; None if it says neither, or both.

    It may give reasons after the word that it opens with. Elsewhere the word counts if the other
    one does not occur.

    >>> yes_or_no("**Yes**, because there is no rule"), yes_or_no("The answer is no.")
    ('yes', 'no')
    >>> print(yes_or_no("Yes and no"), yes_or_no("Perhaps"))
    None None
    """
    if answer is None or is_refusal(answer):
        return None
    text = norm(last_answer_line(answer) or answer)
    if _BOTH.search(text):
        return None
    leading = _LEADING.match(text)
    said = {leading[1]} if leading else set(_WORD.findall(text))
    if len(said) != 1:
        return None
    return "yes" if said == {"yes"} else "no"
