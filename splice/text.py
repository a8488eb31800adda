"""Units of text that evidence, gap items and selectors are computed from (method 1.3).

Everything here takes hostile text of any length: each function is linear in it.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import wraps
from itertools import pairwise, takewhile
from typing import Final, Literal, NamedTuple, TypeVar

T = TypeVar("T")

_MOST_REMEMBERED: Final = 1 << 20
"""Characters of texts that one function remembers: those of some hundred queries at once."""

_ENTRY: Final = 64
"""What remembering a text takes beside its characters, in characters."""


def _remembered(function: Callable[[str], T]) -> Callable[[str], T]:
    """Keep what a pure function made of recent texts.

    Diagnosis, message and evidence ask the same things of the same few texts for every edge of a
    query. Once the limit is reached all is forgotten, which needs no order to be kept.
    """
    made: dict[str, T] = {}
    n_chars = 0

    @wraps(function)
    def remembering(text: str) -> T:
        nonlocal n_chars
        found = made.get(text)
        if found is None:
            found = function(text)
            n_chars += len(text) + _ENTRY
            if n_chars > _MOST_REMEMBERED:
                made.clear()
                n_chars = len(text) + _ENTRY
            made[text] = found
        return found

    return remembering


def _lexicon(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STRAIGHT = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛ʼ´′", "'"),
        **dict.fromkeys("“”„‟″«»", '"'),
        **dict.fromkeys("‐‑−", "-"),
        **dict.fromkeys("\u00ad\u200b\u2060\ufeff", None),
    }
)
_TAG = re.compile(
    r"</?(?:a|b|i|u|p|br|em|li|ol|ul|pre|sub|sup|div|code|span|strong|h[1-6])"
    r"(?:[ /][^<>]{0,200})?>",
    re.IGNORECASE,
)
_LINE_MARKS = re.compile(r"^(?:(?:[-*+•‣>]|#{1,6}+)\s++)++")
_EMPHASIS = re.compile(r"[*_`~]+")


@_remembered
def norm(text: str) -> str:
    r"""Fold what does not change the meaning: case, compatibility forms, quotes, markup, spaces.

    >>> norm("**The  “Café”**\n- opened")
    'the "café" opened'
    >>> norm("2 * 3, max_retries, `x`")
    '2 * 3, max_retries, x'
    """
    text = unicodedata.normalize("NFKC", text.translate(_STRAIGHT)).translate(_STRAIGHT)
    text = _EMPHASIS.sub(_without_emphasis, _TAG.sub(" ", text))
    lines = (_LINE_MARKS.sub("", line.strip(), count=1) for line in text.splitlines())
    # Again for the whole: a mark alone in the first line stands before the next line now.
    text = _LINE_MARKS.sub("", " ".join(" ".join(lines).split()), count=1)
    return unicodedata.normalize("NFKC", text.casefold())


_DECORATION = " \t.,;:!?\"'()[]{}<>|*_~`#=-"


def bare(text: str) -> str:
    """Normalised text without punctuation and brackets around it.

    >>> bare('["Not found."]')
    'not found'
    """
    return norm(text).strip(_DECORATION)


def _without_emphasis(run: re.Match[str]) -> str:
    """Keep marks that stand inside a word (`max_retries`) or alone (`2 * 3`)."""
    before = run.string[run.start() - 1] if run.start() else " "
    after = run.string[run.end()] if run.end() < len(run.string) else " "
    is_inside = before.isalnum() and after.isalnum()
    is_alone = before.isspace() and after.isspace()
    return run.group() if is_inside or is_alone else ""


_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_LONGEST_FUNCTION_WORD = 3


@_remembered
def words(text: str) -> frozenset[str]:
    """Content words: alphabetic tokens longer than three characters.

    >>> sorted(words("The well-known film was directed by Ana, in 1994."))
    ['directed', 'film', 'well-known']

    Source: SPLICE A.4 for the length rule, which is the only filter.
    """
    return frozenset(w for w in _WORD.findall(norm(text)) if len(w) > _LONGEST_FUNCTION_WORD)


_TOKEN = re.compile(
    r"(?<![\w%)\]])-\d+(?:[.,]\d+)*(?![^\W_])"
    r"|\d+(?:[.,]\d+)*(?![^\W_])"
    r"|[^\W\d_](?:\.[^\W\d_])+(?![^\W_])"
    r"|[^\W_]+(?:'[^\W_]+)*"
)
_ARTICLES = frozenset({"a", "an", "the"})


def tokens(text: str) -> list[str]:
    """Normalised tokens in order, without articles and punctuation.

    >>> tokens("The U.S. has 1,000 e-mails; it's -5.5 degrees.")
    ['us', 'has', '1000', 'e', 'mails', 'its', '-5.5', 'degrees']
    """
    found = (_plain(match.group()) for match in _TOKEN.finditer(norm(text)))
    return [token for token in found if token not in _ARTICLES]


def _plain(token: str) -> str:
    """Drop the punctuation inside a token, but not a decimal point or a minus sign."""
    if token[-1].isdigit() and token.lstrip("-")[0].isdigit():
        return token.replace(",", "")
    return token.replace("'", "").replace(".", "")


def token_f1(a: str, b: str) -> float:
    """F1 of two bags of tokens: 1 for the same bag, 0 for none in common.

    Two texts without tokens score 1 if they are equal after normalisation, else 0.

    >>> token_f1("the red house", "a red barn")
    0.5
    >>> token_f1("", "barn"), token_f1("", " ")
    (0.0, 1.0)
    """
    left, right = _bag(a), _bag(b)
    if not left and not right:
        return float(norm(a) == norm(b))
    shared = (left & right).total()
    return 2 * shared / (left.total() + right.total())


@_remembered
def _bag(text: str) -> Counter[str]:
    return Counter(tokens(text))


_ASCII_MARKS = str.maketrans({"−": "-", "＋": "+", "％": "%", "，": ",", "．": ".", "’": "'"})
_ISO_DATE = r"(?<![\w-])\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])(?!\d|-\d)"
_NUMBER = re.compile(
    rf"(?P<date>{_ISO_DATE})"
    # A hyphen is a sign unless something that it could join or subtract stands before it.
    r"|(?:(?<![\w%)\]])(?P<sign>[-+]))?[$€£¥₹]?(?P<inner>(?<=[$€£¥₹])-)?"
    # Digits inside a word or a version are part of a name, and so are those of `GPT-4`.
    r"(?<!\w)(?<!\d\.)(?<![A-Z]-)"
    r"(?P<digits>(?:\d{1,3}(?:[,'\u00a0\u2009\u202f]\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?!\d|\.\d)"
    # A short unit may follow at once (`5km`, `3rd`); more than that makes it a name.
    r"(?:(?P<percent>\s?(?:%|(?i:per\s?cent)\b))|(?=[^\W\d_]{0,3}(?!\w)))"
)


@_remembered
def numbers(text: str) -> frozenset[str]:
    """Numbers in canonical form: no separators, no trailing zeros, `%` kept, currency dropped.

    ISO dates stay whole. Digits that are part of a name (`A320`, `GPT-4`, `1.2.3`) don't count.

    >>> sorted(numbers("$1,250.50, up 3.0 % on 2024-05-01; from 1990-1995 it fell to -7"))
    ['-7', '1250.5', '1990', '1995', '2024-05-01', '3%']
    """
    return frozenset(_numbers(text))


def _numbers(text: str) -> Iterator[str]:
    """Canonical numbers in order of appearance."""
    return map(_canonical, _NUMBER.finditer(text.translate(_ASCII_MARKS)))


def _canonical(match: re.Match[str]) -> str:
    if match["date"]:
        return _ascii_digits(match["date"])
    whole, _, fraction = re.sub(r"[^\d.]", "", match["digits"]).partition(".")
    whole = _ascii_digits(whole).lstrip("0") or "0"
    fraction = _ascii_digits(fraction).rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    is_negative = (match["sign"] == "-") != bool(match["inner"]) and number != "0"
    return ("-" if is_negative else "") + number + ("%" if match["percent"] else "")


def _ascii_digits(text: str) -> str:
    if text.isascii():
        return text
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)


_BULLET = re.compile(
    r"[ \t]*+(?:(?:[-*+•‣>]|#{1,6}+|\(?\d{1,3}[.)]|\(?[a-z]\))[ \t]++)*+", re.ASCII
)
_STOP = re.compile(r"[.!?…]+[\"')\]”’»*_]*|[。！？]+")
_ABBREVIATIONS = _lexicon(
    "st mt ft mr mrs ms dr prof rev hon gen col maj sgt capt lt gov sen rep pres vs cf viz e.g i.e "
    "ed eds"
)
_BEFORE_NUMBERS = _lexicon(
    "no nos vol fig figs eq sec ch p pp c ca approx jan feb mar apr jun jul aug sep sept oct nov "
    "dec"
)
_ACRONYM = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]")
_LOOKBACK = 24
"""Longest abbreviation looked for, in characters."""


@_remembered
def sentences(text: str) -> tuple[tuple[int, int], ...]:
    r"""Character spans of the sentences, without bullets and outer spaces.

    A line end always ends a sentence. `St.`, initials and the like don't.

    >>> text = "- Ana met J. K. Rowling in St. Ives. Why?\n2. No idea"
    >>> [text[start:end] for start, end in sentences(text)]
    ['Ana met J. K. Rowling in St. Ives.', 'Why?', 'No idea']
    """
    spans = []
    position = 0
    for line in text.splitlines(keepends=True):
        end = position + len(line)
        start = _BULLET.match(text, position, end).end()  # type: ignore[union-attr]
        for stop in _STOP.finditer(text, start, end):
            if _ends_sentence(text, stop, end):
                spans.append((start, stop.end()))
                start = stop.end()
        spans.append((start, end))
        position = end
    return tuple(span for span in (_trimmed(text, *span) for span in spans) if span)


def _trimmed(text: str, start: int, end: int) -> tuple[int, int] | None:
    """The span without outer spaces; None if it holds no letter or digit."""
    piece = text[start:end]
    if not any(c.isalnum() for c in piece):
        return None
    return start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())


def _ends_sentence(text: str, stop: re.Match[str], line_end: int) -> bool:
    if stop.group()[0] in "。！？":
        return True
    after = stop.end()
    if after < line_end and not text[after].isspace():
        return False
    following = text[after : min(line_end, after + _LOOKBACK)]
    following = following.strip().lstrip("\"'([“‘*_").lstrip()
    if not following:
        return True
    if following[0].islower():
        return False
    return stop.group()[0] != "." or not _is_abbreviation(text, stop.start(), following)


def _is_abbreviation(text: str, dot: int, following: str) -> bool:
    """Whether the full stop at `dot` belongs to the word before it."""
    before = text[max(0, dot - _LOOKBACK) : dot].split()
    word = before[-1].lstrip("\"'([“‘*_") if before else ""
    if len(word) == 1:
        return word.isupper()
    if word.lower() in _ABBREVIATIONS:
        return True
    if word.lower() in _BEFORE_NUMBERS:
        return following[0].isdigit()
    next_word = following.split()[0].strip(".,;:!?'\"").casefold()
    return _ACRONYM.fullmatch(word) is not None and next_word not in _COMMON


_COMMON = _lexicon(
    "the a an this that these those each every all some any no both either neither another other "
    "such many most much several few one i you he she it we they his her its our their my your "
    "him them us me who whom whose which what when where why how whether is are was were be been "
    "am do does did has have had can could will would shall should may might must in on at by for "
    "from to of with without within into onto over under after before during since until between "
    "among against about as than then and or but nor so yet if because although though while "
    "unless once here there however therefore thus hence also moreover furthermore instead "
    "meanwhile finally first second third next last later now today yes not nothing none everyone "
    "everything someone something per via like according based given despite except "
    "find list give name tell identify explain describe state answer return write use look search "
    "determine calculate compute compare consider check note please let see say show provide "
    "extract summarize summarise choose select pick read make take get start begin ensure don "
    "reply respond ask question query context task step fact facts notes result results output "
    "input message source evidence document documents title example unknown"
)
"""Words that a capital letter at the start of a sentence does not turn into a name."""

_PARTICLES = _lexicon(
    "of de the la le las les los von van der den du da di del della dos al el bin ibn y e"
)
_MOST_PARTICLES = 3
_MOST_QUOTED_WORDS = 12
_NO_IDENTIFIERS = _lexicon("and/or he/she she/he his/her him/her s/he w/o yes/no e.g i.e a.m p.m")
_ENTITY_TOKEN = re.compile(r"\w+(?:(?:://|[-.'’/@&+])\w+)*")
_QUOTED = re.compile(
    r"\"([^\"\n]{1,200})\"|“([^”\n]{1,200})”|«([^»\n]{1,200})»|`([^`\n]{1,200})`"
    r"|(?<!\w)[‘']([^'‘’\n]{2,200})['’](?!\w)"
)
_NUMBER_AND_UNIT = re.compile(r"\d[\d.,]*[^\W\d_]{1,3}|[\d./@&+-]+")
_POSSESSIVE = re.compile(r"['’]s$", re.IGNORECASE)
_JOINT = re.compile(r"\.?[ \t]+|[ \t]+&[ \t]+")
_SPEAKS_OF_ONE = re.compile(r"['’]s\b|[ \t]+(?:is|was|has)\b", re.IGNORECASE)


class _Token(NamedTuple):
    """A token of a sentence that may belong to an entity."""

    text: str
    start: int
    end: int
    is_first: bool
    """It opens a sentence, or stands after a colon."""

    @property
    def is_common(self) -> bool:
        folded = self.text.casefold()
        return re.split(r"['’]", folded)[0] in _COMMON or folded.endswith(("n't", "n’t"))

    @property
    def is_article(self) -> bool:
        return self.text.casefold() in _ARTICLES

    @property
    def is_capitalised(self) -> bool:
        return self.text[0].isupper() or self.is_inner_capital

    @property
    def is_mixed(self) -> bool:
        """Whether capitals beyond the first letter, or digits, show that it is a name."""
        return any(c.isupper() or c.isdigit() for c in self.text[1:]) and not self.is_common

    @property
    def is_identifier(self) -> bool:
        if (
            _NUMBER_AND_UNIT.fullmatch(self.text)
            or self.text.casefold().rstrip(".") in _NO_IDENTIFIERS
        ):
            return False
        if not any(c.isalpha() for c in self.text):
            return False
        if any(c.isdigit() or c in "_/" for c in self.text) or self.is_inner_capital:
            return True
        # `found.The` is two sentences without the space, not a name.
        parts = self.text.split(".")
        is_two = any(a[-1:].islower() and b[:1].isupper() for a, b in pairwise(parts))
        return len(parts) > 1 and not is_two

    @property
    def is_inner_capital(self) -> bool:
        """`iPhone`, `mRNA`."""
        return self.text[0].islower() and "." not in self.text and not self.text.islower()


class _Mention(NamedTuple):
    """An entity where it stands in a text."""

    start: int
    end: int
    text: str


def entities(text: str, gazetteer: Collection[str] = ()) -> tuple[str, ...]:
    """Entities in order of appearance, as the text spells them, each once under `norm`.

    Runs of capitalised tokens (with `of`, `de`, ... inside), quoted strings, identifiers, and the
    entries of `gazetteer` that occur. One capitalised word at the start of a sentence counts only
    if something else shows that it is a name.

    >>> entities("Who directed The Bank of Dreams? Ana Lima, says report_7.")
    ('Bank of Dreams', 'Ana Lima', 'report_7')
    >>> entities("Results vary. Doha is hot. I read 'the iron age' in St. Ives.")
    ('Doha', 'the iron age', 'St. Ives')
    """
    quoted = _quoted(text)
    mentions = [*quoted, *_gazetteer(text, gazetteer), *_runs(text, quoted)]
    found: dict[str, str] = {}
    for mention in sorted(mentions, key=lambda m: (m.start, -m.end)):
        if key := norm(mention.text):
            found.setdefault(key, mention.text)
    return tuple(found.values())


@_remembered
def items(text: str) -> tuple[str, ...]:
    """What a subtask or an output is about: its entities, then its numbers, each in order.

    >>> items("In 1994, Ana Lima paid $2,000 to Rui Sá.")
    ('Ana Lima', 'Rui Sá', '1994', '2000')
    """
    return (*entities(text), *dict.fromkeys(_numbers(text)))


def _quoted(text: str) -> list[_Mention]:
    mentions = []
    for match in _QUOTED.finditer(text):
        content = next(group for group in match.groups() if group is not None)
        content = content.strip().rstrip(".,;:!?").strip()
        is_name = any(c.isalpha() for c in content) and content.casefold() not in _COMMON
        if is_name and len(content.split()) <= _MOST_QUOTED_WORDS:
            mentions.append(_Mention(match.start(), match.end(), content))
    return mentions


def _gazetteer(text: str, gazetteer: Collection[str]) -> Iterator[_Mention]:
    for entry in gazetteer:
        if not contains(text, entry):
            continue
        pattern = r"\s+".join(re.escape(part) for part in entry.split())
        match = re.search(rf"(?<!\w){pattern}(?!\w)", text, re.IGNORECASE)
        # Without a match the spelling differs under `norm` alone, so no place can be told.
        start, end = match.span() if match else (len(text), len(text))
        yield _Mention(start, end, match.group() if match else entry)


def _runs(text: str, quoted: list[_Mention]) -> list[_Mention]:
    """Capitalised runs and identifiers outside of quotations."""
    certain: list[_Mention] = []
    doubtful: list[_Mention] = []
    for run, is_bare in _token_runs(text, quoted):
        # What follows an opening common word stands inside the sentence.
        n_opening = sum(1 for _ in takewhile(_opens, run))
        run = run[n_opening:]
        if not run or (len(run) == 1 and run[0].is_common):
            continue
        first, last = run[0], run[-1]
        mention = _Mention(first.start, last.end, text[first.start : last.end])
        is_certain = (
            len(run) > 1
            or not first.is_first
            or is_bare
            or first.is_mixed
            or first.is_identifier
            or _SPEAKS_OF_ONE.match(text, first.end) is not None
        )
        (certain if is_certain else doubtful).append(mention)
    known = {norm(word) for mention in certain for word in mention.text.split()}
    return certain + [mention for mention in doubtful if norm(mention.text) in known]


def _opens(token: _Token) -> bool:
    return token.is_article or (token.is_first and token.is_common)


def _token_runs(text: str, quoted: list[_Mention]) -> Iterator[tuple[list[_Token], bool]]:
    """Runs of tokens that may be entities, each with whether its clause holds nothing else."""
    for clause in _clauses(text, quoted):
        is_bare = all(t.is_capitalised or _is_filler(t) for t in clause)
        run: list[_Token] = []
        particles: list[_Token] = []
        for token in clause:
            before = particles[-1] if particles else run[-1] if run else None
            is_joined = before is not None and _JOINT.fullmatch(text, before.end, token.start)
            if token.is_capitalised and is_joined:
                run += [*particles, token]
                particles = []
            elif is_joined and token.text in _PARTICLES and len(particles) < _MOST_PARTICLES:
                particles.append(token)
            else:
                if run:
                    yield run, is_bare
                run = [token] if token.is_capitalised or token.is_identifier else []
                particles = []
        if run:
            yield run, is_bare


def _is_filler(token: _Token) -> bool:
    """Whether a token may stand in an answer that is nothing but names."""
    return token.text in _PARTICLES or not any(c.isalpha() for c in token.text)


def _clauses(text: str, quoted: list[_Mention]) -> Iterator[list[_Token]]:
    """Tokens outside of quotations, by sentence and again by colon."""
    quotes = iter(sorted(quoted))
    quote = next(quotes, None)
    for start, end in sentences(text):
        clause: list[_Token] = []
        last = start
        for match in _ENTITY_TOKEN.finditer(text, start, end):
            while quote is not None and quote.end <= match.start():
                quote = next(quotes, None)
            is_quoted = quote is not None and quote.start <= match.start()
            if clause and ":" in text[last : match.start()]:
                yield clause
                clause = []
            last = match.end()
            if not is_quoted:
                clause.append(_token(text, match, is_first=not clause))
        if clause:
            yield clause


def _token(text: str, match: re.Match[str], *, is_first: bool) -> _Token:
    token, end = match.group(), match.end()
    if _POSSESSIVE.search(token):
        token, end = token[:-2], end - 2
    elif _ACRONYM.fullmatch(token) and text[end : end + 1] == ".":
        token, end = token + ".", end + 1
    return _Token(token, match.start(), end, is_first)


_PIECE = re.compile(r"[^\W_]+")


def contains(haystack: str, needle: str) -> bool:
    """Whether `needle` occurs in `haystack` as whole words; a number, whatever its spelling.

    >>> contains("It cost 1,000 in “New York”.", "new york"), contains("1,000 men", "1000")
    (True, True)
    >>> contains("New Yorkers paid 12.5", "New York"), contains("paid 12.5", "12")
    (False, False)
    """
    if number := _as_number(needle):
        return number in numbers(haystack)
    pieces = _pieces(needle)
    return pieces != "  " and pieces in _pieces(haystack)


@_remembered
def _as_number(text: str) -> str:
    """A text that is one number, in canonical form; the empty text for any other."""
    match = _NUMBER.fullmatch(text.strip().translate(_ASCII_MARKS))
    return _canonical(match) if match else ""


@_remembered
def _pieces(text: str) -> str:
    """The whole words of a text, each between two spaces."""
    return f" {' '.join(_PIECE.findall(norm(text)))} "


_ANSWER_LINE = re.compile(r"[ \t>*_#`-]*+answer[ \t*_]*+[:：](.*)", re.IGNORECASE)


def last_answer_line(text: str) -> str | None:
    r"""What the last line that starts with `Answer:` says; None if there is none or it is empty.

    >>> last_answer_line("Answer: Rome\nBut no.\n> **Answer:** *Doha*")
    'Doha'
    """
    for line in reversed(text.splitlines()):
        if match := _ANSWER_LINE.match(line):
            return match[1].strip(" \t*") or None
    return None


_LONGEST_REFUSAL = 1000
"""Characters; a longer reply says something beside that it declines."""

_MATERIAL = (
    r"(?:text|context|document|passage|paragraph|source|article|data|input|evidence|material|fact"
    r"|message|note|record|information|report|finding|database|question|query)s?"
)
_ADJECTIVES = (
    r"(?: (?:the|this|that|these|those|any|of|my|your|our|provided|given|available|above|supplied"
    r"|retrieved|current|private))*"
)
_WHERE = (
    rf" (?:in|from|by|within|based on|using|with|given|according to){_ADJECTIVES} {_MATERIAL}"
    r"(?: (?:provided|given|available|above|alone))?"
)
_MAYBE_WHERE = rf"(?: (?:anywhere|here|yet|to me))?(?:{_WHERE})?"
# Stops at a turn of phrase after which an answer may follow.
_FREE = r"(?:(?! (?:but|however|though|although|yet|except|so|is|was) )[^:;\n]){0,200}"
_IT = (
    r"(?:(?:the |this |that |it |your |my )?(?:(?:final|correct|exact|requested|relevant) )?"
    r"(?:answer|information|value|result|detail|question|fact|item)?s? ?)"
)
_CAN_NOT = (
    r"(?:can ?not|can't|could not|couldn't"
    r"|(?:am |i'm |is |was |are |we're |were )?(?:unable|not able) to)"
)
_INFORMATION = (
    r"(?:no|not enough|isn't enough|insufficient|not sufficient)(?: (?:relevant|specific|further"
    r"|direct|clear|such|matching|explicit|sufficient|definite))*"
)
_GIVEN = r"(?:found|available|given|provided|known|stated|specified|mentioned|listed|included)"

_REFUSAL = re.compile(
    "|".join(
        (
            r"n/a|n\.a|none|none found|null|nil|nothing found|not applicable|unanswerable|unsure"
            r"|not sure|no idea|no clue|idk|dunno",
            rf"{_IT}?(?:(?:is|are|was|were|remains) )?(?:currently |still )?(?:unknown|unclear"
            rf"|unavailable|undetermined|unspecified|not {_GIVEN}|not clear|not determined"
            rf"|not present){_MAYBE_WHERE}",
            r"(?:i|we) (?:really )?(?:do not|don't|did not|didn't) know"
            r"(?: (?:the answer|that|this|it|for sure))?(?: to (?:this|that|the|your) question)?"
            rf"{_MAYBE_WHERE}",
            rf"{_IT}?{_CAN_NOT} be (?:determined|found|identified|answered|established|inferred"
            rf"|known|located|verified){_MAYBE_WHERE}",
            rf"(?:there (?:is|was|are|were) |i have |i found |we have )?{_INFORMATION} "
            r"(?:information|input|answer|data|detail|context|match|matche|result|record|mention"
            rf"|evidence)s?(?: (?:is|was|are|were))?(?: {_GIVEN})?{_MAYBE_WHERE}",
            rf"not found: {_FREE}",
        )
    )
)
# These have a part that may be anything, so the title of a work could look like one.
_WORDY_REFUSAL = re.compile(
    "|".join(
        (
            r"(?:i|we) (?:do not|don't|did not|didn't) (?:know|have (?:enough|any|sufficient|the"
            r"|that|access)|see|find)\b" + _FREE,
            r"(?:i|we) (?:have|had) (?:no|insufficient|not enough) (?:idea|information|knowledge"
            r"|data|context|details)\b" + _FREE,
            r"(?:i am|i'm|we are|we're) (?:not (?:sure|certain|aware)|unsure|uncertain)\b" + _FREE,
            rf"(?:(?:i|we) )?{_CAN_NOT} (?:determine|find|answer|identify|tell|say|provide|locate"
            r"|infer|confirm|give|comply|access|retrieve|establish|verify"
            r"|help(?= you| with|$)|assist(?= you| with|$))\b" + _FREE,
            rf"{_FREE} {_CAN_NOT} be (?:determined|identified|established|inferred|answered)"
            rf"{_MAYBE_WHERE}",
            rf"{_FREE} (?:is|are|was|were)(?:n't| not) (?:explicitly )?{_GIVEN}{_WHERE}",
            rf"(?:there (?:is|was|are|were) |i have |i found )?{_INFORMATION} (?:information|answer"
            rf"|data|details?|context|mention)(?: (?:is|was|are))?(?: {_GIVEN})?"
            rf" (?:about|on|for|regarding|of|to) {_FREE}",
            rf"(?:the|this|that|these|my|none of the){_ADJECTIVES} {_MATERIAL} (?:do|does|did)"
            r"(?:n't| not) (?:\w+ )?(?:mention|provide|specify|contain|say|state|give|include"
            r"|answer|tell|have|indicate|show|list|identify)\b" + _FREE,
        )
    )
)
_FILLER = re.compile(
    r"(?:i am |i'm )?(?:very |so )?sorry(?: about that)?|i apologi[sz]e" + _FREE + r"|apologies"
    r"|unfortunately|(?:final )?answer|(?:please|could you|can you|would you|if you) " + _FREE + "|"
    r"(?:more|further|additional) (?:information|context|details) (?:is|are|would be) "
    r"(?:needed|required|helpful)"
)
_PREFIX = re.compile(
    r"(?:(?:the |my )?(?:final )?answer(?: is)?:? |(?:i am |i'm )?(?:very |so )?sorry,? (?:but )?"
    r"|unfortunately,? |i apologi[sz]e,? (?:but )?|(?:based on|according to|given|from)"
    rf"{_ADJECTIVES} {_MATERIAL}(?: provided| given)?, )+"
)


def is_refusal(text: str | None) -> bool:
    """Whether a reply gives nothing, or says nothing but that it has no answer.

    "None" counts, as small models write it for "not found". "No" is an answer.

    >>> [is_refusal(reply) for reply in (None, " ", "Answer: **not found**.", "I don't know.")]
    [True, True, True, True]
    >>> [is_refusal(reply) for reply in ("The Unknown Soldier", "It was not found guilty.", "No")]
    [False, False, False]
    """
    text = (text or "").strip()
    return len(text) <= _LONGEST_REFUSAL and _gives_nothing(text)


@_remembered
def _gives_nothing(text: str) -> bool:
    if all(unicodedata.category(c).startswith(("P", "Z", "C")) for c in text):
        return True
    kinds = {_refusal_kind(text[start:end]) for start, end in sentences(text)}
    return "refusal" in kinds and None not in kinds


def _refusal_kind(sentence: str) -> Literal["refusal", "filler"] | None:
    """What a sentence of a refusal is; None if it says something else."""
    folded = bare(sentence)
    if _FILLER.fullmatch(folded):
        return "filler"
    folded = _PREFIX.sub("", folded, count=1) if _PREFIX.match(folded) else folded
    folded = folded.strip(_DECORATION)
    if _REFUSAL.fullmatch(folded):
        return "refusal"
    if _WORDY_REFUSAL.fullmatch(folded) and not _is_title(sentence):
        return "refusal"
    return None


_SHORTEST_TITLE = 4


def _is_title(sentence: str) -> bool:
    """Whether a phrase is written as titles are, each longer word with a capital."""
    longer = [word for word in sentence.split() if len(word) > _LONGEST_FUNCTION_WORD]
    n_words = len(sentence.split())
    return n_words >= _SHORTEST_TITLE and all(
        word.strip(_DECORATION)[:1].isupper() for word in longer
    )
