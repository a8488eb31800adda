"""What a user can import, and what it costs to import it."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import splice

HEAVY = ("torch", "transformers", "lightgbm", "joblib", "openai", "networkx", "jinja2", "xllamacpp")


def loaded_by(code: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after running `code`."""
    script = f"{code}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.splitlines()[-1].split())


def test_the_public_names_are_sorted_and_listed_once() -> None:
    assert sorted(set(splice.__all__)) == list(splice.__all__)


@pytest.mark.parametrize("name", splice.__all__)
def test_each_public_name_can_be_imported(name: str) -> None:
    assert getattr(splice, name) is not None
    exec(f"from splice import {name}", {})


def test_everything_can_be_imported_at_once() -> None:
    names: dict[str, object] = {}
    exec("from splice import *", names)
    assert set(splice.__all__) <= set(names)


def test_dir_lists_the_public_names() -> None:
    assert dir(splice) == sorted(splice.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'splice' has no attribute 'mend'"):
        splice.mend  # noqa: B018 - the access is the test


def test_no_public_name_has_two_homes() -> None:
    homes = [name for names in splice._HOME.values() for name in names]
    assert sorted(homes) == sorted(set(homes))
    assert set(homes) | {"__version__"} == set(splice.__all__)
    for module, names in splice._HOME.items():
        for name in names:
            assert getattr(importlib.import_module(module), name) is getattr(splice, name)


def test_every_error_is_public() -> None:
    from splice import errors

    found = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.SpliceError)
    }
    assert found <= set(splice.__all__)


def test_the_package_ships_its_types() -> None:
    from importlib.resources import files

    assert files("splice").joinpath("py.typed").is_file()


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import splice") == set()
    assert loaded_by("import splice\nassert 'pydantic' not in __import__('sys').modules") == set()


def test_importing_the_doors_loads_nothing_heavy() -> None:
    assert loaded_by("import splice.api") == set()
    assert loaded_by("from splice import *") == set()


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = ['splice', '--help']\nfrom splice.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass"
    )
    assert loaded_by(code) == set()
