"""Sampling against a slow reference that sorts, in float64, written apart from the sampler."""

import dataclasses
import json
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sinkring.runtime.errors import InputError
from sinkring.runtime.sampling import Sampler, SamplingOptions, sampling_options


def reference_distribution(options: SamplingOptions, logits: np.ndarray, recent: list[int]) -> np.ndarray:
    """float64 [V]: the filters one after another over a full, stable sort."""
    scores = [float(logit) for logit in logits]
    if options.repetition_penalty != 1:
        for token in set(recent[-options.repetition_window_tokens :]):
            scores[token] = scores[token] / options.repetition_penalty if scores[token] > 0 else scores[token] * options.repetition_penalty
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if options.temperature == 0:
        return np.eye(len(scores))[order[0]]
    if options.top_k > 0:
        order = order[: options.top_k]
    odds = [math.exp((scores[token] - scores[order[0]]) / options.temperature) for token in order]
    if options.top_p < 1:
        total, running, count = math.fsum(odds), 0.0, 0
        while count < len(odds) and running < options.top_p * total:
            running += odds[count]
            count += 1
        order, odds = order[:count], odds[:count]
    kept = [(token, odd) for token, odd in zip(order, odds, strict=True) if odd >= options.min_p * odds[0]]
    result = np.zeros(len(scores))
    for token, odd in kept:
        result[token] = odd
    return result / result.sum()


options_strategy = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 40, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.99, 0.9, 0.613, 0.3, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.31, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.37, 0.8]),
    repetition_window_tokens=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=300, deadline=None)
@given(
    options=options_strategy,
    vocab=st.sampled_from([1, 2, 63, 64, 65, 129, 700, 6000]),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    data=st.data(),
)
def test_keeps_and_weighs_what_the_reference_does(options: SamplingOptions, vocab: int, spread: float, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="logits seed"))
    logits = (rng.standard_normal(vocab) * spread).astype(np.float32)
    before = logits.copy()
    recent = data.draw(st.lists(st.integers(0, vocab - 1), max_size=12), label="recent")
    sampler = Sampler(options, vocab)
    for token in recent:
        sampler.observe(token)
    got, want = sampler.probabilities(logits), reference_distribution(options, logits, recent)
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=2e-5)
    assert want[sampler.sample(logits)] > 0
    np.testing.assert_array_equal(logits, before)


@settings(max_examples=100, deadline=None)
@given(
    options=options_strategy.filter(lambda options: options.temperature > 0 and options.repetition_penalty == 1),
    levels=st.lists(st.integers(-2, 2), min_size=1, max_size=200),
    times=st.sampled_from([1, 1, 30]),
)
def test_ties_keep_the_lowest_ids(options: SamplingOptions, levels: list[int], times: int) -> None:
    """Few distinct logits, with powers of two as weights: nearly every filter border falls among equals."""
    temperature, levels = 1 / math.log(2), levels * times
    options = SamplingOptions(temperature, options.top_k, options.top_p, 0.0, seed=options.seed)
    logits = np.array(levels, np.float32)
    got = Sampler(options, len(levels)).probabilities(logits)
    order = sorted(range(len(levels)), key=lambda token: (-levels[token], token))
    np.testing.assert_array_equal(np.flatnonzero(got), sorted(order[: np.count_nonzero(got)]))
    expected = np.count_nonzero(reference_distribution(options, logits, []))
    # exp(-ln 2) is 0.5 within a float32 rounding: the reference may stop one token away where p falls exactly on a border.
    assert abs(np.count_nonzero(got) - expected) <= 1
    if options.top_p == 1:
        assert np.count_nonzero(got) == expected


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(1.0, seed=3),
        SamplingOptions(0.7, top_k=20, seed=3),
        SamplingOptions(1.3, top_p=0.8, seed=3),
        SamplingOptions(1.0, min_p=0.05, repetition_penalty=1.5, seed=3),
    ],
)
def test_draws_follow_the_distribution(options: SamplingOptions) -> None:
    vocab, draws = 300, 20_000
    logits = (np.random.default_rng(1).standard_normal(vocab) * 2).astype(np.float32)
    sampler = Sampler(options, vocab)
    recent = [int(logits.argmax())]
    sampler.observe(recent[0])
    counts = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=vocab)
    expected = reference_distribution(options, logits, recent) * draws
    assert not counts[expected == 0].any()
    # Pearson's statistic has mean `free` and variance 2 * free; rare tokens are pooled so that each cell expects 5 or more.
    common = expected >= 5
    cells = [(counts[common], expected[common])]
    if expected[~common].sum() >= 5:
        cells.append((counts[~common].sum(keepdims=True), expected[~common].sum(keepdims=True)))
    statistic = sum(float(((seen - wanted) ** 2 / wanted).sum()) for seen, wanted in cells)
    free = sum(len(wanted) for _, wanted in cells) - 1
    assert abs(statistic - free) < 4 * math.sqrt(2 * free), f"chi-square {statistic:.1f} with {free} degrees of freedom"
    wrong = np.roll(expected, 1) + 1e-9
    assert float(((counts - wrong) ** 2 / wrong).sum()) > 100 * free, "the statistic cannot tell a shifted distribution apart"


