"""Sampling: from one row of logits to one token id, with no sort of the vocabulary and no history that grows.

The filters act in this order, each on what the one before left:

1. repetition penalty, on the tokens of the last `repetition_window_tokens`: logit / penalty if positive, logit * penalty if negative
   (CTRL, Keskar et al. 2019, section 4.1; once per distinct token, however often it occurred)
2. temperature: (logit - max) / temperature; temperature 0 ends here with the argmax, the first index on ties
3. top-k: the k largest logits; among equals the lower index stays
4. top-p: the fewest most likely tokens whose probabilities, renormalised after top-k, reach p (nucleus sampling, Holtzman et al. 2020);
   among equals the lower index stays
5. min-p: tokens at least min_p times as likely as the likeliest one

and one token is drawn from what is left by inverting the cumulative distribution in order of token id.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.errors import InputError

# The draw sums this many weights at a time: a running sum over all of V is ten times slower, its additions wait for each other.
_BLOCK = 128
# So many weights are sorted, or summed one after another, rather than halved or taken in blocks: after a step the CPU's caches hold
# nothing of this, and each call waits for its own code.
_SORT_BELOW = 2048
# numpy lists, in 8 bytes each, the places of what it picks out: so that is done only for one in so many weights.
_FEW = 32
# The first guess of how many tokens share what the nucleus leaves out.
_SHARING = 512
# Rounding must not take a weight out of the nucleus.
_BELOW = 1 - 1e-5
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen. The defaults are greedy and deterministic.

    temperature: 0 for greedy, otherwise 0.001 to 1000.
    top_k: tokens kept, 0 for all. top_p: probability kept, in (0, 1], 1 for all. min_p: in [0, 1], 0 for all.
    repetition_penalty: above 0; 1 is off, above 1 discourages.
    repetition_window_tokens: how many of the latest tokens, of the prompt too, the penalty looks at.
    seed: 0 or more; the same seed, logits and options give the same tokens.

    Raises InputError, naming the option, its value and the range it must be in.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = isinstance(field.default, int)
            if isinstance(value, np.integer | np.floating):
                # Options go into snapshots, as JSON; .item() of a whole number stays one.
                value = value.item()
                object.__setattr__(self, field.name, value)
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise InputError(
                    f"{field.name}={value!r} is {type(value).__name__}: give {'a whole number' if whole else 'a number'}, "
                    f"the default is {field.default}"
                )
        # Far outside this range float32 turns the temperature into 0 or infinity, and the logits into NaN.
        _require(self, "temperature", self.temperature == 0 or 1e-3 <= self.temperature <= 1e3, "0 (greedy) or 0.001 to 1000")
        _require(self, "top_k", self.top_k >= 0, "0 (all tokens) or more")
        _require(self, "top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (all tokens)")
        _require(self, "min_p", 0 <= self.min_p <= 1, "0 (all tokens) to 1")
        _require(self, "repetition_penalty", 1e-3 <= self.repetition_penalty <= 1e3, "0.001 to 1000, 1 turns it off")
        _require(self, "repetition_window_tokens", self.repetition_window_tokens >= 1, "1 or more; repetition_penalty=1 is off")
        _require(self, "seed", self.seed >= 0, "0 or more")


@functools.lru_cache(maxsize=64, typed=True)
def _made(**options: Any) -> SamplingOptions:
    return SamplingOptions(**options)


def sampling_options(**options: Any) -> SamplingOptions:
    """SamplingOptions(**options), checked once for equal ones: a loop that samples hands over the same for each token."""
    try:
        made = _made(**options)
    except TypeError:  # what has no hash is no number either, and is told so
        made = None
    return SamplingOptions(**options) if made is None else made


def _require(options: SamplingOptions, name: str, good: bool, wanted: str) -> None:
    if not good:
        raise InputError(f"{name}={getattr(options, name)!r}: must be {wanted}")


class Sampler:
    """Draws tokens for one stream.

    Holds work arrays of 9 bytes times V, allocated here once; a call allocates nothing of that size, except that equal logits at the
    border of top-k or top-p make an array as long as there are of them. Its state is the random generator and the last
    `repetition_window_tokens` tokens.

    Raises InputError for vocab_size < 1.
    """

    def __init__(self, options: SamplingOptions, vocab_size: int) -> None:
        if vocab_size < 1:
            raise InputError(f"vocab_size={vocab_size}: must be 1 or more")
        self.options = options
        self.vocab_size = vocab_size
        self._scores: NDArray[np.float32] = np.empty(vocab_size, np.float32)
        self._scratch: NDArray[np.float32] = np.empty(vocab_size, np.float32)
        self._mask: NDArray[np.bool_] = np.empty(vocab_size, np.bool_)
        self._block_sums: NDArray[np.float64] = np.empty(vocab_size // _BLOCK + 1, np.float64)
        self._recent: NDArray[np.int64] = np.zeros(options.repetition_window_tokens, np.int64)
        self.reset()

    def reset(self) -> None:
        """Back to a new stream: the generator at its seed, no token observed."""
        self._generator = np.random.Generator(np.random.PCG64(self.options.seed))
        self._recent_count = 0
        self._recent_next = 0

    def observe(self, token: int) -> None:
        """Tell the penalty of a token that entered the stream: each of the prompt's, and each that `sample` returned.

        Raises InputError for an id outside [0, V).
        """
        if not 0 <= token < self.vocab_size:
            raise InputError(f"token id {token} is outside the vocabulary [0, {self.vocab_size}): use this model's own tokenizer")
        window = len(self._recent)
        self._recent[self._recent_next] = token
        self._recent_next = (self._recent_next + 1) % window
        self._recent_count = min(self._recent_count + 1, window)

    def forget(self, history: Sequence[int]) -> None:
        """Let the penalty see just the end of `history`, oldest token first: after tokens were taken back, or of a stream under way.

        The random sequence goes on where it is.
        """
        self._recent_count = self._recent_next = 0
        for token in history[-len(self._recent) :]:
            self.observe(token)

    def sample(self, logits: NDArray[np.float32], checked: bool = False) -> int:
        """The next token id. logits: float32 or float16 [V], never modified. Does not observe the token.

        checked: the caller has seen that they are finite, of that shape and dtype, and they are not looked at again.
        Greedy draws nothing from the generator; any other call draws one number.
        Raises InputError for another shape or dtype, and for logits that are not finite.
        """
        if not checked:
            self._check(logits)
        if self.options.temperature == 0:
            return int(self._penalised(logits).argmax())
        ids, weights = self._weigh(logits)
        index = self._draw(weights)
        return index if ids is None else int(ids[index])

    def draws(self, count: int) -> NDArray[np.float64]:
        """The numbers in [0, 1), float64 [count], that as many calls of `sample` would draw, for one who samples in its place.

        Greedy draws nothing: zeros.
        """
        return np.zeros(count) if self.options.temperature == 0 else self._generator.random(count)

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """The distribution float64 [V] that `sample` draws from, 0 for what the filters drop. Changes no state; allocates its result.

        Greedy gives 1 to the argmax. Raises as `sample` does.
        """
        result = np.zeros(self.vocab_size)
        if self.options.temperature == 0:
            result[self.sample(logits)] = 1
            return result
        self._check(logits)
        ids, weights = self._weigh(logits)
        result[slice(None) if ids is None else ids] = weights
        result /= result.sum()
        return result

    def state(self) -> dict[str, Any]:
        """Everything that later tokens depend on beside the options, as plain JSON values. The generator's numbers have up to 128 bits."""
        start = self._recent_next if self._recent_count == len(self._recent) else 0
        return {
            "vocab_size": self.vocab_size,
            "repetition_window_tokens": len(self._recent),
            "recent": np.roll(self._recent, -start)[: self._recent_count].tolist(),
            "generator": self._generator.bit_generator.state,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`. Raises InputError for a damaged or foreign one, and then changes nothing."""
        for name, mine in (("vocab_size", self.vocab_size), ("repetition_window_tokens", len(self._recent))):
            if state.get(name) != mine:
                raise InputError(
                    f"sampler state: {name} is {state.get(name)!r}, this sampler has {mine}; open with the options it was saved with"
                )
        bits = np.random.PCG64(0)
        try:
            bits.state = state["generator"]
            recent = np.asarray(state["recent"], dtype=np.int64)
            sound = recent.ndim == 1 and len(recent) <= len(self._recent) and bool(((recent >= 0) & (recent < self.vocab_size)).all())
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"sampler state: cannot be read ({type(error).__name__}: {error}); use another snapshot or reset") from None
        if not sound:
            raise InputError(
                f"sampler state: recent must be at most {len(self._recent)} ids in [0, {self.vocab_size}), it is of shape {recent.shape}; "
                "use another snapshot or reset"
            )
        self._generator = np.random.Generator(bits)
        self._recent[: len(recent)] = recent
        self._recent_count = len(recent)
        self._recent_next = len(recent) % len(self._recent)

    def _check(self, logits: NDArray[Any]) -> None:
        if logits.shape != (self.vocab_size,) or logits.dtype not in (np.float32, np.float16):
            raise InputError(f"logits: {logits.dtype} {logits.shape}, expected float32 ({self.vocab_size},); hand over one row")
        with np.errstate(over="ignore", invalid="ignore"):
            # What is not finite makes the sum so, too, and no mask has to be written. Finite numbers of a sum that is not are rare.
            if logits.dtype == np.float32 and np.isfinite(logits.sum()):
                return
        if not np.isfinite(logits, out=self._mask).all():
            bad = int(self._mask.argmin())
            raise InputError(
                f"logits: {self.vocab_size - np.count_nonzero(self._mask)} of {self.vocab_size} are not finite, the first is "
                f"{logits[bad]} at id {bad}; no token was drawn: reset the stream, and if it comes back export with cache_dtype fp32"
            )

    def _penalised(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scores [V] with the repetition penalty: the logits themselves, not to be written to, or a copy float32 in the work array."""
        scores, penalty = self._scores, self.options.repetition_penalty
        if penalty == 1 or not self._recent_count:
            return logits
        np.copyto(scores, logits)
        # A token that occurs twice is read twice before either is written: the penalty still acts once.
        recent = self._recent[: self._recent_count]
        old = scores[recent].astype(np.float64)
        scores[recent] = np.clip(np.where(old > 0, old / penalty, old * penalty), -_LARGEST, _LARGEST)
        return scores

    def _weigh(self, logits: NDArray[np.float32]) -> tuple[NDArray[np.intp] | None, NDArray[np.float32]]:
        """Weights float32 [n] of the candidates that top-k leaves, the likeliest 1 and the filtered 0, and their ascending ids [n].

        Without top-k the ids are None, which stands for all: n = V.
        """
        options = self.options
        scores = self._penalised(logits)
        ids: NDArray[np.intp] | None = None
        if 0 < options.top_k < self.vocab_size:
            ids = self._largest(scores, options.top_k)
            scores = scores[ids]
        weights = self._scores[: len(scores)]
        with np.errstate(over="ignore"):  # a difference beyond float32 becomes -inf, and its weight 0
            np.subtract(scores, scores.max(), out=weights, dtype=np.float32)
            weights *= np.float32(1 / options.temperature)
        np.exp(weights, out=weights)
        if options.top_p < 1:
            ids, weights = self._nucleus(ids, weights, options.top_p)
        if options.min_p > 0:
            weights *= np.greater_equal(weights, options.min_p, out=self._mask[: len(weights)])
        return ids, weights

    def _largest(self, scores: NDArray[np.float32], k: int) -> NDArray[np.intp]:
        """Ascending ids [k] of the k largest scores, k < V."""
        blocks = self.vocab_size // _BLOCK
        values: NDArray[np.float32] | None = None
        if k <= blocks:
            # The k-th largest score is no smaller than the largest of each of k parts, so few are left to look among.
            tops = scores[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(axis=0)
            tops.partition(blocks - k)
            above = np.greater_equal(scores, tops[blocks - k], out=self._mask)
            if np.count_nonzero(above) <= self.vocab_size // _FEW:
                values = scores[np.flatnonzero(above)]
        if values is None:
            values = self._scratch
            values[:] = scores
        values.partition(len(values) - k)
        edge = values[len(values) - k]
        ids = np.flatnonzero(np.greater_equal(scores, edge, out=self._mask))
        if len(ids) > k:
            at_edge = np.flatnonzero(scores[ids] == edge)
            ids = np.delete(ids, at_edge[k - len(ids) :])
        return ids

    def _nucleus(
        self, ids: NDArray[np.intp] | None, weights: NDArray[np.float32], top_p: float
    ) -> tuple[NDArray[np.intp] | None, NDArray[np.float32]]:
        """As `_weigh`, of the nucleus: of a peaked distribution only the tokens that may be in it, of a flat one all, the others 0."""
        need = top_p * (total := float(weights.sum(dtype=np.float64)))
        # First as if at most so many tokens shared what may be left out: of a peaked distribution, the tokens above such a share reach
        # `need` by themselves, and the nucleus is among them. All tokens up to the V-th part of it never add up to more than it.
        for sharing in (_SHARING, len(weights)):
            least = np.float32((1 - top_p) * total / sharing * _BELOW)
            likely = np.greater(weights, least, out=self._mask[: len(weights)])
            if np.count_nonzero(likely) > len(weights) // _FEW:
                break
            places = np.flatnonzero(likely)
            if sharing == len(weights) or weights[places].sum(dtype=np.float64) >= need:
                ids, weights = places if ids is None else ids[places], weights[places]
                break
        smallest, equals = self._nucleus_edge(weights, need)
        keep = self._mask[: len(weights)]
        dropped = np.flatnonzero(np.equal(weights, smallest, out=keep))[equals:]
        np.greater_equal(weights, smallest, out=keep)
        keep[dropped] = False
        weights *= keep
        return ids, weights

    def _nucleus_edge(self, weights: NDArray[np.float32], need: float) -> tuple[np.float32, int]:
        """The smallest of the largest weights that add up to `need`, and how many of the weights equal to it belong.

        A quickselect by mass: split the range in two, and go on in the half in which the running sum from the top crosses what is needed.
        The nucleus itself is never sorted, so a flat distribution costs no more than a peaked one.
        """
        values = self._scratch[: len(weights)]
        values[:] = weights
        low, high, above = 0, len(values), 0.0
        while high - low > _SORT_BELOW:
            middle = (low + high) // 2
            values[low:high].partition(middle - low)
            top = float(values[middle:high].sum(dtype=np.float64))
            if above + top >= need:
                low = middle
            else:
                above += top
                high = middle
        values[low:high].sort()
        running = above + np.cumsum(values[low:high][::-1], dtype=np.float64)
        # Rounding may leave the last running sum a hair below `need`: then the whole range is in the nucleus.
        last = min(int(np.searchsorted(running, need)), high - low - 1)
        smallest = values[high - 1 - last]
        kept = len(values) - (high - 1 - last)
        return smallest, kept - int(np.count_nonzero(np.greater(weights, smallest, out=self._mask[: len(weights)])))

    def _draw(self, weights: NDArray[np.float32]) -> int:
        """An index into weights, each with a probability in proportion to its weight."""
        if len(weights) <= _SORT_BELOW:
            running = np.cumsum(weights, dtype=np.float64)
            return self._crossing(weights, running, self._generator.random() * running[-1])
        whole = len(weights) // _BLOCK
        sums = self._block_sums[: whole + 1]
        np.add.reduce(weights[: whole * _BLOCK].reshape(whole, _BLOCK), axis=1, dtype=np.float64, out=sums[:whole])
        sums[whole] = weights[whole * _BLOCK :].sum(dtype=np.float64)
        np.cumsum(sums, out=sums)
        # random() < 1, so the target is below the last sum; "right" passes over blocks and tokens of weight 0.
        target = self._generator.random() * sums[-1]
        block = int(np.searchsorted(sums, target, side="right"))
        inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
        running = np.cumsum(inside, dtype=np.float64)
        return block * _BLOCK + self._crossing(inside, running, target - (sums[block - 1] if block else 0.0))

    @staticmethod
    def _crossing(weights: NDArray[np.float32], running: NDArray[np.float64], target: float) -> int:
        """The first index whose running sum is above the target: tokens of weight 0 are passed over."""
        index = int(np.searchsorted(running, target, side="right"))
        # A block's sum and its running sum round differently.
        return index if index < len(weights) else int(np.flatnonzero(weights)[-1])
