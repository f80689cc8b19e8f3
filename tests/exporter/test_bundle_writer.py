"""A bundle is there whole or not at all, whatever ends the writing; and nothing but a bundle is ever replaced."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sinkring.exporter import bundle_writer
from sinkring.exporter.bundle_writer import describe_file, new_bundle, replace_text, sha256_of
from sinkring.runtime.errors import BundleError

MANIFEST = '{"format": "sinkring-bundle", "made": "%s"}'


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "my[bundle].v1*"  # characters that a glob would read


def write(out: Path, made: str) -> None:
    with new_bundle(out, True) as part:
        (part / "weights.bin").write_bytes(made.encode())
        (part / "manifest.json").write_text(MANIFEST % made)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def beside(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir() if path != out)


def test_a_new_bundle_appears_when_the_block_ends(out: Path) -> None:
    with new_bundle(out, True) as part:
        (part / "manifest.json").write_text(MANIFEST % "now")
        assert part.parent == out.parent, "a rename must not cross file systems"
        assert not out.exists()
    assert content(out) == {"manifest.json": (MANIFEST % "now").encode()}
    assert beside(out) == []


def test_missing_parents_are_made_and_an_empty_folder_is_filled(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "c", "one")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", "two")
    assert b"one" in content(tmp_path / "a" / "b" / "c")["manifest.json"]
    assert b"two" in content(tmp_path / "empty")["manifest.json"]


def test_the_folder_is_as_readable_as_any_other(out: Path, tmp_path: Path) -> None:
    write(out, "one")
    (tmp_path / "plain").mkdir()
    assert out.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_bundle_is_replaced_whole(out: Path) -> None:
    write(out, "one")
    (out / "engines").mkdir()
    (out / "engines" / "old.engine").touch()
    write(out, "two")
    assert content(out) == {"weights.bin": b"two", "manifest.json": (MANIFEST % "two").encode()}
    assert beside(out) == []


def test_a_relative_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("here"), "one")
    assert (tmp_path / "here" / "manifest.json").is_file()


def test_a_link_to_a_bundle_stays_a_link(tmp_path: Path) -> None:
    write(tmp_path / "real", "one")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", "two")
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "real")["weights.bin"] == b"two"
    assert beside(tmp_path / "link") == ["real"]


@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
@pytest.mark.parametrize("old", [False, True])
def test_an_interrupt_leaves_what_was_there(out: Path, exception: type[BaseException], old: bool) -> None:
    if old:
        write(out, "one")
    before = content(out) if old else None

    def interrupted() -> None:
        with new_bundle(out, True) as part:
            (part / "manifest.json").write_text(MANIFEST % "two")
            raise exception

    with pytest.raises(exception):
        interrupted()
    assert (content(out) if out.exists() else None) == before
    assert beside(out) == []


@pytest.mark.parametrize("step", ["first rename", "second rename", "sync"])
def test_a_failure_while_replacing_leaves_the_old_bundle(out: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(out, "one")
    before = content(out)
    calls = 0
    rename = Path.rename

    def failing_rename(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == {"first rename": 1, "second rename": 2}.get(step):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self))
        return rename(self, target)

    def failing_sync(_: int) -> None:
        if step == "sync":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "rename", failing_rename)
    monkeypatch.setattr(bundle_writer.os, "fsync", failing_sync)
    with pytest.raises(OSError, match=r"busy|Input"):
        write(out, "two")
    assert content(out) == before
    assert beside(out) == []


def test_without_overwrite_a_bundle_that_came_meanwhile_stays(out: Path) -> None:
    def overtaken() -> None:
        with new_bundle(out, False) as part:
            (part / "manifest.json").write_text(MANIFEST % "late")
            write(out, "early")

    with pytest.raises(BundleError, match="is already a bundle; give another --out"):
        overtaken()
    assert content(out)["weights.bin"] == b"early"
    assert beside(out) == []


RACING = """
import pathlib, sys
from sinkring.exporter.bundle_writer import new_bundle

with new_bundle(pathlib.Path(sys.argv[1]), False) as part:
    (part / "manifest.json").write_text('{"format": "sinkring-bundle", "made": "%s"}' % sys.argv[2])
    print("there", flush=True)
    sys.stdin.readline()