def test_each_draw_inverts_the_cumulative_distribution() -> None:
    """Also across the blocks of the draw: every token of a 1000-token vocabulary must come from its own interval."""
    options = SamplingOptions(1.0, seed=11)
    logits = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    sampler, uniform = Sampler(options, 1000), np.random.Generator(np.random.PCG64(11))
    cumulative = np.cumsum(reference_distribution(options, logits, []))
    for _ in range(500):
        token, target = sampler.sample(logits), uniform.random()
        assert (cumulative[token - 1] if token else 0) - 1e-6 <= target <= cumulative[token] + 1e-6


@pytest.mark.parametrize("vocab", [1, 64, 65, 128, 1000, 1024])
@pytest.mark.parametrize("top_p", [0.5, 0.25, 0.375, 1 - 2**-20])
def test_the_nucleus_of_equals_is_exact(vocab: int, top_p: float) -> None:
    """Weights of 1 and p in powers of two: no rounding blurs where the nucleus ends."""
    got = Sampler(SamplingOptions(1.0, top_p=top_p), vocab).probabilities(np.zeros(vocab, np.float32))
    assert np.flatnonzero(got).tolist() == list(range(math.ceil(top_p * vocab)))


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 140), (1 - 2**-53, 289)])
def test_the_ends_of_the_draw_are_tokens_that_were_kept(uniform: float, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed:
        def random(self) -> float:
            return uniform

    logits = np.full(300, -50, np.float32)
    logits[140:290] = 1
    sampler = Sampler(SamplingOptions(1.0, min_p=0.5), 300)
    monkeypatch.setattr(sampler, "_generator", Fixed())
    assert sampler.sample(logits) == token


def test_greedy_takes_the_first_of_equals_and_draws_nothing() -> None:
    sampler = Sampler(SamplingOptions(), 5)
    before = sampler.state()
    assert sampler.sample(np.array([0, 3, 1, 3, 3], np.float32)) == 1
    assert sampler.state() == before


def test_the_penalty_forgets_what_left_its_window() -> None:
    logits = np.array([1.0, 0.9, -1.0], np.float32)
    sampler = Sampler(SamplingOptions(repetition_penalty=2.0, repetition_window_tokens=3), 3)
    picked = []
    for token in (0, 2, 2, 2):
        sampler.observe(token)
        picked.append(sampler.sample(logits))
    assert picked == [1, 1, 1, 0]


def test_extreme_finite_logits_stay_finite() -> None:
    largest = float(np.finfo(np.float32).max)
    logits = np.array([largest, -largest, 0.0], np.float32)
    options = SamplingOptions(temperature=0.001, repetition_penalty=0.5, min_p=0.1)
    sampler = Sampler(options, 3)
    for token in (0, 1, 2):
        sampler.observe(token)
    with np.errstate(all="raise", under="ignore"):
        np.testing.assert_array_equal(sampler.probabilities(logits), [1, 0, 0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(1.0, top_k=2)])
def test_logits_that_are_not_finite_are_refused_and_change_nothing(bad: float, options: SamplingOptions) -> None:
    sampler = Sampler(options, 4)
    before = sampler.state()
    with pytest.raises(InputError, match=r"1 of 4 are not finite, the first is \S+ at id 2.*reset the stream"):
        sampler.sample(np.array([0, 1, bad, 2], np.float32))
    assert sampler.state() == before


@pytest.mark.parametrize("logits", [np.zeros(3, np.float32), np.zeros((1, 4), np.float32), np.zeros(4), np.zeros(4, np.int64)])
def test_logits_of_another_shape_or_dtype_are_refused(logits: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"expected float32 \(4,\)"):
        Sampler(SamplingOptions(), 4).sample(logits)


def test_same_seed_same_tokens_and_another_seed_others() -> None:
    logits = np.zeros(1000, np.float32)

    def draw(sampler: Sampler) -> list[int]:
        return [sampler.sample(logits) for _ in range(20)]

    first = Sampler(SamplingOptions(1.0, seed=5), 1000)
    tokens = draw(first)
    assert draw(Sampler(SamplingOptions(1.0, seed=5), 1000)) == tokens
    assert draw(Sampler(SamplingOptions(1.0, seed=6), 1000)) != tokens
    assert draw(first) != tokens
    first.observe(7)
    first.reset()
    assert first.state() == Sampler(SamplingOptions(1.0, seed=5), 1000).state()
    assert draw(first) == tokens


@pytest.mark.parametrize("steps", [0, 2, 5, 13])
def test_state_round_trip_through_json_continues_as_if_never_stopped(steps: int) -> None:
    options = SamplingOptions(1.0, top_p=0.9, repetition_penalty=3.0, repetition_window_tokens=5, seed=9)
    logits = np.linspace(-1, 2, 40, dtype=np.float32)

    def run(sampler: Sampler, count: int) -> list[int]:
        tokens = []
        for _ in range(count):
            tokens.append(sampler.sample(logits))
            sampler.observe(tokens[-1])
        return tokens

    original = Sampler(options, 40)
    run(original, steps)
    saved = json.dumps(original.state())
    expected = run(original, 30)
    restored = Sampler(options, 40)
    run(restored, 3)
    restored.load_state(json.loads(saved))
    assert json.dumps(restored.state()) == saved
    assert run(restored, 30) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 9}, "vocab_size is 9, this sampler has 40"),
        ({"repetition_window_tokens": 6}, "repetition_window_tokens is 6, this sampler has 5"),
        ({"recent": [0, 40]}, r"ids in \[0, 40\)"),
        ({"recent": [0] * 6}, "at most 5 ids"),
        ({"recent": "text"}, "cannot be read"),
        ({"generator": {"bit_generator": "MT19937"}}, "cannot be read"),
        ({"generator": None}, "cannot be read"),
    ],
)
def test_a_damaged_or_foreign_state_is_refused_and_changes_nothing(change: dict[str, object], message: str) -> None:
    sampler = Sampler(SamplingOptions(1.0, repetition_window_tokens=5), 40)
    sampler.observe(3)
    before = sampler.state()
    with pytest.raises(InputError, match=message):
        sampler.load_state({**before, **change})
    assert sampler.state() == before


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e-9),
        ("temperature", math.nan),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("repetition_window_tokens", 0),
        ("seed", -1),
        ("seed", "7"),
    ],
)
def test_an_option_out_of_range_names_itself_and_its_value(option: str, value: object) -> None:
    with pytest.raises(InputError, match=f"^{option}={value!r}"):
        SamplingOptions(**{option: value})  # type: ignore[arg-type]


