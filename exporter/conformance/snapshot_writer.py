"""A process that writes snapshots until it is killed: `python -m ...snapshot_writer BUNDLE BACKEND PATH SABOTAGE`."""

import sys
from contextlib import nullcontext

import numpy as np
from sinkring.exporter.geometries import most_tokens
from sinkring.runtime.decoder import open_bundle
from sinkring.runtime.manifest import Manifest


def wrote(manifest: Manifest) -> tuple[int, int]:
    """Positions of the two streams that are written in turn."""
    vocabulary = manifest.model.vocab_size
    most = most_tokens(manifest) or 5
    return min(3, most, vocabulary), min(5, most, vocabulary)


def main(bundle: str, backend: str, path: str, sabotage: str) -> None:
    from sinkring.exporter.conformance.saboteurs import find_saboteur

    broken = nullcontext() if sabotage == "-" else find_saboteur(sabotage).at_work()
    with broken, open_bundle(bundle, backend, verify=False, threads=1) as decoder, decoder.stream() as stream:
        first, second = wrote(decoder.manifest)
        stream.feed(np.arange(first))
        stream.snapshot(path)
        print("written", flush=True)
        while True:
            stream.feed(np.arange(second - first) + 1)
            stream.snapshot(path)
            stream.rollback(second - first)
            stream.snapshot(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
