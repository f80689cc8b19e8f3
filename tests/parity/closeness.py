"""When logits count as equal, and when as loudly different."""

import numpy as np

# Of the largest logit. Both sides compute in float32 and add the same numbers in another order: some hundred roundings of 6e-8 each on
# the way through two layers. 3e-6 was seen on tiny models; a wrong token, position or weight is off by more than 1e-2.
FLOAT32 = 1e-4
LOUD = 100.0
# Where caches are float16: each key and value is rounded by up to 2**-12 of itself, a score of 20 by some 1e-3, a weight by that share of
# it, and an attention that is sharp shows it: 2.1e-3 was seen on tiny models, and twice that where ageing has rounded keys once more.
FLOAT16_CACHES = 3e-3
# Where all but attention, norms and logits is float16: each product's result is rounded by up to 2**-11 of itself. Tiny models show 8e-3
# against float32 with the same weights, transformers in float16 up to 8e-2.
FLOAT16 = 1.2e-2
# bfloat16 keeps 8 bits where float16 keeps 11, so each of its roundings is 2**3 times as far. Tiny models show 1.3e-2 and 3.1e-2.
BFLOAT16_CACHES = 2.4e-2
BFLOAT16 = 9.6e-2


def assert_parity(actual: np.ndarray, expected: np.ndarray, relative: float = FLOAT32, what: str = "logits") -> None:
    """Every entry within `relative` of the largest expected one; both [..., V]. NaN fails."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    error, scale = np.abs(actual - expected), float(np.abs(expected).max())
    assert scale > 1, f"{what}: the largest logit is {scale:.2g}; so small that a wrong graph would look right"
    if not float(error.max()) <= relative * scale:
        first = int(np.argmax(~(error.reshape(-1, error.shape[-1]).max(axis=-1) <= relative * scale)))
        raise AssertionError(
            f"{what}: max error {error.max():.3g}, mean {error.mean():.3g}, first at step {first} of {error.size // error.shape[-1]}; "
            f"largest logit {scale:.3g}, so a tolerance of {error.max() / scale:.2g} would pass, allowed is {relative:.2g}"
        )


def assert_loudly_wrong(actual: np.ndarray, expected: np.ndarray, what: str, times: float = LOUD) -> None:
    """A control: what is wrong must miss the tolerance by a factor of `times`, or the tolerance proves nothing."""
    assert actual.shape == expected.shape
    error, scale = float(np.abs(actual - expected).max()), float(np.abs(expected).max())
    assert not error <= times * FLOAT32 * scale, f"{what} goes unseen: only {error:.3g} off, the largest logit is {scale:.3g}"