def test_options_that_were_checked_once_are_not_taken_for_others() -> None:
    """1, 1.0 and True are equal and have one hash; NaN equals nothing; a list has none."""
    assert sampling_options(temperature=1.0, seed=1) is sampling_options(temperature=1.0, seed=1)
    assert sampling_options(seed=np.int64(1)) == sampling_options(seed=1)
    for right in ({"temperature": 1.0}, {"temperature": 1}, {"seed": 1}):
        sampling_options(**right)
    for wrong in (
        {"temperature": True},
        {"seed": 1.0},
        {"seed": True},
        {"temperature": math.nan},
        {"top_p": [1.0]},
        {"top_k": np.array([1])},
    ):
        with pytest.raises(InputError, match=f"^{next(iter(wrong))}="):
            sampling_options(**wrong)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    sampler = Sampler(SamplingOptions(), 4)
    for token in (-1, 4):
        with pytest.raises(InputError, match=rf"token id {token} is outside the vocabulary \[0, 4\)"):
            sampler.observe(token)
    with pytest.raises(InputError, match="vocab_size=0"):
        Sampler(SamplingOptions(), 0)


@pytest.mark.parametrize(
    "options",
    [SamplingOptions(1.0), SamplingOptions(1.0, top_k=50), SamplingOptions(1.0, top_k=1562), SamplingOptions(1.0, top_p=0.9, min_p=0.01)],
)
def test_a_step_allocates_nothing_of_the_vocabularys_size_and_nothing_grows(options: SamplingOptions) -> None:
    vocab = 200_000
    options = SamplingOptions(options.temperature, options.top_k, options.top_p, options.min_p, repetition_penalty=1.1)
    logits = (np.random.default_rng(4).standard_normal(vocab)).astype(np.float32)
    # One of the 1,562 parts that top-k takes the largest of holds nothing large.
    logits[::1562] = -9
    sampler = Sampler(options, vocab)
    for token in range(100):
        sampler.observe(token)
    sampler.sample(logits)
    size = len(json.dumps(sampler.state()["recent"]))
    tracemalloc.start()
    try:
        start, _ = tracemalloc.get_traced_memory()
        for _ in range(50):
            sampler.observe(sampler.sample(logits))
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # One byte per token is the smallest array of the vocabulary's length; numpy's buffers for casting take 64 KiB whatever the length.
    assert peak - start < vocab
    assert now - start < 4_000
    assert len(sampler.state()["recent"]) == options.repetition_window_tokens
    assert len(json.dumps(sampler.state()["recent"])) < 4 * size


