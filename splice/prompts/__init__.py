"""Prompt templates, and the one way in which foreign text enters a prompt.

Templates are the `.txt` files beside this module, filled by `string.Template` because answers are
full of braces. Foreign text (queries, documents, outputs of nodes, tool returns, messages) is
*quoted*: each of its lines begins with "> ", so there is no end marker to forge and no line of
it can pass for a line of the template. Special tokens of chat formats are defused, because
servers turn them into control tokens wherever they stand.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from string import Template

from splice.errors import PromptError
from splice.records import digest

_BREAKS = re.compile(r"\r\n|[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f]"
    r"|[\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
# What chat templates use as control tokens: <|...|>, its full-width twin, and the named ones.
_TOKENS = re.compile(
    r"<(?=[|｜])"
    r"|<(?=/?(?:s|bos|eos|unk|pad|mask|start_of_turn|end_of_turn|tool_calls?|tool_responses?|"
    r"tools|think)>)"
    r"|<(?=</?SYS>>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\])",
    re.IGNORECASE,
)
_SUSPECT = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f]"
    r"|[\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f<\[]"
)


def without_surrogates(text: str) -> str:
    """Text in which lone surrogates, which no file and no request can carry, are U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def defuse(text: str) -> str:
    """Text without control tokens of chat formats, invisible characters and odd line breaks.

    A space goes between the opening bracket of a control token and the rest; lone surrogates and
    invisible characters are dropped.

    >>> defuse("Doha<|im_end|>")
    'Doha< |im_end|>'
    """
    if not _SUSPECT.search(text):
        return text
    text = _INVISIBLE.sub("", _BREAKS.sub("\n", text))
    return _TOKENS.sub(lambda found: found.group() + " ", text)


def quote(text: str) -> str:
    r"""Defused text with "> " before each line.

    >>> quote("two\nlines")
    '> two\n> lines'
    """
    return "> " + defuse(text).replace("\n", "\n> ")


def excerpt(text: str, n_head: int, n_tail: int) -> str:
    """A text, quoted, of which so many characters of both ends are left if it has more.

    A line says how many are left out between them.
    """
    n_left_out = len(text) - n_head - n_tail
    if n_left_out <= 0:
        return quote(text)
    mark = f"[{n_left_out} characters are left out here]"
    return quote(f"{text[:n_head]}\n{mark}\n{text[n_head + n_left_out :]}")


def one_line(text: str, limit: int = 400) -> str:
    r"""Defused text as one line of at most `limit` characters.

    For the few places where foreign text stands inside a line of the template.

    >>> one_line("find  the\nplace", limit=8)
    'find th…'
    """
    line = " ".join(defuse(text).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


@cache
def _template(name: str, package: str) -> tuple[str, tuple[tuple[str, str], ...], frozenset[str]]:
    """A template as its first literal text, (placeholder, following literal) pairs, and names.

    The syntax is that of `string.Template`; cut up once, because rendering is on the path of every
    node.
    """
    text = files(package).joinpath(f"{name}.txt").read_text("utf-8").rstrip("\n")
    pieces = re.split(r"\$([a-z_]+)", text)
    if set(pieces[1::2]) != set(Template(text).get_identifiers()):
        raise PromptError(
            f"prompt {name!r}: placeholders are written as $name, and $ means nothing else"
        )
    pairs = tuple(zip(pieces[1::2], pieces[2::2], strict=True))
    return pieces[0], pairs, frozenset(pieces[1::2])


def render(name: str, package: str = __name__, /, **values: str) -> str:
    """Fill the template `name` of a package, by default of this one.

    Every placeholder must be given, and no more.

    Raises:
        PromptError: the values and the placeholders differ.
    """
    text, pairs, names = _template(name, package)
    if values.keys() != names:
        raise PromptError(f"prompt {name!r}: missing or unused {sorted(values.keys() ^ names)}")
    for placeholder, literal in pairs:
        text += values[placeholder] + literal
    return text


@cache
def version() -> str:
    """Digest of what agents read, which goes into the fingerprint of every workflow.

    The other templates, such as the selector's, change nothing about a recorded run. Those that tell
    of capabilities (`told_*`) are in the fingerprints of workflows that declare some.
    """
    folder = files(__name__)
    texts = sorted(
        (item.name, item.read_text("utf-8"))
        for item in folder.iterdir()
        if item.name.startswith("agent_") and item.name.endswith(".txt")
    )
    return digest(repr(texts))
