"""export_decoder: what it refuses, in one clear line and before anything is written."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from sinkring.exporter.export import export_decoder
from sinkring.runtime.errors import GeometryError, InputError, SinkringError, UnsupportedError

from tests.exporter.export_case import TINY, refuse_to_load
from tests.models.tiny import tiny_llama


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "bundle"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sinks": -1}, "sinks=-1: must be 0 or more"),
        ({"window": 0}, "window=0: must be 1 or more"),
        ({"window": -4}, "window=-4"),
        ({"chunk": 0}, "chunk=0: must be 1 or more"),
        ({"batch": 0}, "batch=0: must be 1 or more"),
        ({"slack": -1}, "slack=-1: must be 0 or more"),
    ],
    ids=str,
)
def test_numbers_without_sense_are_refused_before_the_model_is_loaded(
    out: Path, options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_load(monkeypatch)
    with pytest.raises(GeometryError, match=match):
        export_decoder("smollm2", out, **options)
    assert not out.exists()


NUMBERS = ("sinks", "window", "chunk", "batch", "slack")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(NUMBERS, (True, "4", 4.0, float("nan"), [4])),
        # Of sinks and window None is the default.
        *itertools.product(("chunk", "batch", "slack"), (None,)),
    ],
    ids=repr,
)
def test_numbers_of_another_type_are_refused(out: Path, name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_load(monkeypatch)
    with pytest.raises((InputError, GeometryError), match=name):
        export_decoder("smollm2", out, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"sinks": 0, "window": 257}, {"sinks": 4, "window": 253}, {"sinks": 300, "window": 4}], ids=str)
def test_more_than_the_model_was_trained_for(tiny_model: Path, out: Path, options: dict[str, int]) -> None:
    with pytest.raises(GeometryError, match=r"the model was trained for 256"):
        export_decoder(tiny_model, out, **options)
    assert not out.exists()


@pytest.mark.parametrize("name", ["chunk", "slack"])
def test_a_ring_of_senseless_size(tiny_model: Path, out: Path, name: str) -> None:
    with pytest.raises(GeometryError, match=name):
        export_decoder(tiny_model, out, **{**TINY, name: 10**9})


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"policy": "sliding"}, InputError, "policy 'sliding' is not known; use one of native, streaming"),
        ({"policy": None}, InputError, "policy None"),
        ({"dtype": "fp8"}, UnsupportedError, "dtype 'fp8' is not supported; use one of fp32, fp16, bf16"),
        ({"cache_dtype": "fp8"}, UnsupportedError, "cache_dtype 'fp8' is not supported; use one of fp32, fp16, bf16"),
        ({"dtype": "bf16", "weights": "int4"}, UnsupportedError, "weights='int4' with dtype='bf16': .* use dtype fp32"),
        ({"cache_dtype": 16}, UnsupportedError, "cache_dtype 16 is not supported"),
        ({"dtype": ["fp32"]}, UnsupportedError, r"dtype \['fp32'\] is not supported; use one of fp32"),
        (
            {"targets": ["onnxruntime", "jetson"]},
            UnsupportedError,
            "target 'jetson' is not known; known: onnxruntime, tensorrt, tensorrt-10.3, tensorrt-rtx, tensorrt-rtx-sm75",
        ),
    ],
    ids=str,
)
def test_unknown_names_are_refused_with_the_known_ones(
    out: Path, options: dict[str, Any], error: type[SinkringError], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_load(monkeypatch)
    with pytest.raises(error, match=match):
        export_decoder("smollm2", out, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"policy": "streaming"}, "capacity=32 with policy streaming, whose streams have no end: use policy native"),
        ({"sinks": 4}, "sinks=4 with capacity=32: .* leave out sinks or capacity"),
        ({"sinks": 0}, "sinks=0 with capacity=32"),
        ({"window": 256}, "window=256 with capacity=32"),
        ({"capacity": 0, "chunk": 1}, "capacity=0: must be 1 or more"),
        ({"chunk": 33}, "chunk=33 is more than capacity=32: use a chunk of at most 32"),
        ({"chunk": 0}, "chunk=0: must be 1 or more"),
        ({"capacity": 3.5}, r"capacity=3\.5 is float: give a whole number"),
        ({"capacity": True}, "capacity=True is bool"),
    ],
    ids=str,
)
def test_a_capacity_that_makes_no_sense(out: Path, options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_load(monkeypatch)
    with pytest.raises(SinkringError, match=match):
        export_decoder("smollm2", out, **{"policy": "native", "capacity": 32, "chunk": 8, **options})


def test_slack_where_every_cache_is_linear(tiny_model: Path, out: Path) -> None:
    with pytest.raises(GeometryError, match="slack=3 with capacity=32: any number of tokens can be rolled back then; leave out slack"):
        export_decoder(tiny_model, out, policy="native", capacity=32, chunk=8, slack=3)
    assert not out.exists()


def test_a_capacity_beyond_the_trained_context(tiny_model: Path, out: Path) -> None:
    with pytest.raises(GeometryError, match="capacity=257 is more than the 256 tokens the model was trained for"):
        export_decoder(tiny_model, out, policy="native", capacity=257)
    assert not out.exists()


@pytest.mark.parametrize(
    ("targets", "match"), [([], "targets"), ("onnxruntime", "targets"), (5, "targets"), ([["onnxruntime"]], "targets?")], ids=repr
)
def test_targets_are_a_list_of_names(out: Path, targets: Any, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_load(monkeypatch)
    with pytest.raises(InputError, match=match):
        export_decoder("smollm2", out, targets=targets)


def test_an_architecture_that_cannot_stream_is_refused_with_the_reason(tmp_path: Path, out: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=32)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnsupportedError, match=r"'gpt2' cannot be a stream: its positions are learned"):
        export_decoder(tmp_path / "gpt2", out, **TINY)
    assert not out.exists()


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **more}}


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (_rope("proportional"), "rope_type 'proportional' is not supported, only default, .*, dynamic, longrope"),
        (_rope("linear", partial_rotary_factor=0.5), r"partial_rotary_factor=0\.5 is not honoured by transformers' llama"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5 is not honoured by transformers' llama"),
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"is_causal": False}, "is_causal=False is not honoured"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*sliding_attention"),
        ({"embedding_multiplier": 12.0}, r"embedding_multiplier=12\.0 is not honoured"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}}, r"factor=0\.0.* give 4 of 4 angles per token"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "rope_theta=nan.* give .* angles per token"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_settings_that_would_be_dropped_are_refused(
    tmp_path: Path, tiny_model: Path, out: Path, config: dict[str, Any], match: str
) -> None:
    model = _with_config(tiny_model, tmp_path / "model", config)
    with pytest.raises(UnsupportedError, match=match):
        export_decoder(model, out, **TINY)
    assert not out.exists()


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path: Path, out: Path, wrong: float) -> None:
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj.weight[3, 2] = wrong
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight: 1 of its 2048 weights are NaN or infinite"):
        export_decoder(tmp_path / "model", out, **TINY)
    assert not out.exists()


@pytest.mark.parametrize(
    ("where", "match"),
    [
        (None, "out=None is NoneType"),
        (5, "out=5 is int"),
        ("", "out='' is empty"),
        ("a\0b", "holds a NUL"),
        ("x/" + "y" * 241, "a name of 241 bytes .* is too long: use at most 240"),
        ("ü" * 128, "a name of 256 bytes"),
    ],
)
def test_an_out_that_can_be_no_folder(where: Any, match: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuse_to_load(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=match):
        export_decoder("model", where, **TINY)
    assert list(tmp_path.iterdir()) == []


def test_caches_beyond_this_machine_s_memory(tiny_model: Path, out: Path) -> None:
    with pytest.raises(GeometryError, match=rf"batch={2**40}: its caches take \d+ bytes, \d+ a row, and this machine has \d+ bytes"):
        export_decoder(tiny_model, out, batch=2**40, **TINY)
    assert not out.exists()


_LONGROPE = _rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=32)


@pytest.mark.parametrize(
    ("config", "options", "match"),
    [
        (_rope("dynamic"), {"sinks": 2, "window": 8}, "'dynamic' with policy native and sinks=2: the distance to a sink grows"),
        (_LONGROPE, {"sinks": 2, "window": 8}, "'longrope' with policy native and sinks=2: the distance to a sink grows"),
        (_LONGROPE, {"sinks": 0, "window": 33}, "'longrope' with policy native and 33 tokens in the window: after 32 tokens"),
        (_LONGROPE, {"capacity": 33}, "use a window or capacity of at most 32, or policy streaming"),
    ],
    ids=["dynamic, sinks", "longrope, sinks", "longrope, window", "longrope, capacity"],
)
def test_angles_that_would_change_on_the_way_are_refused(
    tmp_path: Path, tiny_model: Path, out: Path, config: dict[str, Any], options: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedError, match=match):
        export_decoder(_with_config(tiny_model, tmp_path / "model", config), out, policy="native", chunk=4, **options)
    assert not out.exists()


def _with_config(tiny_model: Path, model: Path, config: dict[str, Any]) -> Path:
    model.mkdir()
    (model / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes())
    (model / "config.json").write_text(json.dumps({**json.loads((tiny_model / "config.json").read_text()), **config}))
    return model


@pytest.mark.parametrize("model", ["no-such-model", "/no/such.gguf", None, 5], ids=repr)
def test_a_model_that_is_not_there(out: Path, model: Any) -> None:
    with pytest.raises(SinkringError, match="give a"):
        export_decoder(model, out, **TINY)
