"""sinkring.runtime: run a bundle. Needs numpy and one backend, never torch."""

from sinkring.runtime.decoder import Decoder, open_bundle
from sinkring.runtime.errors import SinkringError
from sinkring.runtime.manifest import Manifest
from sinkring.runtime.ring import RingGeometry
from sinkring.runtime.sampling import SamplingOptions
from sinkring.runtime.stream import Stream

__all__ = ["Decoder", "Manifest", "RingGeometry", "SamplingOptions", "SinkringError", "Stream", "open_bundle"]
