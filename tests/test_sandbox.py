"""Programs that a model wrote: what they can't do, and what counts as having run."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from splice.errors import SettingsError
from splice.sandbox import ProgramResult, run_program

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs POSIX")


def test_a_program_that_reaches_its_end_is_ok_and_its_output_is_kept() -> None:
    result = run_program("import sys\nprint('grüß 漢 🎈')\nprint('aside', file=sys.stderr)")
    assert result == ProgramResult(
        outcome="ok", returncode=0, stdout="grüß 漢 🎈\n", stderr="aside\n"
    )


def test_the_standard_library_is_there_and_packages_are_not() -> None:
    source = (
        "import bisect, collections, dataclasses, datetime, decimal, enum, fractions, functools\n"
        "import hashlib, heapq, itertools, json, math, random, re, statistics, string, typing\n"
        "import pydantic"
    )
    result = run_program(source)
    assert result.outcome == "error"
    assert "No module named 'pydantic'" in result.stderr


def test_the_program_is_the_main_module_and_reads_an_empty_input() -> None:
    result = run_program("import sys\nprint(__name__, repr(sys.stdin.read()))")
    assert result.stdout == "__main__ ''\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("1/0", "ZeroDivisionError"),
        ("x = (", "SyntaxError"),
        ("def f(): f()\nf()", "RecursionError"),
        ("x = '\ud800'", "UnicodeEncodeError"),
        ("x = '\0'", "null bytes"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class A(Exception):\n    def __str__(self): return 1/0\nraise A", "A"),
        ("input()", "EOFError"),
    ],
)
def test_what_raises_is_an_error_and_the_traceback_is_kept(source: str, said: str) -> None:
    result = run_program(source)
    assert (result.outcome, result.returncode) == ("error", 1)
    assert said in result.stderr


def test_a_traceback_begins_with_the_programs_own_line() -> None:
    lines = run_program("def f():\n    return 1/0\nf()").stderr.splitlines()
    assert lines[1].strip() == 'File "<program>", line 3, in <module>'


def test_a_crash_is_an_error() -> None:
    result = run_program("import os, signal\nsignal.raise_signal(signal.SIGSEGV)")
    assert (result.outcome, result.returncode) == ("error", -11)


# --- leaving early ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "returncode"),
    [
        ("import os\nos._exit(0)\nassert False", 0),
        ("import sys\nsys.exit()\nassert False", 0),
        ("raise SystemExit(3)", 3),
        # Says `ok` on every channel that it may have.
        ("import os\nfor fd in range(64):\n    try: os.write(fd, b'\\nok\\nok')\n"
         "    except OSError: pass\nos._exit(0)", 0),
    ],
)  # fmt: skip
def test_leaving_before_the_end_is_not_ok(source: str, returncode: int) -> None:
    result = run_program(source)
    assert (result.outcome, result.returncode) == ("exit", returncode)


def test_the_secret_is_gone_from_the_input_and_differs_by_run() -> None:
    source = (
        "import os\n"
        "try: os.lseek(0, 0, os.SEEK_SET)\n"
        "except OSError as error: print(error.strerror)\n"
        "print(os.read(0, 100))"
    )
    assert run_program(source).stdout == "Illegal seek\nb''\n"


# --- limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "import os, time\nos.closerange(0, 100)\ntime.sleep(60)",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ],
)
def test_a_program_that_goes_on_is_stopped(source: str) -> None:
    start = time.monotonic()
    result = run_program(source, timeout_s=0.7)
    assert (result.outcome, result.returncode) == ("timeout", -9)
    assert time.monotonic() - start < 30


def test_what_was_printed_before_the_stop_is_kept() -> None:
    result = run_program("print('here', flush=True)\nwhile True: pass", timeout_s=1.0)
    assert (result.outcome, result.stdout) == ("timeout", "here\n")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't limit it")
@pytest.mark.parametrize(
    "source", ["x = bytearray(10**10)", "x = []\nwhile True: x.append(bytearray(10**6))"]
)
def test_a_memory_bomb_ends_at_the_limit(source: str) -> None:
    result = run_program(source, memory_mb=256)
    assert (result.outcome, result.returncode) == ("memory", 1)


def test_a_program_that_prints_forever_is_stopped_at_the_limit() -> None:
    result = run_program("while True: print('x' * 99)", max_output=1000)
    assert (result.outcome, result.returncode) == ("output", -9)
    assert 900 < len(result.stdout) <= 1000


def test_output_up_to_the_limit_is_kept() -> None:
    assert run_program("print('x' * 999)", max_output=1000).stdout == "x" * 999 + "\n"


def test_flooding_the_channel_of_reports_ends_the_program() -> None:
    flood = (
        "import os\nwhile True:\n    for fd in range(3, 64):\n"
        "        try: os.write(fd, b'x' * 4096)\n        except OSError: pass"
    )
    assert run_program(flood).outcome == "output"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't limit it")
def test_limits_under_which_python_does_not_start_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(SettingsError, match="the sandbox did not start"):
        run_program("pass", memory_mb=1)


# --- what is refused -------------------------------------------------------------------------


def test_a_file_outside_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2", "utf-8")
    ways = [
        f"open({str(secret)!r}).read()",
        f"__import__('os').open({str(secret)!r}, 0)",
        f"__import__('io').FileIO({str(secret)!r})",
        f"__import__('os').listdir({str(tmp_path)!r})",
        f"__import__('os').scandir({str(tmp_path)!r})",
        f"open(__import__('os').__file__ + '/../../../../../../../../../..' + {str(secret)!r})",
    ]
    source = "\n".join(
        f"try:\n    print({way})\nexcept PermissionError:\n    print('refused')" for way in ways
    )
    result = run_program(source)
    assert (result.outcome, result.stdout) == ("ok", "refused\n" * len(ways))


def test_a_path_that_says_two_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("hunter2", "utf-8")
    source = (
        "import os\n"
        "class Twofold(str):\n"
        "    def __add__(self, other): return os.__file__\n"
        "    def __contains__(self, other): return False\n"
        f"print(open(Twofold({str(tmp_path / 'secret.txt')!r})).read())"
    )
    result = run_program(source)
    assert result.outcome == "error"
    assert "hunter2" not in result.stdout


WRITES = (
    "open({path!r}, 'w')",
    "open({path!r}, 'a')",
    "open({path!r}, 'r+')",
    "open('here.txt', 'w')",
    "import os\nos.remove({path!r})",
    "import os\nos.rename({path!r}, {path!r} + '2')",
    "import os\nos.truncate({path!r}, 0)",
    "import os\nos.chmod({path!r}, 0)",
    "import os\nos.rmdir(os.path.dirname({path!r}))",
    "import os\nos.mkdir({path!r} + 'd')",
    "import os\nos.symlink({path!r}, 'link')",
    "import shutil, os\nshutil.rmtree(os.path.dirname({path!r}))",
    "import pathlib\npathlib.Path({path!r}).write_text('x')",
    "import pathlib\npathlib.Path({path!r}).unlink()",
    "import tempfile\ntempfile.NamedTemporaryFile()",
)


def refusals(sources: Iterable[str]) -> list[str]:
    """What came of each of some programs, run one after the other in one sandbox."""
    result = run_program(
        f"for source in {list(sources)!r}:\n"
        "    try: exec(source)\n"
        "    except Exception as error: print(repr(source), type(error).__name__, error)\n"
        "    else: print(repr(source), 'went through')"
    )
    assert result.outcome == "ok", result.stderr
    return result.stdout.splitlines()


def test_nothing_is_written_moved_or_deleted(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine", "utf-8")
    said = refusals(source.format(path=str(mine)) for source in WRITES)
    assert len(said) == len(WRITES)
    assert [line for line in said if "Error" not in line] == []
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert mine.read_text("utf-8") == "mine"


REACHING_OUT = (
    "import socket\nsocket.socket()",
    "import _socket",
    "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')",
    "import ctypes",
    "import _ctypes",
    "import os\nos.system('true')",
    "import os\nos.popen('true')",
    "import os\nos.execv('/bin/true', ['true'])",
    "import os\nos.posix_spawn('/bin/true', ['true'], {})",
    "import os\nos.fork()",
    "import os\nos.kill(os.getppid(), 9)",
    "import os\nos.killpg(0, 9)",
    "import subprocess\nsubprocess.run(['true'])",
    "import _posixsubprocess",
    "import multiprocessing\nmultiprocessing.Process(target=print).start()",
    "import gc\ngc.get_objects()",
    "import resource",
    "import sys\nsys.modules.clear()\nimport ctypes",
)


def test_no_network_no_processes_no_foreign_code() -> None:
    said = refusals(REACHING_OUT)
    assert len(said) == len(REACHING_OUT)
    assert [line for line in said if "the sandbox " not in line] == []


def test_a_fork_bomb_starts_nothing() -> None:
    source = (
        "import os\n"
        "while True:\n"
        "    try:\n"
        "        os.fork()\n"
        "        print('forked', flush=True)\n"
        "    except PermissionError:\n"
        "        pass"
    )
    result = run_program(source, timeout_s=0.7)
    assert (result.outcome, result.stdout) == ("timeout", "")


def test_catching_a_refusal_and_changing_builtins_opens_nothing(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2", "utf-8")
    source = (
        "import builtins, sys\n"
        "try: open('/')\n"
        "except PermissionError as error: frame = error.__traceback__.tb_next.tb_frame\n"
        "frame.f_globals['_HARMLESS'] = frame.f_locals['harmless'] | {'open'}\n"
        "frame.f_locals['harmless'] = {'open'}\n"
        "sys.path.append('/')\n"
        "builtins.type = lambda value: str\n"
        f"print(open({str(secret)!r}).read())"
    )
    result = run_program(source)
    assert result.outcome == "error"
    assert "hunter2" not in result.stdout


def test_the_environment_of_the_caller_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    source = (
        "import os\nprint(dict(os.environ))\nprint(open(f'/proc/{os.getppid()}/environ').read())"
    )
    result = run_program(source)
    assert "SECRET_KEY" not in result.stdout
    assert result.outcome == "error"


def test_the_folder_of_the_caller_is_not_the_programs() -> None:
    assert run_program("import os\nprint(os.getcwd())").stdout.strip() != os.getcwd()


def has_landlock() -> bool:
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) > 0


@pytest.mark.skipif(not has_landlock(), reason="this kernel has no Landlock")
def test_the_kernel_refuses_what_the_guard_does_not_hear_of(tmp_path: Path) -> None:
    result = run_program(f"import os\nos.mkfifo({str(tmp_path / 'pipe')!r})")
    assert "Permission denied" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(SettingsError, match="POSIX"):
        run_program("pass")
