"""Running a Python program that a model wrote.

The program runs in a process of its own, in an empty folder, with an empty environment, without
packages, and confined in three layers:

- limits of the system: wall and CPU time, memory, no file longer than 0 bytes, no new processes
  (the last does not bind root)
- on Linux, where the kernel permits each: a user and network namespace of its own (no network),
  no new privileges, and Landlock (no file but those of Python itself)
- a guard inside the interpreter, an audit hook: no file is written; none is read, and no folder
  listed, but those of the standard library; no sockets, processes, signals to others, or foreign
  code

**What this is not.** It stops accidents and what models write in passing: endless loops, memory
bombs, deleted files, a look at the environment. It is no boundary against a determined attacker:
an audit hook is not made to be one, a kernel without namespaces and Landlock leaves it alone, the
program may still ask whether a path exists, and it shares the kernel and the processor with
everything else. Run hostile code in a container or a virtual machine, and this inside it.

**What `ok` means.** The program reached its end. A secret that each run draws anew, and that the
program is not told, says so on a channel of its own: neither printing something nor leaving by
`exit(0)` or `os._exit(0)` passes for it. Tests that are part of the program share an interpreter
with what they test, however: code written to deceive them can, for instance by an object that
equals everything, or by digging the secret out of the frames below its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, TypeAlias

from splice.errors import SettingsError

Outcome: TypeAlias = Literal["ok", "error", "exit", "timeout", "memory", "output"]
"""`ok`: it reached its end; `error`: it raised, is no Python, or crashed; `exit`: it left before
its end, whatever its status; the others name the limit that it ran into."""

_CHILD = Path(__file__).with_name("child.py")
_CHUNK = 65536
_MOST_REPORTED = 1000
"""Bytes; two short lines are expected."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended, and what it printed."""

    outcome: Outcome
    returncode: int
    """Exit status; negative: the signal that ended it."""
    stdout: str
    stderr: str
    """With the traceback, if it raised."""


def run_program(
    source: str,
    *,
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    max_output: int = 65536,
) -> ProgramResult:
    """Run a Python program in the sandbox, as `__main__`, with nothing on its standard input.

    When it reaches its end, exit handlers are not called, and threads that it started end with it.

    Args:
        source: the program.
        timeout_s: seconds of wall time, those of starting Python included.
        memory_mb: address space of the process, Python's own included, in MiB.
        max_output: bytes of stdout and stderr together; a program that prints more is stopped.

    Raises:
        SettingsError: the system is not POSIX, or no Python started under these limits.
    """
    if os.name != "posix":
        raise SettingsError("the sandbox needs a POSIX system")
    nonce = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as program:
        program.write(f"{nonce}\n".encode() + source.encode("utf-8", "surrogatepass"))
        program.seek(0)
        with _child(program, folder, timeout_s, memory_mb) as (process, reports):
            listener = _Listener(process, reports, max_output)
            stopped = listener.listen(time.monotonic() + timeout_s)
    said = [line.removeprefix(nonce).strip() for line in listener.reports(nonce)]
    stdout, stderr = listener.texts()
    if "started" not in said and stopped is None:
        raise SettingsError(f"the sandbox did not start: {stderr.strip()[-400:] or 'no reason'}")
    return ProgramResult(
        outcome=stopped or _outcome(said[-1], process.returncode),
        returncode=process.returncode,
        stdout=stdout,
        stderr=stderr,
    )


def _outcome(said: str, returncode: int) -> Outcome:
    """What a program that nobody had to stop came to, by its last report and its status."""
    if said == "ok" and returncode == 0:
        return "ok"
    if said == "memory" or returncode == -signal.SIGKILL:
        # Nobody else kills: the system does so when memory runs out.
        return "memory"
    if returncode == -signal.SIGXCPU:
        return "timeout"
    return "error" if said == "error" or returncode < 0 else "exit"


@contextlib.contextmanager
def _child(
    program: IO[bytes], folder: str, timeout_s: float, memory_mb: int
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """The confined process and what it reports on; it is gone when the block ends."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as reports:
        # Not the link in a virtual environment: that would need files of the environment.
        python = os.path.realpath(sys.executable)
        limits = [str(math.ceil(timeout_s) + 1), str(memory_mb), str(writer)]
        try:
            process = subprocess.Popen(
                [python, "-I", "-S", "-B", "-X", "utf8", str(_CHILD), "confine", *limits],
                stdin=program,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env={},
                pass_fds=(writer,),
                start_new_session=True,
            )
        except OSError as error:
            raise SettingsError(f"the sandbox can't start {python}: {error.strerror}") from None
        finally:
            os.close(writer)
        with process:
            try:
                yield process, reports
            finally:
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it may have started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class _Listener:
    """Reads what a process prints and reports, within bounds."""

    def __init__(
        self, process: subprocess.Popen[bytes], reports: IO[bytes], max_output: int
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._printed = (process.stdout, process.stderr)
        self._max_output = max_output
        self._reports = reports
        self._read: dict[IO[bytes], bytearray] = {s: bytearray() for s in (*self._printed, reports)}

    def listen(self, deadline: float) -> Literal["timeout", "output"] | None:
        """Read until the process has ended; why it was stopped, if it had to be."""
        with selectors.DefaultSelector() as selector:
            for stream, read in self._read.items():
                selector.register(stream, selectors.EVENT_READ, read)
            while selector.get_map():
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    chunk = os.read(key.fd, _CHUNK)
                    if not chunk:
                        selector.unregister(key.fileobj)
                    key.data.extend(chunk)
                if self._is_too_much():
                    return self._stop("output")
                if time.monotonic() >= deadline:
                    return self._stop("timeout")
        try:
            # It may have closed its outputs and gone on.
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return self._stop("timeout")
        return None

    def _is_too_much(self) -> bool:
        n_printed = sum(len(self._read[stream]) for stream in self._printed)
        # A program may find the channel of the reports and flood it.
        return n_printed > self._max_output or len(self._read[self._reports]) > _MOST_REPORTED

    def _stop(self, reason: Literal["timeout", "output"]) -> Literal["timeout", "output"]:
        _kill(self._process)
        self._process.wait()
        return reason

    def reports(self, nonce: str) -> list[str]:
        """What the guard reported, without what the program may have written there."""
        lines = self._read[self._reports].decode("ascii", "replace").splitlines()
        return [line for line in lines if line.startswith(nonce)]

    def texts(self) -> tuple[str, str]:
        """What was printed to stdout and stderr, each cut at the limit."""
        out, err = (self._read[stream][: self._max_output] for stream in self._printed)
        return out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
