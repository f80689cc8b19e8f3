"""The oracle against the untouched model, against itself in another form, and against changes that must not go unseen.

Tolerances: the tiny models' logits reach about 7, and the forms compared add the same numbers in another order; float32 noise was about
1e-5 when this was written. A wrong token attended to is off by more than 1.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sinkring.models.errors import ModelError, UnsupportedModel
from sinkring.models.oracle import attended, masked_dense_logits, streaming_logits, streaming_logits_stepwise, top2_margin
from sinkring.models.patch import ATTENTION_NAME
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from tests.models.tiny import tiny_llama

NOISE = 1e-4
LOUD = 1.0
TOKENS = 40
# Small, none, one token only, and a cache that never fills.
GEOMETRIES = [(2, 4), (0, 5), (4, 1), (1, 60)]


def token_ids(tokens: int = TOKENS, vocab: int = 97) -> torch.Tensor:
    return torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(5))


def error_per_step(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left - right).abs().amax(dim=-1)


def assert_close(left: torch.Tensor, right: torch.Tensor, limit: float = NOISE) -> None:
    error = (left - right).abs()
    assert float(error.max()) <= limit, (
        f"max error {float(error.max()):.3g}, mean {float(error.mean()):.3g}: needs a tolerance of the former"
    )


def test_attended_tokens_are_those_of_the_conformance_example() -> None:
    assert attended(9, sinks=2, window=4) == [0, 1, 6, 7, 8, 9]
    assert attended(10, sinks=2, window=4) == [0, 1, 7, 8, 9, 10]
    assert attended(0, sinks=2, window=4) == [0]
    assert attended(3, sinks=0, window=2) == [2, 3]
    assert attended(7, sinks=3, window=1) == [0, 1, 2, 7]


@pytest.mark.parametrize("exact_angles", [True, False])
def test_dense_is_the_plain_model_while_the_window_holds_everything(exact_angles: bool) -> None:
    model, ids = tiny_llama(), token_ids()
    plain = model(ids[None]).logits[0]
    assert_close(masked_dense_logits(model, ids, 2, TOKENS, exact_angles=exact_angles), plain)
    assert float(error_per_step(masked_dense_logits(model, ids, 2, 8), plain).max()) > LOUD


def test_dense_does_not_depend_on_where_the_stream_starts() -> None:
    model, ids = tiny_llama(), token_ids()
    young = masked_dense_logits(model, ids, 2, 6)
    for start in (1000, 10**6, 2**24 + 1, 2**31 + 5):
        # Angles are float64, of which an age of 2^31 leaves 1e-7 rad.
        assert_close(masked_dense_logits(model, ids, 2, 6, start_position=start), young)
    # The model's own float32 angles are visibly wrong by then: what exact_angles is for.
    assert float((masked_dense_logits(model, ids, 2, 6, start_position=2**24 + 1, exact_angles=False) - young).abs().max()) > 100 * NOISE


@pytest.mark.parametrize(("sinks", "window"), GEOMETRIES)
@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
def test_streaming_in_blocks_is_the_recurrence(sinks: int, window: int, double: bool) -> None:
    model = tiny_llama(layers=3, heads=6, kv_heads=2)
    model = model.double() if double else model
    ids = token_ids()
    blocks, steps = streaming_logits(model, ids, sinks, window), streaming_logits_stepwise(model, ids, sinks, window)
    assert blocks.shape == (TOKENS, 97)
    assert blocks.dtype == steps.dtype == model.dtype
    # Step by step the model's own attention runs, whose softmax is float32 whatever the weights are.
    assert_close(blocks, steps, 1e-5 if double else NOISE)


def test_streaming_over_several_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_llama(), token_ids()
    whole = streaming_logits(model, ids, 2, 4)
    monkeypatch.setattr("sinkring.models.oracle._QUERIES_AT_A_TIME", 7)
    assert_close(streaming_logits(model, ids, 2, 4), whole)


@pytest.mark.parametrize(("sinks", "window"), [(2, 4), (4, 1), (1, 10)])
def test_streaming_is_native_until_the_cache_is_full_and_not_after(sinks: int, window: int) -> None:
    model, ids = tiny_llama(), token_ids()
    error = error_per_step(streaming_logits(model, ids, sinks, window), masked_dense_logits(model, ids, sinks, window))
    assert float(error[: sinks + window].max()) <= NOISE
    assert float(error[sinks + window :].max()) > LOUD


def test_streaming_without_sinks_is_native() -> None:
    # All distances are those of the stream then, and rotation sees distances only.
    model, ids = tiny_llama(), token_ids()
    assert_close(streaming_logits(model, ids, 0, 5), masked_dense_logits(model, ids, 0, 5))


@pytest.mark.parametrize("oracle", [masked_dense_logits, streaming_logits])
def test_an_off_by_one_is_loud(oracle: Callable[..., torch.Tensor]) -> None:
    model, ids = tiny_llama(), token_ids()
    right = oracle(model, ids, 2, 5)
    for sinks, window in [(2, 6), (2, 4), (1, 5), (1, 6), (3, 4)]:
        error = error_per_step(oracle(model, ids, sinks, window), right)
        full = min(sinks + window, 7)
        assert float(error[:full].max()) <= NOISE, "nothing has been evicted yet"
        assert float(error[full + 1 :].max()) > LOUD


def test_other_families_and_partial_changes_of_the_rope() -> None:
    ids = token_ids()
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    qwen = Qwen2ForCausalLM(Qwen2Config(vocab_size=97, initializer_range=0.3, **shape)).eval()
    mistral = MistralForCausalLM(MistralConfig(vocab_size=97, initializer_range=0.3, sliding_window=None, **shape)).eval()
    yarn = tiny_llama(
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8}
    )
    assert yarn.model.rotary_emb.attention_scaling != 1.0
    for model in (qwen, mistral, yarn):
        steps = streaming_logits_stepwise(model, ids, 2, 5)
        assert_close(streaming_logits(model, ids, 2, 5), steps)
        error = error_per_step(steps, masked_dense_logits(model, ids, 2, 5))
        assert float(error[:7].max()) <= NOISE
        assert float(error[7:].max()) > 100 * NOISE


LENGTH_ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.3, 1.6],
        "long_factor": [1.7, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 16,
        "factor": 4.0,
    },
}


@pytest.mark.parametrize("kind", LENGTH_ROPES)
@pytest.mark.parametrize("tokens", [16, 17, 30])
def test_angles_that_depend_on_the_length_are_those_of_the_untouched_model(kind: str, tokens: int) -> None:
    """Fresh models for what is expected: a forward pass leaves the angles of its length behind, which the oracle must not go by."""
    config: dict[str, Any] = {"max_position_embeddings": 16, "rope_parameters": LENGTH_ROPES[kind]}
    ids = token_ids(tokens)
    plain = tiny_llama(**config)(ids[None]).logits[0]
    model = tiny_llama(**config)
    model(token_ids(60)[None])
    assert_close(masked_dense_logits(model, ids, 0, tokens), plain)
    assert_close(masked_dense_logits(model, ids, 3, tokens), plain)
    assert_close(streaming_logits(model, ids, 3, tokens - 3), plain)
    assert_close(streaming_logits_stepwise(model, ids, 3, tokens - 3), plain)
    if tokens > 16:
        shorter = masked_dense_logits(model, ids, 0, 16)[:16]
        assert float((shorter - plain[:16]).abs().max()) > 100 * NOISE, "within the original context the angles are others"


@pytest.mark.parametrize("oracle", [masked_dense_logits, streaming_logits, streaming_logits_stepwise])
def test_the_model_is_as_before_also_after_an_error(oracle: Callable[..., torch.Tensor]) -> None:
    model, ids = tiny_llama(attn_implementation="sdpa"), token_ids()
    before, make_mask = model(ids[None]).logits, modeling_llama.create_causal_mask
    patched = {masked_dense_logits: "exact angles", streaming_logits: ATTENTION_NAME, streaming_logits_stepwise: "masks"}[oracle]

    def fail_when_patched(*_: object) -> None:
        now = {
            "exact angles": "forward" in vars(model.model.rotary_emb),
            ATTENTION_NAME: model.config._attn_implementation == ATTENTION_NAME,
            "masks": modeling_llama.create_causal_mask is not make_mask,
        }
        if now[patched]:
            raise RuntimeError("in the middle of a layer")

    oracle(model, ids, 2, 4)
    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail_when_patched)
    with pytest.raises(RuntimeError, match="in the middle"):
        oracle(model, ids, 2, 4)
    handle.remove()
    assert "forward" not in vars(model.model.rotary_emb)
    assert modeling_llama.create_causal_mask is make_mask
    assert model.config._attn_implementation == "sdpa"
    assert ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS
    assert torch.equal(model(ids[None]).logits, before)


def test_what_the_oracle_would_read_wrongly_is_refused() -> None:
    ids = token_ids()
    learned = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4, initializer_range=0.3)).eval()
    other_rope = tiny_llama(rope_parameters={"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0})
    # A field that transformers' Llama passes over, while its cache would heed it.
    passed_over = tiny_llama()
    passed_over.config.sliding_window = 16
    bidirectional = tiny_llama()
    bidirectional.config.is_causal = False
    linear = tiny_llama()
    linear.config.layer_types = ["full_attention", "linear_attention"]
    for oracle in (masked_dense_logits, streaming_logits):
        for model, words in [
            (other_rope, "proportional"),
            (passed_over, "sliding_window=16"),
            (bidirectional, "not causal"),
            (linear, "linear_attention"),
        ]:
            with pytest.raises(UnsupportedModel, match=words):
                oracle(model, ids, 2, 4)
        with pytest.raises(UnsupportedModel, match="bfloat16"):
            oracle(tiny_llama().bfloat16(), ids, 2, 4)
    # Over a whole sequence its learned positions are what the model says; a place in the cache is none of them.
    with pytest.raises(UnsupportedModel, match="does not know"):
        streaming_logits(learned, ids, 2, 4)


def test_a_model_that_rotates_in_its_own_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def mirrored(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, ...]:
        def turn(x: torch.Tensor) -> torch.Tensor:
            first, last = x.chunk(2, dim=-1)
            last = last.flip(-1)  # entry i turns with D - 1 - i
            c, s = (part[:, None, :, : first.shape[-1]] for part in (cos, sin))
            return torch.cat((first * c - last * s, (last * c + first * s).flip(-1)), dim=-1)

        return turn(q), turn(k)

    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", mirrored)
    for oracle in (masked_dense_logits, streaming_logits, streaming_logits_stepwise):
        with pytest.raises(UnsupportedModel, match="does not know"):
            oracle(tiny_llama(), token_ids(), 2, 4)


def test_a_term_that_the_attention_adds_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no option names: the blocks miss it, and so the model's own code runs token by token, which has it."""
    eager = modeling_llama.eager_attention_forward

    def doubled(module: Any, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return eager(module, 2 * query, *rest, **options)

    ids = token_ids()
    plain = streaming_logits(tiny_llama(), ids, 2, 4)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", doubled)
    model = tiny_llama()
    assert torch.equal(streaming_logits(model, ids, 2, 4), streaming_logits_stepwise(model, ids, 2, 4))
    assert float((streaming_logits(model, ids, 2, 4) - plain).abs().max()) > LOUD


def test_arguments_that_make_no_sense_are_refused() -> None:
    model, ids = tiny_llama(), token_ids()
    for sinks, window in [(-1, 4), (2, 0)]:
        with pytest.raises(ModelError, match="window 1 or more"):
            streaming_logits(model, ids, sinks, window)
    for wrong in (ids[None], ids.int(), ids[:0]):
        with pytest.raises(ModelError, match="int64"):
            masked_dense_logits(model, wrong, 2, 4)
    with pytest.raises(ModelError, match="0 to 96"):
        masked_dense_logits(model, torch.tensor([3, 97]), 2, 4)


def test_top2_margin() -> None:
    assert top2_margin(torch.tensor([[1.0, 4.0, 2.5], [0.0, -1.0, 0.0]])).tolist() == [1.5, 0.0]