def test_numpy_scalars_are_numbers_and_are_kept_as_plain_ones() -> None:
    options = SamplingOptions(temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float64(0.9), min_p=np.int32(0), seed=np.uint8(7))
    assert options == SamplingOptions(temperature=0.5, top_k=3, top_p=0.9, min_p=0, seed=7)
    assert {type(value) for value in dataclasses.asdict(options).values()} <= {int, float}
    for wrong in ({"top_k": np.float64(3)}, {"seed": np.True_}, {"temperature": np.float32("nan")}, {"top_k": np.int64(-1)}):
        with pytest.raises(InputError, match=f"^{next(iter(wrong))}="):
            SamplingOptions(**wrong)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99, 0.9999])
def test_the_nucleus_of_a_few_likely_tokens_is_that_of_a_sort(top_p: float) -> None:
    """The likely ones are picked out first; thousands of others, whose sum is near what may be left out, are never looked at again."""
    rng = np.random.default_rng(9)
    for likely in (1, 20, 120):
        logits = rng.standard_normal(4096).astype(np.float32)
        logits[rng.choice(4096, likely, replace=False)] += np.float32(11)
        got = Sampler(SamplingOptions(1.0, top_p=top_p), 4096).probabilities(logits)
        exact = np.exp(logits.astype(np.float64) - logits.max())
        order = np.argsort(-exact, kind="stable")
        size = int(np.searchsorted(np.cumsum(exact[order]), top_p * exact.sum())) + 1
        assert np.flatnonzero(got).tolist() == sorted(order[:size].tolist())
