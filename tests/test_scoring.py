"""Scores of short answers against values computed by hand."""

import pytest

from skeletons.scoring import METRICS, exact_match, normalised, short_answer_scores

ZEROS = (0.0, 0.0, 0.0)
ONES = (1.0, 1.0, 1.0)

# Answer, references, then F1, exact match and containment.
TABLE = {
    "the same": ("Paris", ["Paris"], ONES),
    "case and a full stop": ("PARIS.", ["Paris"], ONES),
    "an article": ("The Beatles", ["Beatles"], ONES),
    "an article inside": ("Lord of the Rings", ["Lord of Rings"], ONES),
    "a word that begins like an article": ("Theodore", ["odore"], ZEROS),
    "nothing but articles": ("The The", ["The The"], ONES),
    "an article for a letter": ("the", ["A"], ZEROS),
    "the alias": ("USA", ["United States", "USA"], ONES),
    "the alias for F1, the answer for none": (
        "New York City, USA",
        ["Albany", "New York City"],
        (2 * (3 / 4) * 1 / (3 / 4 + 1), 0.0, 1.0),
    ),
    "no reference": ("Paris", [], ZEROS),
    "an empty answer": ("", ["Paris"], ZEROS),
    "an answer of spaces": (" \n ", ["Paris"], ZEROS),
    "an answer of punctuation": ("...", ["Paris"], ZEROS),
    "a reference of punctuation": ("Paris", ["!!!"], ZEROS),
    "both of punctuation": ("?", ["!!!"], ZEROS),
    "no answer": (None, ["Paris"], ZEROS),
    "a refusal": ("not found", ["Paris"], ZEROS),
    "a refusal with a word of the reference": ("Not found.", ["Lost and Found"], ZEROS),
    "a refusal that is right": ("Unknown", ["Unknown", "Various"], ONES),
    "yes": ("yes.", ["yes"], ONES),
    "yes with reasons": ("Yes, both are American.", ["yes"], (0.0, 0.0, 1.0)),
    "yes at the end": ("The answer is yes", ["yes"], (0.0, 0.0, 1.0)),
    "yes inside": ("They said yes to it", ["yes"], ZEROS),
    "yes and no": ("Yes and no", ["yes"], ZEROS),
    "no for yes": ("no", ["yes"], ZEROS),
    "no as an article": ("There is no such film here", ["no"], ZEROS),
    "no inside a word": ("Norway", ["no"], ZEROS),
    "a name with no in it": ("No Doubt", ["No Doubt"], ONES),
    "a name for no": ("No Doubt", ["no"], (0.0, 0.0, 1.0)),
    "thousands": ("1,200", ["1200"], ONES),
    "a unit": ("1,200 km", ["1200"], (2 / 3, 0.0, 1.0)),
    "a unit is missing": ("1200", ["1,200 km"], (2 / 3, 0.0, 0.0)),
    "a number in a longer one": ("11200", ["1200"], ZEROS),
    "a date for a year": ("10 November 1995", ["1995"], (0.5, 0.0, 1.0)),
    "a year for a date": ("1995", ["10 November 1995"], (0.5, 0.0, 0.0)),
    "a date in another order": ("November 10, 1995", ["10 November 1995"], (1.0, 0.0, 0.0)),
    "a nationality for a country": ("Hungarian", ["Hungary"], ZEROS),
    "an en dash": ("1992–1995", ["1992-1995"], ONES),
    "a hyphen that doesn't break": ("Jean\u2011Luc", ["Jean-Luc"], ONES),
    "a minus": ("\u22125", ["-5"], ONES),
    "an em dash between words": ("Paris—France", ["Paris"], ZEROS),
    "typographic quotes": ("“Ana’s Song”", ["Ana's Song"], ONES),
    "low quotes": ("„Ana“", ["Ana"], ONES),
    "an acute accent for an apostrophe": ("O´Brien", ["O'Brien"], ONES),
    "full width": ("Ｐａｒｉｓ", ["Paris"], ONES),
    "another composition": ("Cafe\u0301", ["Café"], ONES),
    "a space that is not plain": ("New\u00a0York", ["New York"], ONES),
    "a character that can't be seen": ("\u200bPar\u00adis", ["Paris"], ONES),
    "an accent": ("Krakow", ["Kraków"], ZEROS),
    # 2 of 3 tokens said, 2 of 4 wanted: 2 * 2/3 * 1/2 / (2/3 + 1/2) = 4/7.
    "part of it": ("King John II", ["King John of England"], (4 / 7, 0.0, 0.0)),
    # 1 of 3 tokens said, 1 of 2 wanted, as the second `new` has no counterpart.
    "a word twice": ("New new York", ["New Delhi"], (2 * (1 / 3) * 0.5 / (1 / 3 + 0.5), 0.0, 0.0)),
    "a sentence": ("It was directed by Ana Lima.", ["Ana Lima"], (0.5, 0.0, 1.0)),
    "parts in another order": ("Lima, Ana", ["Ana Lima"], (1.0, 0.0, 0.0)),
}


@pytest.mark.parametrize(("answer", "references", "expected"), TABLE.values(), ids=TABLE)
def test_an_answer_scores_as_computed_by_hand(answer, references, expected):
    scores = short_answer_scores(answer, references)

    assert tuple(scores) == METRICS
    assert tuple(scores.values()) == pytest.approx(expected)


def test_each_score_takes_the_reference_that_suits_it_best():
    scores = short_answer_scores("in Lima, Peru", ["Lima Peru South America", "Peru"])

    # F1 from the first (2 of 3 said, 2 of 4 wanted), containment from the second.
    assert scores == pytest.approx({"f1": 4 / 7, "exact_match": 0.0, "contains": 1.0})


def test_a_decimal_point_is_punctuation_as_in_squad():
    assert exact_match("3.5", "35") == 1.0


def test_normalising_twice_changes_nothing():
    for answer, references, _ in TABLE.values():
        for text in (answer or "", *references):
            assert normalised(normalised(text)) == normalised(text)
