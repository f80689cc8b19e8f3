"""Layers with a trained sliding window: they keep it, whatever is asked of the others, and a window or a learned sink is never lost."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from sinkring.exporter import hooks
from sinkring.exporter.cache_plan import CachePlan, CacheRequest, observe_layers, plan_caches
from sinkring.exporter.export import export_decoder
from sinkring.exporter.frontend import trace_step
from sinkring.models.registry import context_tokens, find_family
from sinkring.runtime.errors import GeometryError, UnsupportedError

from tests.models.tiny_families import CONTEXT, TINY_FAMILIES, TinyFamily, tiny_model

WITH_WINDOWS = [row for row in TINY_FAMILIES if any(row.sliding)]


def plan(model: Any, **asked: int) -> CachePlan:
    family = find_family(model.config)
    request = CacheRequest(asked.get("sinks"), asked.get("window"), asked.get("capacity"), chunk=asked.get("chunk", 3), slack=0)
    return plan_caches(observe_layers(model, family, context_tokens(model.config, family)), request)


@pytest.mark.parametrize("option", ["sinks", "window", "capacity"])
@pytest.mark.parametrize("value", [2, 6, 40])
def test_options_are_refused_where_every_layer_has_its_window(tmp_path: Path, option: str, value: int) -> None:
    tiny_model("mistral").save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"policy": "native", option: value, "chunk": 2}
    with pytest.raises(
        GeometryError, match=rf"^{option}={value}: every layer of this model has its trained window, of 6 tokens, .* leave out {option}"
    ):
        export_decoder(tmp_path / "model", tmp_path / "bundle", **options)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("window", [3, 5, 40])
def test_a_trained_window_is_neither_cut_nor_enlarged(window: int) -> None:
    rings = plan(tiny_model("ministral"), sinks=2, window=window).rings
    assert [(ring.layers, ring.geometry.sinks_tokens, ring.geometry.window_tokens) for ring in rings] == [
        ((1, 3), 2, window),
        ((0, 2), 0, 5),
    ]


def test_a_capacity_within_the_window_needs_no_ring() -> None:
    (ring,) = plan(tiny_model("ministral"), capacity=5).rings
    assert not ring.geometry.wraps
    full, sliding = plan(tiny_model("ministral"), capacity=6).rings
    assert not full.geometry.wraps
    assert (sliding.layers, sliding.geometry.window_tokens, sliding.geometry.wraps) == ((0, 2), 5, True)


def test_a_window_as_long_as_the_trained_context_is_full_attention() -> None:
    (ring,) = plan(tiny_model("mistral", sliding_window=CONTEXT), sinks=2, window=4).rings
    assert (ring.geometry.sinks_tokens, ring.geometry.window_tokens) == (2, 4)


@pytest.mark.parametrize("row", [row for row in WITH_WINDOWS if not row.model.endswith("ConditionalGeneration")], ids=lambda row: row.name)
def test_every_layer_is_seen_with_the_window_of_its_row(row: TinyFamily) -> None:
    assert tuple(layer.window for layer in plan(tiny_model(row)).layers) == row.sliding


def test_a_window_that_only_the_mask_would_have_is_refused() -> None:
    model = tiny_model("qwen2_moe", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert model.config.layer_types[0] == "sliding_attention"
    with pytest.raises(
        UnsupportedError, match=r"layer 0: the configuration says a sliding window of 8 tokens and .* asks for full attention"
    ):
        plan(model)


def test_a_window_that_the_configuration_does_not_have_is_refused() -> None:
    model = tiny_model("ministral")
    model.model.layers[1].self_attn.sliding_window = 9
    with pytest.raises(UnsupportedError, match=r"layer 1: the configuration says full attention and .* a sliding window of 9 tokens"):
        plan(model)


def test_a_learned_sink_that_the_graph_does_not_read_is_refused() -> None:
    model = tiny_model("gpt_oss", num_hidden_layers=1, layer_types=["full_attention"])
    family, attention = find_family(model.config), hooks._Hooks.attention

    def deaf(self: Any, *args: Any, s_aux: Any = None, **kwargs: Any) -> Any:
        return attention(self, *args, **kwargs)

    with (
        mock.patch.object(hooks._Hooks, "attention", deaf),
        pytest.raises(
            UnsupportedError, match=r"1 weights of the model do not reach the graph, the first is model\.layers\.0\.self_attn\.sinks"
        ),
    ):
        trace_step(model, family, plan(model), role="decode", policy="native", batch=1, chunk=3)


def test_a_setting_that_is_unknown_stops_the_export_by_name(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    model.config.attention_sharpness = 2.0
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(
        UnsupportedError, match=r"qwen3: attention_sharpness=2\.0 in its configuration is unknown to transformers' Qwen3Config"
    ):
        export_decoder(tmp_path / "model", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
