"""Tasks from the form of a question alone.

The rules see the question's text and nothing else: no annotation, no answer. A question whose form
no rule knows is given as a whole: first to find what it describes without a name, then to find what
it asks about that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

_LONGEST_KNOWN = 500
"""Characters; no rule is for longer questions, and the patterns would take long over them."""


class Tasks(NamedTuple):
    """What is to be looked up, in two stages."""

    first: str
    then: str
    """With no answer of the first stage in it."""


def by_form(text: str) -> Tasks:
    """What to look up for a question, and in which order.

    >>> tuple(by_form("When was the performer of song Dream born?"))
    ('Who is the performer of Dream?', 'When was this person born?')
    >>> tuple(by_form("Who is older, Ann Lee or Bo Day?"))
    ('When was Ann Lee born?', 'When was Bo Day born?')
    """
    text = " ".join(text.split())
    if len(text) <= _LONGEST_KNOWN:
        for rule in _RULES:
            if tasks := rule(text):
                return tasks
    return _unknown(text)


def _unknown(text: str) -> Tasks:
    return Tasks(
        f"Which person, place or thing does this question describe without its name? {text}",
        _detail(text),
    )


def _detail(text: str) -> str:
    return f"Find the detail that this question asks for: {text}"


# Two things are compared.

_PLURAL = r"(?:(?:the )?(?:[a-z]+ )?[a-z]+s,? )?"
_PREDICATE = (
    r"(?:located|situated|based|from|of|in|have|has|share|born|originate|native|released|directed"
    r"|made|found|named|used|known|considered|members|part|a|an|the|both)\b"
)
_BEST = r"(?:first|earlier|later|last|older|younger|oldest|youngest)"
_PAIRS = tuple(
    re.compile(pattern)
    for pattern in (
        # Was A or B born first?
        r"Was (?P<a>.+?) or (?P<b>.+?) (?P<what>(?:born|founded|released) .*?) ?\?",
        # Which magazine, A or B, came first?
        r"(?P<start>[^,]+), (?P<a>[^,]+) or (?P<b>[^,]+), (?P<what>[a-z].*?) ?\?",
        # Who is older, A or B?
        r"(?P<what>[^,]+?),+ (?P<a>.+?),? or (?P<b>.+?) ?\?",
        # Which band was formed first A or B?
        rf"(?P<what>(?:Which|Who|What) [^,]*?\b{_BEST}),? (?P<a>.+?) or (?P<b>.+?) ?\?",
        # Who was born first out of A and B?
        rf"(?P<what>(?:Which|Who|What) [^,]*?\b{_BEST}),? (?:out )?of (?P<a>.+?) and (?P<b>.+?) ?\?",
        # Does A have the same nationality as B?
        r"(?:Does|Did|Is|Was) (?P<a>.+?) (?P<what>(?:have|has|share|from|of|in) the same .+?)"
        r" as (?P<b>.+?) ?\?",
        # What do A and B have in common?
        r"What (?:do|did) (?:both )?(?P<a>.+?) and (?P<b>.+?) (?P<what>have in common) ?\?",
        # Are both A and B from the same country?
        rf"(?:Are|Were|Did|Do|Was|Is|Does) (?:both )?{_PLURAL}(?P<a>.+?) and (?P<b>.+?),?"
        rf" (?P<what>(?:both .+|{_PREDICATE}.*?)) ?\?",
    )
)
_BOTH_DIRECTORS = re.compile(
    r".*?(?:\bdirectors? of (?:the )?film (?P<a>.+?) and (?:the )?director of (?:the )?film (?P<b>.+?)"
    r"|directors of (?:both )?films (?P<c>.+?) and (?P<d>.+?)"
    r"|both (?:films:?,? )?(?P<e>.+?) and (?P<f>.+?),?(?: films)? have the directors)"
    r" (?P<rest>(?:both |that |who )*(?:from|have|share|are|is)\b.*|from\b.*)\?"
)
_DIRECTOR_OR = re.compile(
    r"Which film(?:'s director|s? (?:has the|whose) director) (?P<what>[^,]+), (?P<a>.+?) or (?P<b>.+?) ?\?"
)

_LOOK_UPS: tuple[tuple[str, str], ...] = (
    (r"lived longer|longer li", "When was {} born, and when did {} die?"),
    (r"\b(?:died|die)\b", "When did {} die?"),
    (r"\b(?:place of birth|born in the same)\b", "Where was {} born?"),
    (r"\b(?:born|older|younger|oldest|youngest|birth)\b", "When was {} born?"),
    (r"\b(?:released|came out|come out|published|premiered|aired)\b", "When did {} come out?"),
    (r"\b(?:founded|established|formed|created|started|opened|built)\b", "When was {} founded?"),
    (r"\b(?:nationality|nationalities|citizenship)\b", "What is the nationality of {}?"),
    (r"\blocated in (?:the same|which|what) country", "In which country is {}?"),
    (r"\bcountry\b", "Which country is {} from?"),
    (r"\b(?:same|which|what) (?:city|state|county|continent)\b", "Where is {}?"),
)
"""Signs in what is asked about two things, and what to look up about each, by precedence."""


def _look_up(what: str, thing: str) -> str | None:
    for sign, question in _LOOK_UPS:
        if re.search(sign, what):
            return question.replace("{}", thing)
    return None


def _compared_directors(text: str) -> Tasks | None:
    if found := _DIRECTOR_OR.fullmatch(text):
        a, b, what = found["a"], found["b"], found["what"]
    elif found := _BOTH_DIRECTORS.fullmatch(text):
        a = found["a"] or found["c"] or found["e"]
        b = found["b"] or found["d"] or found["f"]
        what = found["rest"]
    else:
        return None
    asked = _look_up(what, f"the director of {a}"), _look_up(what, f"the director of {b}")
    then = " ".join(filter(None, asked)) or _detail(text)
    return Tasks(f"Who is the director of {a}? Who is the director of {b}?", then)


def _compared(text: str) -> Tasks | None:
    found = next(filter(None, (pattern.fullmatch(text) for pattern in _PAIRS)), None)
    if found is None:
        return None
    first, second = (
        _look_up(found["what"], thing)
        or f"What is said about {thing} that helps with this question? {text}"
        for thing in (found["a"], found["b"])
    )
    return Tasks(first, second)


# One thing is found by way of another.

_KIN: Mapping[str, tuple[str, str]] = {
    "paternal grandfather": ("father", "father"),
    "paternal grandmother": ("father", "mother"),
    "maternal grandfather": ("mother", "father"),
    "maternal grandmother": ("mother", "mother"),
    "father-in-law": ("spouse", "father"),
    "mother-in-law": ("spouse", "mother"),
    "sibling-in-law": ("spouse", "sibling"),
    "brother-in-law": ("spouse", "brother"),
    "sister-in-law": ("spouse", "sister"),
    "child-in-law": ("child", "spouse"),
    "son-in-law": ("child", "husband"),
    "daughter-in-law": ("child", "wife"),
    "stepfather": ("mother", "husband"),
    "stepmother": ("father", "wife"),
    "stepchild": ("spouse", "child"),
    "half-sibling": ("parent", "other child"),
    "grandchild": ("child", "child"),
    "grandson": ("child", "son"),
    "granddaughter": ("child", "daughter"),
    "uncle": ("parent", "brother"),
    "aunt": ("parent", "sister"),
    "nephew": ("sibling", "son"),
    "niece": ("sibling", "daughter"),
}
"""Relatives by way of whom: X's uncle is the brother of a parent of X."""

