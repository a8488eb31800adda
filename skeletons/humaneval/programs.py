"""From a reviewer's answer to a program that tests itself."""

from __future__ import annotations

import re
import textwrap

_FENCED = re.compile(r"^[ \t]*(```++|~~~++)[^\n]*\n(.*?)(?:^[ \t]*\1|\Z)", re.MULTILINE | re.DOTALL)


def extract(answer: str, entry_point: str) -> str:
    """The code of an answer: its last fenced block, or all of it if there is none.

    A block that defines the function is preferred to one that only shows how it is called.
    """
    blocks = [textwrap.dedent(match[2]) for match in _FENCED.finditer(answer)]
    defining = [block for block in blocks if _defines(block, entry_point)]
    return (defining or blocks or [answer])[-1]


def _defines(code: str, entry_point: str) -> bool:
    pattern = rf"^(?:def\s+{entry_point}\b|{entry_point}\s*=)"
    return re.search(pattern, code, re.MULTILINE) is not None


def header(prompt: str, entry_point: str) -> str | None:
    """What the prompt has before the function; None if it does not hold the function."""
    places = [match.start() for match in re.finditer(rf"^def {entry_point}\b", prompt, re.M)]
    return prompt[: places[-1]] if places else None


def self_testing(code: str, *, prompt: str, entry_point: str, test: str) -> str:
    """A program that reaches its end only if `code` passes `test`.

    What the prompt has before the function (imports, other functions) is there for it. Code that
    does not define the function is taken as its body.

    Each part is compiled by itself, so that an open string or bracket in `code` can't take the
    tests with it, and runs in a namespace apart from that of these lines.
    """
    if _defines(code, entry_point):
        before = header(prompt, entry_point) or ""
    else:
        body = textwrap.indent(textwrap.dedent(code), "    ")
        before, code = "", f"{prompt.rstrip()}\n{body}"
    parts = [("<prompt>", before), ("<answer>", code), ("<test>", test)]
    # Not `__main__`, or what an answer does when it is run as a script would be done.
    return (
        "space = {'__name__': 'answer'}\n"
        f"for name, text in {parts!r}:\n"
        "    exec(compile(text, name, 'exec'), space)\n"
        f"space['check'](space[{entry_point!r}])\n"
    )
