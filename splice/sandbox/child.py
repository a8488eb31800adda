"""What runs inside the sandbox: first `confine`, then, in a fresh interpreter, `guard`.

    python child.py confine CPU_S MEMORY_MB REPORT_FD
    python child.py guard REPORT_FD

Started by path and alone: it imports nothing of the library. `confine` asks the kernel for what it
gives and replaces itself by `guard`, so that `ctypes`, which it needs, is not loaded where the
program runs. `guard` reads a secret and the program from its standard input, arms the audit hook
and runs the program.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

_N_FILES = 32
"""Open files; imports need a few at a time."""

# --- confine ---------------------------------------------------------------------------------

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_SIGKILL = 9
# The same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_FILE_RIGHTS, _FOLDER_RIGHTS = 0b101, 0b1101
"""Execute and read; for folders also list."""


def confine(cpu_s: int, memory_mb: int, report_fd: int) -> NoReturn:
    """Give up what can be given up, then become the guard."""
    if sys.platform == "linux":
        _ask_the_kernel()
    _limit(cpu_s, memory_mb)
    flags = ["-I", "-S", "-B", "-X", "utf8"]
    os.execv(sys.executable, [sys.executable, *flags, __file__, "guard", str(report_fd)])


def _limit(cpu_s: int, memory_mb: int) -> None:
    import resource

    wanted = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _N_FILES,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError):
            # macOS can't limit the address space.
            if sys.platform == "linux":
                raise


def _ask_the_kernel() -> None:
    """Namespaces, no new privileges, Landlock; each is left out where it is not permitted."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    # Not before `unshare`, which would take it back.
    libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        _landlock(libc.syscall)


def _landlock(syscall: Callable[..., int]) -> None:
    """Leave of all files those that Python needs, to be read and executed.

    Source: the kernel's documentation, userspace-api/landlock; rights by version of its interface.
    """
    import ctypes
    import struct

    version = syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    n_rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    n_bytes = 8 if version < 4 else 16 if version < 6 else 24
    # Rights on files, on TCP ports, and over processes and sockets outside: handled, not granted.
    handled = struct.pack("=QQQ", (1 << n_rights) - 1, 0b11, 0b11)[:n_bytes]
    ruleset = syscall(_CREATE_RULESET, handled, ctypes.c_size_t(n_bytes), 0)
    if ruleset < 0:
        return
    for path in _needed():
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rights = _FOLDER_RIGHTS if os.path.isdir(path) else _FILE_RIGHTS
        syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", rights, fd), 0)
        os.close(fd)
    syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _needed() -> Iterable[str]:
    """Files and folders without which Python does not start or can't import."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line}
    # Of the linker and of libraries, and so of what extension modules link against.
    folders = {os.path.dirname(path) for path in mapped if ".so" in os.path.basename(path)}
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
    return {sys.executable, __file__, *sys.path, *folders, *system}


# --- guard -----------------------------------------------------------------------------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_HARMLESS: Final = _names(
    "array.__new__ builtins.id builtins.input builtins.input/result code.__new__ compile exec"
    " cpython._PySys_ClearAuditHooks cpython.PyInterpreterState_Clear function.__new__"
    " marshal.dumps marshal.load marshal.loads object.__delattr__ object.__getattr__"
    " object.__setattr__ os.putenv os.unsetenv pickle.find_class sys._getframe"
    " sys._getframemodulename sys.excepthook sys.set_asyncgen_hooks_finalizer"
    " sys.set_asyncgen_hooks_firstiter sys.unraisablehook time.sleep"
)
"""Events that any program may raise. What is not listed is refused, unknown events included."""

_REFUSED_MODULES: Final = _names(
    "_ctypes _ctypes_test _curses _dbm _gdbm _interpreters _multiprocessing _posixshmem"
    " _posixsubprocess _socket _sqlite3 _ssl _testcapi _testinternalcapi _testlimitedcapi"
    " _testmultiphase _xxinterpchannels _xxsubinterpreters cffi ctypes dbm fcntl grp mmap"
    " multiprocessing nis pty pwd readline resource socket spwd sqlite3 ssl subprocess"
    " syslog termios"
)
"""Modules that reach outside, most of them by calls that raise no event."""


def guard(report_fd: int) -> NoReturn:
    """Read the program, arm the hook, run the program, say how it ended."""
    nonce, _, source = sys.stdin.buffer.read().partition(b"\n")
    _empty_standard_input()
    # Made beforehand: once memory has run out there may be none to make them of.
    reports = {kind: nonce + b" " + kind.encode() + b"\n" for kind in _KINDS}
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    write, leave = os.write, os._exit
    write(report_fd, reports["started"])
    sys.addaudithook(_hook(sys.path))
    try:
        kind = _run(source, module.__dict__)
    except SystemExit:
        write(report_fd, reports["exit"])
        raise
    _flush()
    write(report_fd, reports[kind])
    leave(0 if kind == "ok" else 1)


_KINDS = ("started", "ok", "error", "exit", "memory")


def _empty_standard_input() -> None:
    """Replace the file that holds the program, which could be wound back, by an ended pipe."""
    reader, writer = os.pipe()
    os.close(writer)
    os.dup2(reader, 0)
    os.close(reader)


def _run(source: bytes, namespace: dict[str, Any]) -> str:
    """Run the program; how it ended.

    Raises:
        SystemExit: the program's own.
    """
    try:
        text = source.decode("utf-8", "surrogatepass")
        exec(compile(text, "<program>", "exec", dont_inherit=True), namespace)
    except SystemExit:
        raise
    except MemoryError:
        return "memory"
    except BaseException as error:
        _show(error)
        return "error"
    return "ok"


def _show(error: BaseException) -> None:
    """Print the traceback without this file's own frame."""
    trace = error.__traceback__
    own = error.with_traceback(trace and trace.tb_next)
    # A program may have replaced its outputs, and its error may raise when it is printed.
    with contextlib.suppress(BaseException):
        sys.__excepthook__(type(own), own, own.__traceback__)


def _flush() -> None:
    """Let go of what was printed: `_exit` does not."""
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        if stream is not None:
            with contextlib.suppress(BaseException):
                stream.flush()


def _hook(path: Iterable[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """The audit hook; folders of `path` may be read."""
    roots = tuple(entry.rstrip("/") + "/" for entry in path)
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    # Names are bound here, and not looked up, as the program can change every namespace.
    def hook(
        event: str,
        args: tuple[Any, ...],
        *,
        harmless: frozenset[str] = _HARMLESS,
        refused: frozenset[str] = _REFUSED_MODULES,
        roots: tuple[str, ...] = roots,
        writing: int = writing,
        kind_of: Callable[[Any], Any] = type,
        text: type[str] = str,
        no_import: type[Exception] = ImportError,
        no_permission: type[Exception] = PermissionError,
    ) -> None:
        if event in harmless:
            return
        if event == "import":
            if kind_of(args[0]) is text and args[0].partition(".")[0] not in refused:
                return
            raise no_import(f"the sandbox has no module {args[0]!r}")
        if event in ("open", "os.listdir", "os.scandir"):
            place = args[0]
            # Subclasses of `str` may tell the system another path than they tell this hook.
            is_inside = kind_of(place) is text and (place + "/").startswith(roots)
            if is_inside and ".." not in place and not (event == "open" and args[2] & writing):
                return
            raise no_permission(f"the sandbox refuses {event} of {place!r}")
        raise no_permission(f"the sandbox refuses {event}")

    return hook


if __name__ == "__main__":
    if sys.argv[1] == "confine":
        confine(*map(int, sys.argv[2:5]))
    guard(int(sys.argv[2]))
