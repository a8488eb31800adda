"""Functions and tools from a Python file that the user names on the command line.

A workflow file never names code to import: it may come from anywhere, and opening it must run
nothing. The Python file is given apart, by the person who runs the command.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from splice.errors import SettingsError
from splice.workflow import Tool


def load_code(path: Path) -> tuple[Mapping[str, Callable[..., Any]], tuple[Tool, ...]]:
    """Run a Python file and collect its functions, by name, and its tools.

    Raises:
        SettingsError: the file can't be read, or raises.
    """
    if not path.is_file():
        raise SettingsError(f"{path}: no such file")
    # A name of its own, so that a file called `json.py` hides nothing.
    spec = importlib.util.spec_from_file_location(f"splice_code_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and the like look up the module that they are defined in.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise SettingsError(f"{path}: {type(error).__name__}: {error}") from error
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    tools = tuple(value for value in public.values() if isinstance(value, Tool))
    functions = {name: value for name, value in public.items() if callable(value)}
    return functions, tools
