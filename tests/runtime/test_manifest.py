"""manifest.json: what is written is read back the same, and whatever does not fit is refused by the name of its place."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sinkring.runtime.errors import BundleError
from sinkring.runtime.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Engine,
    File,
    Graph,
    Manifest,
    ModelInfo,
    Ring,
    StateTensor,
    Tokenizer,
)
from sinkring.runtime.ring import RingGeometry

WHERE = "bundle/manifest.json"


def make_manifest() -> Manifest:
    """Two layers of one ring, S=2 W=4 M=5 (C=7), B=3 rows, G=2 heads of D=8, with every optional part filled in."""
    states = tuple(
        StateTensor(f"cache.{layer}.{part}", f"cache.{layer}.{part}.next", "ring", (3, 2, 7, 8), "float32", 0, 0.0, ring=0, layer=layer)
        for layer in range(2)
        for part in ("k", "v")
    )
    return Manifest(
        model=ModelInfo("LlamaForCausalLM", "tiny", "ab" * 32, 2, 32, 4, 2, 8, 97, 64, 12345),
        policy="streaming",
        batch=3,
        chunk=2,
        dtype="float32",
        position_limit=2**40,
        rings=(Ring("write_index.0", RingGeometry(2, 4, 5), (0, 1)),),
        states=states,
        graphs=(Graph("decode", "onnxruntime", "decode.onnx", 1), Graph("prefill", "onnxruntime", "prefill.onnx", 2)),
        files=(File("decode.onnx", 10, "cd" * 32), File("prefill.onnx", 11, "ef" * 32)),
        made_with={"sinkring": "0.1.0", "torch": "2.13.0"},
        engines=(Engine("decode", "tensorrt-rtx", 89, "decode.sm89.engine", "1.7.1", "decode.onnx", "cd" * 32, "decode.sm89.json"),),
        tokenizer=Tokenizer("tokenizer.json", "chat_template.jinja", 1, (2, 3)),
    )


def parsed() -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(make_manifest().to_json())
    return raw


def test_round_trip() -> None:
    manifest = make_manifest()
    again = Manifest.from_json(manifest.to_json(), WHERE)
    assert again == manifest
    assert again.to_json() == manifest.to_json()


def test_round_trip_without_the_optional_parts() -> None:
    manifest = dataclasses.replace(
        make_manifest(), engines=(), tokenizer=None, states=(StateTensor("clock", "clock.next", "counter", (3,), "int64", 0, 0.0),)
    )
    assert Manifest.from_json(manifest.to_json(), WHERE) == manifest


def test_fields_with_a_default_may_be_left_out() -> None:
    raw = parsed()
    del raw["engines"], raw["tokenizer"]
    assert Manifest.from_json(json.dumps(raw), WHERE) == dataclasses.replace(make_manifest(), engines=(), tokenizer=None)


def test_round_trip_of_a_linear_cache() -> None:
    geometry = RingGeometry.linear(5, capacity_multiple=7)
    states = tuple(dataclasses.replace(state, kind="linear") for state in make_manifest().states)
    manifest = dataclasses.replace(make_manifest(), rings=(Ring("write_index.0", geometry, (0, 1)),), states=states)
    again = Manifest.from_json(manifest.to_json(), WHERE)
    assert again == manifest
    assert again.rings[0].geometry.most_tokens == 5
    assert again.cache_bytes == again.cache_bytes_formula == 4 * 3 * 2 * 7 * 8 * 4


def test_whole_number_is_taken_for_a_float() -> None:
    raw = parsed()
    raw["states"][0]["initial"] = 0
    initial = Manifest.from_json(json.dumps(raw), WHERE).states[0].initial
    assert isinstance(initial, float)


Damage = Callable[[dict[str, Any]], object]

# Each: what is done to the parsed JSON, and the place and finding that the error must name.
DAMAGE: dict[str, tuple[Damage, str]] = {
    "unknown field": (lambda raw: raw.update(surprise=1), f"{WHERE}: unknown field 'surprise'"),
    "unknown field of the model": (lambda raw: raw["model"].update(surprise=1), f"{WHERE}: model: unknown field 'surprise'"),
    "unknown field of a list's item": (lambda raw: raw["states"][2].update(surprise=1), f"{WHERE}: states[2]: unknown field 'surprise'"),
    "missing field": (lambda raw: raw.pop("policy"), f"{WHERE}: field 'policy' is missing"),
    "missing field of a list's item": (lambda raw: raw["graphs"][1].pop("path"), f"{WHERE}: graphs[1]: field 'path' is missing"),
    "missing window": (
        lambda raw: raw["rings"][0]["geometry"].pop("window_tokens"),
        f"{WHERE}: rings[0]: geometry: field 'window_tokens' is missing",
    ),
    "text for a number": (lambda raw: raw.update(batch="3"), f"{WHERE}: batch: is '3'"),
    "fraction for a whole number": (lambda raw: raw.update(chunk=2.5), f"{WHERE}: chunk: is 2.5"),
    "true for a number": (lambda raw: raw.update(batch=True), f"{WHERE}: batch: is True"),
    "true for a float": (lambda raw: raw["states"][0].update(initial=True), f"{WHERE}: states[0]: initial: is True"),
    "number for text": (lambda raw: raw["files"][0].update(sha256=7), f"{WHERE}: files[0]: sha256: is 7"),
    "null for text": (lambda raw: raw.update(dtype=None), f"{WHERE}: dtype: is None"),
    "object for a list": (lambda raw: raw.update(states={}), f"{WHERE}: states: is {{}}"),
    "list for an object": (lambda raw: raw.update(model=[]), f"{WHERE}: model: is list"),
    "text inside a shape": (lambda raw: raw["states"][1]["shape"].__setitem__(2, "C"), f"{WHERE}: states[1]: shape[2]: is 'C'"),
    "number for a version": (lambda raw: raw["made_with"].update(torch=2), f"{WHERE}: made_with['torch']: is 2"),
    "text for an optional number": (lambda raw: raw["states"][3].update(ring="first"), f"{WHERE}: states[3]: ring: is 'first'"),
    "number for an optional object": (lambda raw: raw.update(tokenizer=4), f"{WHERE}: tokenizer: is int"),
    "unknown policy": (lambda raw: raw.update(policy="rolling"), f"{WHERE}: policy: is 'rolling'"),
    "unknown role": (lambda raw: raw["graphs"][0].update(role="encode"), f"{WHERE}: graphs[0]: role: is 'encode'"),
    "ring smaller than its window": (
        lambda raw: raw["rings"][0]["geometry"].update(slots=3),
        f"{WHERE}: rings[0]: geometry: ring slots=3 is less than window=4",
    ),
    "no window": (lambda raw: raw["rings"][0]["geometry"].update(window_tokens=0), f"{WHERE}: rings[0]: geometry: window=0"),
    "linear with sinks": (
        lambda raw: raw["rings"][0]["geometry"].update(wraps=False),
        f"{WHERE}: rings[0]: geometry: sinks=2 in a cache that does not wrap",
    ),
    "negative sinks": (lambda raw: raw["rings"][0]["geometry"].update(sinks_tokens=-1), f"{WHERE}: rings[0]: geometry: sinks=-1"),
    "newer version": (lambda raw: raw.update(format_version=FORMAT_VERSION + 1), f"{WHERE}: format version is {FORMAT_VERSION + 1}"),
    "no version": (lambda raw: raw.pop("format_version"), f"{WHERE}: format version is None"),
    "other format": (lambda raw: raw.update(format="safetensors"), f"{WHERE}: format is 'safetensors'"),
    "no format": (lambda raw: raw.pop("format"), f"{WHERE}: format is None"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_by_its_place(damage: str) -> None:
    spoil, says = DAMAGE[damage]
    raw = parsed()
    spoil(raw)
    with pytest.raises(BundleError) as caught:
        Manifest.from_json(json.dumps(raw), WHERE)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("path", [(), ("model",), ("rings", 0), ("rings", 0, "geometry"), ("states", 0), ("graphs", 0), ("files", 0)])
def test_every_field_without_a_default_is_asked_for(path: tuple[str | int, ...]) -> None:
    optional = {"engines", "tokenizer", "ring", "layer", "wraps", "weights", "embedding", "update", "widened"}
    inside: Any = parsed()
    for step in path:
        inside = inside[step]
    for name in set(inside) - optional:
        raw: Any = parsed()
        inside = raw
        for step in path:
            inside = inside[step]
        del inside[name]
        with pytest.raises(BundleError, match=name if path or not name.startswith("format") else "format"):
            Manifest.from_json(json.dumps(raw), WHERE)


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "not valid JSON"), ("{", "not valid JSON"), (make_manifest().to_json()[:-40], "not valid JSON"), ("[]", "format is 'list'")],
)
def test_what_is_no_json_object_is_refused(text: str, says: str) -> None:
    with pytest.raises(BundleError) as caught:
        Manifest.from_json(text, WHERE)
    assert str(caught.value).startswith(f"{WHERE}: {says}")


def test_read_names_the_folder_or_file(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="gone: no such bundle folder; make one with `sinkring export"):
        Manifest.read(tmp_path / "gone")
    with pytest.raises(BundleError, match=f"has no {MANIFEST_NAME}"):
        Manifest.read(tmp_path)
    (tmp_path / MANIFEST_NAME).write_text("no json", encoding="utf-8")
    with pytest.raises(BundleError, match=f"{MANIFEST_NAME}: not valid JSON"):
        Manifest.read(tmp_path)
    (tmp_path / MANIFEST_NAME).write_text(make_manifest().to_json(), encoding="utf-8")
    assert Manifest.read(tmp_path) == make_manifest()


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(BundleError, match=MANIFEST_NAME):
        Manifest.read(tmp_path)


def test_cache_bytes() -> None:
    """4 tensors of 3 rows, 2 heads, 7 slots, 8 numbers of 4 bytes; the formula agrees, and stops agreeing when a state is left out."""
    manifest = make_manifest()
    assert manifest.cache_bytes == 4 * 3 * 2 * 7 * 8 * 4 == manifest.cache_bytes_formula
    assert dataclasses.replace(manifest, states=manifest.states[1:]).cache_bytes != manifest.cache_bytes_formula


def test_lookups() -> None:
    manifest = make_manifest()
    assert manifest.graph("prefill", "onnxruntime").path == "prefill.onnx"
    assert manifest.file("decode.onnx").bytes == 10
    with pytest.raises(BundleError, match=r"no decode graph for target 'tensorrt', only for \['onnxruntime'\]"):
        manifest.graph("decode", "tensorrt")
    with pytest.raises(BundleError, match=r"weights\.bin is named but not listed"):
        manifest.file("weights.bin")
