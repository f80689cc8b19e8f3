"""Writing a snapshot that fails, is interrupted or killed: the old file or the new, never a part. Ring: S = 2, W = 4, C = 16."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sinkring.runtime import Decoder, Stream, open_bundle
from sinkring.runtime.errors import InputError
from sinkring.runtime.snapshot import read_snapshot

from tests.runtime.snapshot_case import STEPS, fail_at, go_on, is_one_of, make
from tests.runtime.stream_case import IDS, snapshot


@pytest.fixture(scope="module")
def decoder(tiny_bundle_of_three: Path) -> Iterator[Decoder]:
    with open_bundle(tiny_bundle_of_three, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def written(decoder: Decoder) -> Stream:
    """What is to be written."""
    stream = decoder.stream()
    stream.feed(IDS[:20])
    next(stream.generate(3, temperature=1.0))
    return stream


@pytest.fixture
def live(written: Stream) -> Iterator[Stream]:
    """It is as it was, whatever became of the file."""
    before = snapshot(written)
    yield written
    assert snapshot(written) == before


@pytest.fixture(scope="module")
def good(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(decoder, "pending", tmp_path_factory.mktemp("good") / "good")


def test_where_nothing_can_be_written(decoder: Decoder, live: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("missing/s", "file/s", "folder", "", ".", "..", "/", "folder/", "/proc/s", "x" * 300):
        with pytest.raises(InputError, match=r"^snapshot ") as raised:
            live.snapshot(path)
        assert "\n" not in str(raised.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("old", [False, True])
def test_a_write_that_fails_leaves_the_old_file(
    decoder: Decoder, live: Stream, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int, step: str, old: bool
) -> None:
    path = tmp_path / "s"
    if old:
        shutil.copy(good, path)

    def fail() -> None:
        raise OSError(fault, os.strerror(fault))

    with monkeypatch.context() as patched:
        fail_at(step, fail, patched)
        with pytest.raises(InputError, match=rf"could not be written \({os.strerror(fault)}\)"):
            live.snapshot(path)
    assert [left.name for left in tmp_path.iterdir()] == (["s"] if old else [])
    if old:
        assert path.read_bytes() == good.read_bytes()
    live.snapshot(path)
    decoder.restore(path).close()


def test_an_interrupt_leaves_the_old_file(decoder: Decoder, live: Stream, good: Path, tmp_path: Path) -> None:
    shutil.copy(good, tmp_path / "s")

    def interrupt() -> None:
        raise KeyboardInterrupt

    for step in STEPS:
        with pytest.MonkeyPatch.context() as patched:
            fail_at(step, interrupt, patched)
            with pytest.raises(KeyboardInterrupt):
                live.snapshot(tmp_path / "s")
        assert [left.name for left in tmp_path.iterdir()] == ["s"]
        assert (tmp_path / "s").read_bytes() == good.read_bytes()


def test_a_disk_that_is_full(decoder: Decoder, live: Stream, good: Path, tmp_path: Path) -> None:
    """The system itself ends the write: no file of this process may be longer than half a snapshot."""
    path = tmp_path / "s"
    shutil.copy(good, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(good.read_bytes()) // 2, limits[1]))
    try:
        with pytest.raises(InputError, match=r"could not be written \(File too large\)"):
            live.snapshot(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [left.name for left in tmp_path.iterdir()] == ["s"]
    assert path.read_bytes() == good.read_bytes()


def test_two_writers_of_one_path(decoder: Decoder, live: Stream, tmp_path: Path) -> None:
    """The second is refused while the first writes, and neither spoils the other's file."""
    path = tmp_path / "s"
    refusals: list[str] = []

    def meanwhile() -> None:
        if not refusals:  # the second time is the folder's
            refusals.append("")
            with pytest.raises(InputError, match="another process is writing this snapshot") as raised:
                live.snapshot(path)
            refusals.append(str(raised.value))

    with pytest.MonkeyPatch.context() as patched:
        fail_at("fsync", meanwhile, patched)
        live.snapshot(path)
    assert len(refusals) == 2
    assert "\n" not in refusals[1]
    assert [left.name for left in tmp_path.iterdir()] == ["s"]
    decoder.restore(path).close()


# Writes two snapshots in turns over the same path, in a child that is killed; in each round the parent checks what is there.
KILLS = """
import json, os, random, signal, sys, time
from pathlib import Path
import pytest
from sinkring.runtime.manifest import Manifest
from sinkring.runtime.snapshot import read_snapshot, write_snapshot
from tests.runtime.snapshot_case import STEPS, fail_at, is_one_of

bundle, live, *paths = map(Path, sys.argv[1:])
manifest = Manifest.read(bundle)
streams = [read_snapshot(path, manifest) for path in paths]
random.seed(1)
seen = set()

def write(turn):
    write_snapshot(live, manifest, *streams[turn % 2])

def round_(child):
    pid = os.fork()
    if not pid:
        try:
            child()
        finally:
            os._exit(1)
    return pid

def check(what):
    left = sorted(path.name for path in live.parent.iterdir())
    assert set(left) <= {live.name, f".{live.name}.part"}, (what, left)
    if live.exists():
        seen.add((what, is_one_of(read_snapshot(live, manifest), streams)))

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def killed_at(step, turn):
    fail_at(step, die, pytest.MonkeyPatch())
    write(turn)

# The first write of all: none is there afterwards.
for step in STEPS:
    pid = round_(lambda: killed_at(step, 0))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not live.exists(), step
write(0)
# Over an old one: the old one is there.
for step in STEPS:
    pid = round_(lambda: killed_at(step, 1))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    check(step)
assert seen == {(step, 0) for step in STEPS}, seen

def forever():
    turn = 0
    while True:
        turn += 1
        write(turn)

for kill in range(60):
    pid = round_(forever)
    time.sleep(random.uniform(0, 0.02))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    check("any time")
write(0)
assert [path.name for path in live.parent.iterdir()] == [live.name], "the next writer takes over what was left"
print(json.dumps(sorted(seen)))
"""


def test_killed_while_writing(decoder: Decoder, tmp_path: Path) -> None:
    """kill -9 at each step and at sixty random times: the old file or the new, or none if there was none, and never a part."""
    paths = [make(decoder, state, tmp_path / state) for state in ("pending", "past the wrap")]
    live = tmp_path / "live" / "s"
    live.parent.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(decoder.path), str(live), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert ["any time", 0] in seen, seen
    assert ["any time", 1] in seen, seen
    read_snapshot(live, decoder.manifest)
    with decoder.restore(live) as restored, decoder.restore(paths[0]) as expected:
        assert go_on(restored) == go_on(expected)


def test_a_reader_never_sees_a_part(decoder: Decoder, tmp_path: Path) -> None:
    """One process writes over and over, this one reads: each time the whole of one snapshot."""
    path = make(decoder, "pending", tmp_path / "s")
    streams = [read_snapshot(path, decoder.manifest), read_snapshot(make(decoder, "rolled back", tmp_path / "t"), decoder.manifest)]
    code = (
        "import sys; from pathlib import Path; from sinkring.runtime.manifest import Manifest\n"
        "from sinkring.runtime.snapshot import read_snapshot, write_snapshot\n"
        "bundle, *paths = map(Path, sys.argv[1:]); manifest = Manifest.read(bundle)\n"
        "streams = [read_snapshot(path, manifest) for path in paths]\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    for stream in streams: write_snapshot(paths[0], manifest, *stream)\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(decoder.path), str(path), str(tmp_path / "t")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        seen = {is_one_of(read_snapshot(path, decoder.manifest), streams) for _ in range(500)}
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert seen == {0, 1}
