"""I11: what is not supported is refused, by name and with what to do; nothing is silently dropped or downgraded."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from sinkring.exporter.build import build_engine
from sinkring.exporter.conformance.edited_copy import copy_bundle, edit_manifest
from sinkring.exporter.conformance.findings import Check
from sinkring.exporter.conformance.subject import Subject
from sinkring.exporter.export import export_decoder
from sinkring.models.errors import UnsupportedModel
from sinkring.models.registry import find_family
from sinkring.runtime.decoder import Decoder, open_bundle
from sinkring.runtime.errors import BundleError, CapacityError, GeometryError, InputError, UnsupportedError
from sinkring.runtime.manifest import MANIFEST_NAME
from sinkring.runtime.ring import split_chunks
from transformers import LlamaConfig


@dataclass(frozen=True)
class Refusal:
    """`act` must raise `error` with a message that names `says`."""

    name: str
    act: Callable[[], object]
    error: type[Exception]
    says: str


def check_refusals(subject: Subject) -> Check:
    """Inputs to a stream, options of a decoder, damaged bundles, arguments of an export, features of a model."""
    faults: list[str] = []
    names: list[str] = []
    with subject.open() as decoder:
        for kind in (_of_streams(subject, decoder), _of_bundles(subject), _of_exports(subject), _of_models()):
            for refusal in kind:
                names.append(refusal.name)
                _try(refusal, faults)
    return Check(
        "I11",
        f"{len(names)} things: {', '.join(names)}",
        "accepted, or refused without a name",
        float(len(faults)),
        0.0,
        not faults,
        "; ".join(faults[:4]) or "each ended in the error that names it",
    )


def _try(refusal: Refusal, faults: list[str]) -> None:
    try:
        refusal.act()
    except refusal.error as error:
        if refusal.says not in str(error):
            faults.append(f"{refusal.name}: the message does not name {refusal.says!r}: {error}")
    except Exception as error:
        faults.append(f"{refusal.name}: {type(error).__name__} in place of {refusal.error.__name__}: {error}")
    else:
        faults.append(f"{refusal.name}: was accepted")


def _of_streams(subject: Subject, decoder: Decoder) -> Iterator[Refusal]:
    vocabulary, limit, batch = subject.manifest.model.vocab_size, subject.manifest.position_limit, subject.manifest.batch
    stream = decoder.stream()
    yield Refusal("an id of V", lambda: stream.feed([vocabulary]), InputError, str(vocabulary))
    yield Refusal("an id of -1", lambda: stream.feed([0, -1]), InputError, "-1")
    yield Refusal("an id of 2**63", lambda: stream.feed([1 << 63]), InputError, str(1 << 63))
    yield Refusal("an id of V in step", lambda: decoder.step({stream: vocabulary}), InputError, str(vocabulary))
    yield Refusal("ids that are no integers", lambda: stream.feed(np.array([0.5])), InputError, "float64")
    yield Refusal("no ids", lambda: stream.feed([]), InputError, "at least one")
    yield Refusal("nothing to continue", lambda: next(stream.generate(1)), InputError, "empty")
    yield Refusal("a temperature below 0", lambda: next(stream.generate(1, temperature=-1.0)), InputError, "temperature")
    stream.feed(subject.ids[:2])
    yield Refusal("more rolled back than fed", lambda: stream.rollback(3), CapacityError, "rollback: 3")
    record, tensors = stream.capture()
    if subject.geometry.wraps:
        stream.install({**record, "fed": limit, "reached": limit}, tensors)
        yield Refusal("the position limit", lambda: stream.feed([0]), CapacityError, str(limit))
    else:
        most = subject.geometry.most_tokens
        assert most is not None, "a cache that does not wrap has an end"
        yield Refusal("the capacity", lambda: stream.feed(np.zeros(most, np.int64)), CapacityError, str(most))
    others = [decoder.stream() for _ in range(batch - 1)]
    yield Refusal("a stream without a row", decoder.stream, CapacityError, f"{batch} rows")
    for taken in (stream, *others):
        taken.close()
    yield Refusal("a closed stream", lambda: stream.feed([0]), CapacityError, "closed")


def _of_bundles(subject: Subject) -> Iterator[Refusal]:
    def with_backend(name: str, **options: Any) -> Callable[[], object]:
        return lambda: open_bundle(subject.path, name, verify=False, **options)

    yield Refusal("an unknown backend", with_backend("nonesuch"), UnsupportedError, "nonesuch")
    yield Refusal("an unknown option", with_backend(subject.backend, nonesuch=1), InputError, "nonesuch")
    if subject.backend == "onnxruntime":
        yield Refusal("no threads", with_backend(subject.backend, threads=0), InputError, "threads=0")
    yield Refusal("graphs of an unknown target", with_backend(subject.backend, target="nonesuch"), BundleError, "nonesuch")
    yield Refusal("an engine for an unknown target", lambda: build_engine(subject.path, target="nonesuch"), UnsupportedError, "nonesuch")
    if subject.geometry.wraps:
        too_long = subject.geometry.slack + 2
        geometries = (subject.geometry,)
        yield Refusal("a chunk of slack + 2", lambda: list(split_chunks(0, 1, too_long, geometries)), GeometryError, f"chunk={too_long}")
        changed = _changed(subject, "chunk", lambda manifest: dataclasses.replace(manifest, chunk=too_long))
        yield Refusal("a bundle that claims such a chunk", lambda: open_bundle(changed, verify=False), BundleError, "chunk")
    newer = _changed(subject, "newer", lambda manifest: dataclasses.replace(manifest, format_version=99))
    yield Refusal("a manifest of another version", lambda: open_bundle(newer, verify=False), BundleError, "99")
    odd = _changed(subject, "odd", lambda manifest: manifest)
    text = (odd / MANIFEST_NAME).read_text(encoding="utf-8")
    (odd / MANIFEST_NAME).write_text(text.replace("{", '{"nonesuch": 1,', 1), encoding="utf-8")
    yield Refusal("a field that nothing reads", lambda: open_bundle(odd, verify=False), BundleError, "nonesuch")
    flipped = _changed(subject, "flipped", lambda manifest: manifest)
    _flip_a_byte(flipped / subject.manifest.graphs[0].path)
    yield Refusal("a file with one byte changed", lambda: open_bundle(flipped), BundleError, "sha256")


def _changed(subject: Subject, name: str, change: Callable[..., Any]) -> Path:
    out = subject.scratch / f"refused-{name}"
    copy_bundle(subject.path, subject.manifest, out)
    edit_manifest(out, change)
    return out


def _flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)


def _of_exports(subject: Subject) -> Iterator[Refusal]:
    source = subject.expected.source
    out = subject.scratch / "refused-export"

    def export(**options: Any) -> Callable[[], object]:
        return lambda: export_decoder(source, out, **options)

    yield Refusal("an unknown policy", export(policy="nonesuch"), InputError, "nonesuch")
    yield Refusal("an unknown dtype", export(dtype="int3"), UnsupportedError, "int3")
    yield Refusal("an unknown dtype of the caches", export(cache_dtype="int3"), UnsupportedError, "int3")
    yield Refusal("an unknown target", export(targets=["nonesuch"]), UnsupportedError, "nonesuch")
    yield Refusal("a window of 0", export(window=0), GeometryError, "window=0")
    yield Refusal("sinks below 0", export(sinks=-1), GeometryError, "sinks=-1")
    yield Refusal("a chunk of 0", export(chunk=0), GeometryError, "chunk=0")
    yield Refusal("no rows", export(batch=0), GeometryError, "batch=0")
    yield Refusal("a model that is not there", lambda: export_decoder(out / "none", out), UnsupportedError, "none")
    yield Refusal("something left behind by these", lambda: _nothing_there(out), FileNotFoundError, "nothing")


def _nothing_there(out: Path) -> None:
    if not out.exists():
        raise FileNotFoundError("nothing is there, as it must be")
    shutil.rmtree(out)


def _of_models() -> Iterator[Refusal]:
    def llama(**fields: Any) -> Callable[[], object]:
        config = LlamaConfig(num_hidden_layers=1)
        # Set afterwards, because transformers would complain of some by itself.
        for name, value in fields.items():
            setattr(config, name, value)
        return lambda: find_family(config)

    yield Refusal("an unknown architecture", lambda: find_family(SimpleNamespace(model_type="nonesuch")), UnsupportedModel, "nonesuch")
    yield Refusal("an unknown rope type", llama(rope_parameters={"rope_type": "nonesuch"}), UnsupportedModel, "nonesuch")
    yield Refusal("a trained sliding window", llama(sliding_window=128), UnsupportedModel, "sliding_window=128")
    yield Refusal("softcapped attention", llama(attn_logit_softcapping=50.0), UnsupportedModel, "attn_logit_softcapping")
    yield Refusal("softcapped logits", llama(final_logit_softcapping=30.0), UnsupportedModel, "final_logit_softcapping")