"""


def test_of_racing_writers_one_wins_and_the_others_are_told(out: Path) -> None:
    command = [sys.executable, "-c", RACING, str(out)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen([*command, str(number)], **pipes) for number in range(3)]  # type: ignore[call-overload]
    for racer in racers:
        assert racer.stdout.readline() == "there\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = [racer.communicate(timeout=60)[1] for racer in racers]
    won = [number for number, racer in enumerate(racers) if racer.returncode == 0]
    assert len(won) == 1, said
    assert content(out) == {"manifest.json": (MANIFEST % won[0]).encode()}
    assert all("is already a bundle" in text for number, text in enumerate(said) if number not in won)
    assert beside(out) == []


def _a_file(out: Path) -> None:
    out.write_text("precious")


def _a_folder(out: Path) -> None:
    out.mkdir()
    (out / "precious.txt").write_text("precious")


def _a_folder_with_another_manifest(out: Path) -> None:
    """A browser extension, say: also a folder with a manifest.json."""
    out.mkdir()
    (out / "manifest.json").write_text('{"manifest_version": 3, "format": "other"}')
    (out / "precious.txt").write_text("precious")


@pytest.mark.parametrize("other", [_a_file, _a_folder, _a_folder_with_another_manifest])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_what_is_no_bundle_is_left_alone(out: Path, other: Callable[[Path], None], when: str) -> None:
    if when == "before":
        other(out)

    def attempt() -> None:
        with new_bundle(out, True) as part:
            assert when == "meanwhile"
            (part / "manifest.json").write_text(MANIFEST % "two")
            other(out)

    with pytest.raises(BundleError, match="another --out") as raised:
        attempt()
    assert str(out) in str(raised.value)
    left = [out] if out.is_file() else list(out.iterdir())
    assert "precious" in "".join(path.read_text() for path in left) or other is _a_folder_with_another_manifest
    assert beside(out) == []


def test_a_damaged_bundle_or_one_of_another_version_can_be_replaced(out: Path) -> None:
    for text in ('{"format": "sinkring-bundle", "format_version": 99}', '{"format": "sinkring-bundle", '):
        out.mkdir(exist_ok=True)
        (out / "manifest.json").write_text(text)
        write(out, "two")
        assert content(out)["weights.bin"] == b"two"


KILLED = """
import pathlib, sys, time
from sinkring.exporter import bundle_writer

out, step = pathlib.Path(sys.argv[1]), sys.argv[2]
rename = pathlib.Path.rename

def stop():
    print("there", flush=True)
    time.sleep(60)

if step == "replacing":
    def rename_then_stop(self, target):
        rename(self, target)
        stop()
    pathlib.Path.rename = rename_then_stop
if step == "clearing":
    bundle_writer.shutil.rmtree = lambda *_, **__: stop()
with bundle_writer.new_bundle(out, True) as part:
    (part / "weights.bin").write_bytes(b"half")
    if step == "writing":
        stop()
    (part / "manifest.json").write_text('{"format": "sinkring-bundle"}')
"""


def _started(out: Path, step: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(out), step], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


@pytest.mark.parametrize("step", ["writing", "replacing", "clearing"])
def test_a_killed_writer_is_cleared_away_by_the_next(out: Path, step: str) -> None:
    write(out, "one")
    before = content(out)
    process = _started(out, step)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert beside(out), "the kill came too late to show anything"
    # The next one fails: still, the old bundle is back if it was only moved aside.
    with pytest.raises(KeyError), new_bundle(out, True):
        raise KeyError
    assert content(out) == (before if step != "clearing" else {"weights.bin": b"half", "manifest.json": b'{"format": "sinkring-bundle"}'})
    assert beside(out) == []
    write(out, "two")
    assert content(out)["weights.bin"] == b"two"
    assert beside(out) == []


def test_a_living_writer_is_not_cleared_away(out: Path) -> None:
    process = _started(out, "writing")
    try:
        (living,) = beside(out)
        write(out, "two")
        assert beside(out) == [living]
        assert content(out.parent / living) == {"weights.bin": b"half"}
    finally:
        process.kill()
        process.wait()


def test_writers_of_neighbouring_names_do_not_meet(tmp_path: Path) -> None:
    """`.a.b.0123.part` belongs to a.b and not to a."""
    (tmp_path / ".a.b.0123abcd.old").mkdir()
    (tmp_path / ".a.b.0123abcd.part").mkdir()
    (tmp_path / ".a.notes.part").mkdir()
    write(tmp_path / "a", "one")
    assert beside(tmp_path / "a") == [".a.b.0123abcd.old", ".a.b.0123abcd.part", ".a.notes.part"]


def test_describe_file_and_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    described = describe_file(tmp_path, "x")
    assert (described.path, described.bytes) == ("x", 3)
    assert described.sha256 == sha256_of(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_replace_text_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    replace_text(path, "one")
    replace_text(path, "zwei ü")
    assert path.read_text(encoding="utf-8") == "zwei ü"

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(bundle_writer.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_text(path, "three")
    assert path.read_text(encoding="utf-8") == "zwei ü"
    assert beside(path) == []
