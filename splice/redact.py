"""Keep secrets out of what is written down: traces and logs.

A secret is found by value (what secret-looking environment variables hold, and what the user names)
or by shape (keys and tokens of well-known issuers, `password=...`). Shapes that ordinary prose,
hashes and UUIDs share with secrets are left alone, so a secret without a known shape that is in
no variable either is not found: name it in `secrets`.

Every pattern walks over its match only once, whether or not it succeeds, so that a hostile text can't
make redaction slow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from splice.errors import SettingsError

MARK: Final = "[redacted]"
"""What stands in place of a secret."""

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL", re.IGNORECASE)
_SHORTEST_VALUE = 8
"""Shorter values of environment variables ("true", "1") would blot out ordinary words."""

_SHORTEST_SHAPE = 8
"""No pattern below matches fewer characters."""

_ISSUED = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"sk-[A-Za-z0-9_-]{16,}+"
    r"|hf_[A-Za-z0-9]{16,}+"
    r"|gh[oprsu]_[A-Za-z0-9]{16,}+"
    r"|github_pat_[A-Za-z0-9_]{16,}+"
    r"|glpat-[A-Za-z0-9_-]{16,}+"
    r"|xox[a-z]-[A-Za-z0-9-]{10,}+"
    r"|AIza[A-Za-z0-9_-]{30,}+"
    # With a digit, because ASIAPACIFICECONOMICS is a word.
    r"|(?:AKIA|ASIA)(?=[A-Z]{0,15}[0-9])[A-Z0-9]{16}(?![A-Za-z0-9])"
    r"|eyJ[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}+(?:\.[A-Za-z0-9_-]*+)?"
    r")"
)
_ISSUED_SIGNS = ("sk-", "glpat-", "xox", "AIza", "AKIA", "ASIA", "eyJ")
_UNDERSCORED_SIGNS = ("hf_", "gho_", "ghp_", "ghr_", "ghs_", "ghu_", "github_pat_")

# A key may be cut off before its end line, and may stand quoted ("> ") or escaped ("\n").
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}?PRIVATE KEY(?: BLOCK)?-----"
    r"(?:[A-Za-z0-9+/=]{24,}+|[\s>]|\\[nr]|(?:Proc-Type|DEK-Info|Version|Comment):[^\n\\]*+)*+"
    r"(?:[A-Za-z0-9+/=]{1,23}[\s>\\nr]*+(?=-----END))?+"
    r"(?:-----END [A-Z0-9 ]{0,50}-----)?"
)

_BEARER = re.compile(r"\b(bearer[ \t]{1,4})([A-Za-z0-9._~+/=-]{16,}+)", re.IGNORECASE)

_AUTHORIZATION = re.compile(
    r"(\bauthorization[\"'\\]{0,4}[ \t]{0,4}[:=][ \t]{0,4}[\"'\\]{0,4}(?:bearer|basic|token)[ \t]{1,4})"
    r"([^\s\"'\\,;\[]{4,}+)",
    re.IGNORECASE,
)

_URL_PASSWORD = re.compile(r"(?<=://)([^\s/:@\"'\[]{1,64}:)([^\s/@\"'\[]{3,128})(?=@)")

# Begins at the last letter of the name, because few letters stand before a colon or an equals sign.
_ASSIGNMENT = re.compile(
    r"[deknty](?=[\"'\\ \t]{0,8}[:=])"
    r"(?:(?<=key)|(?<=token)|(?<=secret)|(?<=password)|(?<=passwd)|(?<=passphrase))"
    r"\\{0,3}[\"']?[ \t]{0,4}(?P<sign>=>|:=|[:=])(?!=)[ \t]{0,4}"
    r"(?:\"(?P<double>(?:[^\"\\\n]|\\.)*+)"
    r"|'(?P<single>(?:[^'\\\n]|\\.)*+)"
    r"|\\{1,3}\"(?P<escaped>[^\"\\\n]*+)"
    r"|(?P<bare>[^\s\"'`,;&<>(){}\[\]|\\]++)(?P<call>[(\[])?)",
    re.IGNORECASE,
)
_VALUES = ("bare", "double", "single", "escaped")
_SURE_NAME = re.compile(
    r"(?:(?:api|secret|private|access)[_-]?key"
    r"|client[_-]?secret"
    r"|(?:access|api|auth|bearer|bot|id|refresh|secret|session)[_-]?token"
    r"|password|passwd|passphrase)\Z",
    re.IGNORECASE,
)
_LONGEST_NAME = 16
_ASSIGNMENT_SIGNS = ("key", "token", "secret", "passw", "passphrase")


class Redactor:
    """Replaces secrets in text by `[redacted]`.

    Redacting twice changes nothing more. The caller passes the environment, `os.environ` as a rule;
    its values are taken once, when the redactor is made.

    >>> redact = Redactor({"OPENAI_API_KEY": "correct-horse"}, secrets=["Project Nightjar"])
    >>> redact("Project Nightjar uses correct-horse and hf_abcdefghijklmnopqrstuv")
    '[redacted] uses [redacted] and [redacted]'
    """

    def __init__(
        self, environ: Mapping[str, str] | None = None, *, secrets: Iterable[str] = ()
    ) -> None:
        """Learn the secrets to look for.

        Args:
            environ: variables whose values of at least 8 characters are secret if their names
                look like it (KEY, TOKEN, SECRET, PASSWORD, ...).
            secrets: exact strings that are secret.

        Raises:
            SettingsError: a secret is empty.
        """
        named = list(secrets)
        if not all(named):
            raise SettingsError("an empty string can't be a secret")
        held = [
            value.strip()
            for name, value in (environ or {}).items()
            if _SECRET_NAME.search(name) and len(value.strip()) >= _SHORTEST_VALUE
        ]
        # Inside tool arguments a value stands in its JSON form. A part of the mark itself is left
        # out: replacing it would never come to an end.
        forms = {form for value in (*named, *held) for form in (value, *_json_forms(value))}
        self._shortest = min([_SHORTEST_SHAPE, *map(len, named)])
        self._values = sorted(
            (form for form in forms if form not in MARK), key=lambda v: (-len(v), v)
        )

    def __call__(self, text: str) -> str:
        """The text without the secrets that are found in it."""
        if len(text) < self._shortest:
            return text
        for value in self._values:
            text = text.replace(value, MARK)
        return _without_shapes(text)


def _json_forms(value: str) -> tuple[str, str]:
    return json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]


def _without_shapes(text: str) -> str:
    """The text without what is secret by its shape.

    A pattern is tried only where a sign of it is found, because looking for a fixed string is many
    times as fast.
    """
    if "-----BEGIN" in text:
        text = _PRIVATE_KEY.sub(MARK, text)
    signs = _ISSUED_SIGNS + _UNDERSCORED_SIGNS if "_" in text else _ISSUED_SIGNS
    if any(sign in text for sign in signs):
        text = _ISSUED.sub(MARK, text)
    if "://" in text:
        text = _URL_PASSWORD.sub(_second, text)
    lowered = text.lower()
    if "authorization" in lowered:
        text = _AUTHORIZATION.sub(_second, text)
    if "bearer" in lowered:
        text = _BEARER.sub(_bearer, text)
    if any(sign in lowered for sign in _ASSIGNMENT_SIGNS):
        text = _ASSIGNMENT.sub(_assignment, text)
    return text


_Replace = Callable[[re.Match[str]], str]


def _second(found: re.Match[str]) -> str:
    return found[1] + MARK


def _bearer(found: re.Match[str]) -> str:
    """Without the token, unless what follows "bearer" is a word, as in "bearer responsibilities"."""
    token = found[2]
    is_word = (
        token.rstrip(".").replace("-", "").isalpha() and token[1:].islower() and len(token) < 30
    )
    return found[0] if is_word else found[1] + MARK


def _assignment(found: re.Match[str]) -> str:
    """Without the value, if it can be a secret under its name."""
    group = next(kind for kind in _VALUES if found[kind] is not None)
    value = found[group]
    name_end = found.start() + 1
    name = found.string[max(0, name_end - _LONGEST_NAME) : name_end]
    if not _SURE_NAME.search(name):
        # A "token" can be a word, and a bare "key" anything.
        is_secret = len(value) >= 16 and _looks_random(value) and not name.lower().endswith("key")
    elif group != "bare":
        is_secret = len(value) >= 4
    elif ":" in found["sign"]:
        # In prose a colon is followed by words: "the password: whatever".
        is_secret = len(value) >= 6 and _looks_random(value)
    else:
        # `api_key=os.environ[...]` and `password=getpass()` hold no secret.
        is_secret = len(value) >= 6 and found["call"] is None
    if not is_secret:
        return found[0]
    start = found.start(group) - found.start()
    return found[0][:start] + MARK + found[0][start + len(value) :]


def _looks_random(value: str) -> bool:
    return (
        any(map(str.isdigit, value))
        and any(map(str.isalpha, value))
        and not any(map(str.isspace, value))
    )
