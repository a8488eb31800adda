"""What the redactor takes out of text, and what it leaves in."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soon import soon

from splice.errors import SettingsError
from splice.redact import Redactor

PEM = "\n".join(
    [
        "-----BEGIN RSA PRIVATE KEY-----",
        "MIIEowIBAAKCAQEAx0Z8ZrM1dX9v3sHq4l5c7qY2b8f1n0w6p3k9t5r7u2y4i6o8",
        "QWERTYUIOPasdfghjklzxcvbnm0123456789+/QWERTYUIOPasdfghjklzxcvbnm",
        "c2hvcnQ=",
        "-----END RSA PRIVATE KEY-----",
    ]
)
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("use sk-proj-abcDEF0123456789xyz now", "use [redacted] now"),
        ("sk-ant-api03-abcdefghijklmnop_qrs-tuv", "[redacted]"),
        ("hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ", "[redacted]"),
        ("push with ghp_0123456789abcdefghijABCDEFGHIJ012345.", "push with [redacted]."),
        ("github_pat_11ABCDEFG0123456789_abcdefghij", "[redacted]"),
        ("id AKIAIOSFODNN7EXAMPLE, region eu", "id [redacted], region eu"),
        ("xoxb-123456789012-abcdefghijkl", "[redacted]"),
        ("glpat-abcDEF0123456789wxyz", "[redacted]"),
        ("Authorization: Bearer abcdefgh", "Authorization: Bearer [redacted]"),
        ('{"Authorization": "Basic dXNlcjpwYXNz"}', '{"Authorization": "Basic [redacted]"}'),
        ("curl -H 'bearer 0123456789abcdef0123'", "curl -H 'bearer [redacted]'"),
        (f"jwt={JWT}!", "jwt=[redacted]!"),
        ("GET /v1?api_key=abc123def&page=2", "GET /v1?api_key=[redacted]&page=2"),
        ("export OPENAI_API_KEY=abcdefghijkl", "export OPENAI_API_KEY=[redacted]"),
        ('{"password": "hunter2", "user": "ann"}', '{"password": "[redacted]", "user": "ann"}'),
        ('{"password": "a\\"b c", "x": 1}', '{"password": "[redacted]", "x": 1}'),
        (r"{\"apiKey\": \"hunter2\", \"x\": 1}", r"{\"apiKey\": \"[redacted]\", \"x\": 1}"),
        ("client_secret = 'it is long'", "client_secret = '[redacted]'"),
        ("password: hunter22\n", "password: [redacted]\n"),
        ("token=0123456789abcdef0123", "token=[redacted]"),
        ("postgres://ann:s3cret@db/main", "postgres://ann:[redacted]@db/main"),
        (f"before\n{PEM}\nafter", "before\n[redacted]\nafter"),
        ("> " + PEM.replace("\n", "\n> ") + "\n> after", "> [redacted]\n> after"),
        (json.dumps({"key": PEM}), '{"key": "[redacted]"}'),
        (PEM[:150] + "\n\nNothing follows.", "[redacted]Nothing follows."),
    ],
)
def test_a_secret_of_a_known_shape_is_replaced(text: str, expected: str) -> None:
    assert Redactor()(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "The secret: understanding what the customer wants. The password: whatever you like.",
        "Token: a word or a part of one. The key: patience. Bearer responsibilities vary.",
        "He asked for the password and got a token of esteem; task-management-of-long-words helps.",
        "Risk-averse desk-bound people ask-and-answer-and-ask-again-and-again.",
        "550e8400-e29b-41d4-a716-446655440000",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "cache_key=e3b0c44298fc1c149afbf4c8996fb924, commit 2cd330f, prompt_tokens=1234567890123",
        "ASIAPACIFICECONOMICS and AKIA are words here",
        "from hf_hub import hf_hub_download_v2; api_key=os.environ['KEY_NAME']; password=getpass()",
        '{"token": "hello", "logprob": -0.25}, {"token": "internationalization"}',
        "if password == candidate: return token",
        "https://example.org:8080/a@b and mailto:someone@example.org",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
        "Gespräch über Schlüssel: nichts Geheimes; 密码是什么?",
        "",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert Redactor()(text) == text


def test_values_of_secret_looking_variables_are_replaced_wherever_they_stand() -> None:
    environ = {
        "OPENAI_API_KEY": "plainvalue1",
        "db_password": 'with "quote"',
        "HOME": "/home/somebody",
        "SHORT_TOKEN": "true",
    }
    redact = Redactor(environ)
    assert redact("xxplainvalue1xx") == "xx[redacted]xx"
    assert redact(json.dumps({"a": 'with "quote"'})) == '{"a": "[redacted]"}'
    assert redact("/home/somebody is true") == "/home/somebody is true"


def test_the_environment_is_captured_when_the_redactor_is_made() -> None:
    environ = {"SOME_SECRET": "first-value"}
    redact = Redactor(environ)
    environ["SOME_SECRET"] = "other-value"
    assert redact("first-value other-value") == "[redacted] other-value"


def test_a_longer_secret_wins_over_one_inside_it() -> None:
    redact = Redactor(secrets=["nightjar", "nightjar-seven"])
    assert redact("nightjar-seven nightjar") == "[redacted] [redacted]"


def test_exact_strings_of_the_user_may_be_short() -> None:
    assert Redactor(secrets=["Zoë"])("ask Zoë") == "ask [redacted]"
    assert Redactor(secrets=["Zoë"])("Zoë") == "[redacted]"


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(SettingsError, match="empty string"):
        Redactor(secrets=[""])


NAMES = ["password", "api_key", "token", "=", ": ", "Bearer ", "://", "@", "sk-", "eyJ"]
VALUES = [
    "abcdef0123456789",
    "red",
    "nightjar",
    "[redacted]",
    '"',
    "'",
    "\\",
    "\n",
    " ",
    "> ",
    ".",
    "é",
]
LIMITS = ["-----BEGIN PRIVATE KEY-----", "-----END", "\ud800"]
PIECES = st.sampled_from([*NAMES, *VALUES, *LIMITS])


@settings(deadline=None, max_examples=300)
@given(st.lists(PIECES, max_size=14).map("".join))
def test_redacting_twice_changes_nothing_more(text: str) -> None:
    redact = Redactor({"A_KEY": "nightjar", "B_KEY": "redacted"}, secrets=["red"])
    once = redact(text)
    assert redact(once) == once
    assert "nightjar" not in once


@pytest.mark.parametrize(
    "piece",
    [
        "sk-",
        "password=",
        "password:",
        "password='password=\"",
        'password="',
        'password=\\"\\',
        "password          ",
        "eyJ",
        "eyJaaaaaaaaaa.",
        "bearer ",
        "authorization: bearer ",
        "://a:",
        "-----BEGIN ",
        "-----BEGIN PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\n" + "A" * 64 + "\n",
        "> ",
        "a",
    ],
)
def test_time_grows_no_faster_than_the_text(piece: str) -> None:
    redact = Redactor({"A_KEY": "nightjar"})

    text = "-----BEGIN PRIVATE KEY-----" + piece * (1_000_000 // len(piece))
    # A quadratic pattern would take hours for this.
    with soon():
        redact(text)
