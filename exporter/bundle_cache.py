"""Bundles made once and kept: one model in several configurations, in a folder of the user's."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from sinkring.exporter.export import export_decoder
from sinkring.models.errors import SourceError
from sinkring.models.source import resolve_source
from sinkring.runtime.bundle import check_files
from sinkring.runtime.errors import BundleError, UnsupportedError
from sinkring.runtime.manifest import Manifest, Policy


def cached_bundle(
    folder: Path, model: str, *, policy: Policy, sinks: int, window: int, chunk: int = 64, progress: Callable[[str], None] | None = None
) -> Path:
    """The bundle of `model` with these options in `folder`, exported if it is not there, is damaged or is of another model or version.

    Options are those of `export_decoder`, whose errors it raises.
    """
    try:
        wanted = resolve_source(model).sha256()
    except SourceError as error:
        raise UnsupportedError(str(error)) from None
    out = folder / f"{wanted[:8]}-{policy}-s{sinks}-w{window}-c{chunk}"
    if not _is_good(out, wanted):
        folder.mkdir(parents=True, exist_ok=True)
        export_decoder(model, out, policy=policy, sinks=sinks, window=window, chunk=chunk, overwrite=True, progress=progress)
    return out


def _is_good(bundle: Path, model_sha256: str) -> bool:
    try:
        manifest = Manifest.read(bundle)
        check_files(bundle, manifest, hashes=False)
    except BundleError:
        return False
    return manifest.model.source_sha256 == model_sha256 and manifest.made_with.get("sinkring") == version("sinkring")
