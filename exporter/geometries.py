"""The rings of a bundle taken together: which of them says how old a stream is, and what a stream may do in all of them."""

from sinkring.runtime.errors import BundleError
from sinkring.runtime.manifest import Manifest, Ring
from sinkring.runtime.ring import RingGeometry


def leading_geometry(manifest: Manifest) -> RingGeometry:
    """Of the ring that wraps last, so that all have wrapped when it has; of the linear cache where none wraps."""
    geometries = [ring.geometry for ring in manifest.rings]
    return max([geometry for geometry in geometries if geometry.wraps] or geometries, key=lambda geometry: geometry.capacity)


def most_tokens(manifest: Manifest) -> int | None:
    """Tokens that a stream can have at most, because of a linear cache; None if all wrap."""
    stated = [ring.geometry.most_tokens for ring in manifest.rings]
    return min((tokens for tokens in stated if tokens is not None), default=None)


def slack_tokens(manifest: Manifest) -> int | None:
    """M - W of the ring with the least, for rollbacks once a ring has wrapped; None if none wraps."""
    return min((ring.geometry.slots - ring.geometry.window_tokens for ring in manifest.rings if ring.geometry.wraps), default=None)


def full_attention_geometry(bundle: str, manifest: Manifest, windows: tuple[int | None, ...]) -> RingGeometry | None:
    """Of the layers that were trained with full attention: None in `windows`, one entry a layer. None if no layer was.

    Raises BundleError if they do not share one, or if the manifest does not give each layer one.
    """
    by_layer = {layer: ring.geometry for ring in manifest.rings for layer in ring.layers}
    if sorted(by_layer) != list(range(len(windows))):
        raise BundleError(f"{bundle}: its rings hold layers {sorted(by_layer)}, the model has {len(windows)} layers; export again")
    found = {by_layer[layer] for layer, window in enumerate(windows) if window is None}
    if len(found) > 1:
        raise BundleError(f"{bundle}: its layers with full attention have {len(found)} geometries, they must share one; export again")
    return next(iter(found), None)


def describe_rings(rings: tuple[Ring, ...]) -> str:
    """For people: one line, each ring with its layers where there are several."""
    lines = []
    for ring in rings:
        geometry = ring.geometry
        size = f"S={geometry.sinks_tokens} W={geometry.window_tokens} M={geometry.slots}"
        kind = size if geometry.wraps else f"linear, capacity {geometry.window_tokens}"
        lines.append(kind if len(rings) == 1 else f"{kind} in {len(ring.layers)} layers")
    return "; ".join(lines)