_ANY_KIN = "|".join(sorted(_KIN, key=len, reverse=True))
_KIN_OF = re.compile(rf"Who (?:is|was) the (?P<kin>{_ANY_KIN}) of (?P<name>.+?) ?\?")
_KINS = re.compile(rf"Who (?:is|was) (?P<name>.+?)(?:'s|’s|'|’) (?P<kin>{_ANY_KIN}) ?\?")


def _related(text: str) -> Tasks | None:
    found = _KIN_OF.fullmatch(text) or _KINS.fullmatch(text)
    if found is None:
        return None
    by_way_of, relative = _KIN[found["kin"]]
    return Tasks(
        f"Who is the {by_way_of} of {found['name']}?",
        f"Who is the {relative} of this person?",
    )


_PERSON = (
    "director|performer|composer|founder|creator|author|writer|producer|singer|father|mother"
    "|husband|wife|spouse|child|son|daughter|brother|sister|sibling|screenwriter|developer"
)
_THING = (
    "country|birthplace|birth place|place of birth|city of birth|hometown|alma mater|team|publisher"
    "|record label|employer|company|county|state|city"
)
_NOUN = rf"(?P<noun>{_PERSON}|{_THING})"
_OF = re.compile(
    rf"(?P<head>.*\b(?:of|was|is|did|does|do|the|country|and)) (?:the )?{_NOUN} of (?:the )?"
    r"(?P<sort>(?:film|song|album|movie) )?(?P<name>.+?)"
    r"(?P<tail>(?: (?:born|die|died|from|is from|got|study|studied|graduate from|work at|buried"
    r"|a citizen of|located|attend|attended)| ?'s birthday)?) ?\?"
)
_POSSESSIVE = re.compile(
    rf"(?P<head>.*?\b(?:of|was|is|did|does|do|has|in|on|by|country|the)) "
    rf"(?P<name>[A-Z].+?)(?:'s|’s|'|’) (?:main |first |current )?{_NOUN}\b(?P<tail>.*?) ?\?"
)
_CLAUSE = re.compile(
    r"(?P<head>(?:Who|What|When|Where|Which|How|In|On|At|Of)\b[^,]*?"
    r" (?:in|of|by|from|to|for|near|with|at)) (?:the|a|an) (?P<noun>[a-z]+)"
    r" (?P<clause>(?:where|that|which|who|whose|in which) [^,]+?) ?\?"
)
_ASKS_OUTRIGHT = re.compile(r"(?:who|what) (?:is|was)(?: the)?", re.IGNORECASE)
_MOST_SMALL_WORDS = 3


