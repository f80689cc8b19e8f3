"""Denormals are zeros while a graph runs, and for the user's thread nothing has changed after it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from sinkring.runtime import open_bundle
from sinkring.runtime.backends import onnxruntime as backend
from sinkring.runtime.backends.denormals import DenormalsAsZero, is_supported

SMALL = np.full(4, 1e-38, np.float32)
HALF = np.float32(0.5)

pytestmark = pytest.mark.skipif(not is_supported(), reason="changes nothing on this system")


def halved() -> bool:
    """Whether this thread knows denormals: half of the least normal float is none."""
    return bool((SMALL * HALF).all())


def test_zero_inside_and_as_before_after() -> None:
    denormals = DenormalsAsZero()
    for _ in range(3):
        assert halved()
        with denormals:
            assert not halved()
        assert halved()


def test_a_thread_that_takes_them_as_zeros_goes_on_doing_so() -> None:
    with DenormalsAsZero():
        with DenormalsAsZero():
            assert not halved()
        assert not halved()
    assert halved()


def test_as_before_after_an_error() -> None:
    with pytest.raises(KeyError), DenormalsAsZero():
        raise KeyError
    assert halved()


@pytest.mark.parametrize("bundle", ["tiny_bundle", "tiny_bundle_of_three"])
def test_every_run_is_inside_and_every_thread_of_the_pool_too(
    bundle: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen = request.getfixturevalue(bundle), []

    class Session(ort.InferenceSession):
        def __init__(self, path: str, options: ort.SessionOptions, **more: object) -> None:
            seen.append("opened " + options.get_session_config_entry("session.set_denormal_as_zero"))
            super().__init__(path, options, **more)

        def run_with_iobinding(self, *given: object) -> None:
            seen.append("known" if halved() else "zeros")
            super().run_with_iobinding(*given)

    monkeypatch.setattr(backend.ort, "InferenceSession", Session)
    with open_bundle(folder, threads=2) as decoder:
        stream = decoder.stream()
        for count in (5, 1, 1):
            stream.feed(np.arange(count))
        decoder.step({stream: 1})
    assert {word for word in seen if word.startswith("opened")} == {"opened 1"}
    runs = [word for word in seen if not word.startswith("opened")]
    assert len(runs) >= 3
    assert set(runs) == {"zeros"}
    assert halved()


def test_the_first_session_of_a_process_leaves_the_thread_that_opens_it_alone(tiny_bundle: Path) -> None:
    code = f"""
import numpy as np
from sinkring.runtime import open_bundle
small = np.full(4, 1e-38, np.float32)
decoder = open_bundle({str(tiny_bundle)!r}, threads=2)
assert (small * np.float32(0.5)).all(), "opened"
with decoder.stream() as stream:
    stream.feed([1, 2, 3])
assert (small * np.float32(0.5)).all(), "fed"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
