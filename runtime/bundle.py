"""Is a bundle what its manifest says?"""

import hashlib
from pathlib import Path

from sinkring.runtime.errors import BundleError
from sinkring.runtime.manifest import Manifest


def check_files(bundle: Path, manifest: Manifest, hashes: bool = True) -> None:
    """Compare every listed file's size, and with `hashes` its sha256, with the manifest. Raises BundleError for the first that differs."""
    for file in manifest.files:
        path = bundle / file.path
        if not path.is_file():
            raise BundleError(f"{path}: is listed in the manifest but missing; export again")
        size = path.stat().st_size
        if size != file.bytes:
            raise BundleError(f"{path}: has {size} bytes, the manifest says {file.bytes}; the bundle is damaged, export again")
        if hashes:
            with path.open("rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
            if found != file.sha256:
                raise BundleError(
                    f"{path}: sha256 is {found[:12]}..., the manifest says {file.sha256[:12]}...; the bundle is damaged, export again"
                )