def _by_way_of_relation(text: str) -> Tasks | None:
    for pattern in (_OF, _POSSESSIVE):
        found = pattern.fullmatch(text)
        if found is not None and _is_name(found) and not _ASKS_OUTRIGHT.fullmatch(found["head"]):
            break
    else:
        return None
    is_person = re.fullmatch(_PERSON, found["noun"])
    thing = "this person" if is_person else f"this {found['noun']}"
    head = found["head"].removesuffix(" the")
    return Tasks(
        f"{'Who' if is_person else 'What'} is the {found['noun']} of {found['name']}?",
        f"{head} {thing}{found['tail']}?".replace(" 's", "'s"),
    )


def _is_name(found: re.Match[str]) -> bool:
    """Whether what was taken for a name is not half a sentence."""
    if found.re is _OF and found["sort"]:
        return True
    name = found["name"]
    small = [word for word in name.split() if word[0].islower()]
    is_relation = re.search(rf"(?:'s|’s) (?:{_PERSON}|{_THING})\b", name)
    is_clause = re.search(r", [a-z]|,$", name)
    return (
        not name[0].islower() and len(small) <= _MOST_SMALL_WORDS and not (is_relation or is_clause)
    )


def _by_way_of_clause(text: str) -> Tasks | None:
    found = _CLAUSE.fullmatch(text)
    if found is None:
        return None
    noun, clause = found["noun"], found["clause"]
    return Tasks(
        f"{'Who' if clause.startswith('who ') else 'What'} is the {noun} {clause}?",
        f"{found['head']} this {noun}?",
    )


_RULES: tuple[Callable[[str], Tasks | None], ...] = (
    _compared_directors,
    _compared,
    _related,
    _by_way_of_relation,
    _by_way_of_clause,
)
