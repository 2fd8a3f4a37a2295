"""Metrics that add up: averages over padded, ragged batches come out exact.

A metric is a small pytree, a summand, whose parts add over examples, steps, batches,
clients and devices; `value` is taken once, at the end, and `count` says how much it
rests on. A mean is one; calibration errors and areas under ROC curves, which are no
means over examples, add up by bins.

Client summaries, ``(values, counts) -> []``, describe how a metric is spread over
clients: `values` ``[N]`` is the metric of each, `counts` ``[N]`` what it rests on, 0
for a client to leave out. A NaN of any other client makes the summary NaN.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_core.arrays import wide


class Mean(NamedTuple):
    """A mean kept as its numerator and denominator."""

    total: jax.Array
    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count

    @classmethod
    def of(cls, values: jax.Array, mask: jax.Array) -> "Mean":
        """Collects `values` ``[B]`` where `mask` ``[B]`` is True."""
        values = jnp.where(mask, wide(values), 0.0)
        return cls(values.sum(), wide(mask).sum())

    @classmethod
    def zero(cls) -> "Mean":
        """The mean of nothing."""
        zero = jnp.zeros((), float)  # float64 where that is enabled
        return cls(zero, zero)

    @property
    def value(self) -> jax.Array:
        """The mean; NaN when there was nothing to average."""
        return self.total / jnp.where(self.count > 0, self.count, jnp.nan)

    def __add__(self, other: Any) -> "Mean":  # type: ignore[override]
        return type(self)(self.total + other.total, self.count + other.count)


class Perplexity(Mean):
    """The exponential of a mean: of nats a token, the perplexity of a language model.

    Of a model that takes all K tokens for equally likely it is K.
    """

    @property
    def value(self) -> jax.Array:
        """At least 1 for a mean of at least 0; NaN of nothing to average."""
        return jnp.exp(super().value)


class Sum(NamedTuple):
    """A plain total."""

    total: jax.Array

    @property
    def value(self) -> jax.Array:
        """The total."""
        return self.total


def _add(
    a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The sum of two numbers of two limbs of 32 bits, the higher one first."""
    low = a[1] + b[1]
    return a[0] + b[0] + (low < a[1]).astype(jnp.uint32), low


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Bits:
    """A number of bits below 2^64, exact where there are no 64-bit integers.

    A summand. float32 holds every whole number up to 2^24 only, and one message of a
    model with 10^9 parameters takes 3.2e10 bits. On the host it converts to NumPy and
    compares with numbers.
    """

    high: jax.Array  # [...] uint32, in 2^32
    low: jax.Array  # [...] uint32
    unit: ClassVar[int] = 1

    @classmethod
    def of(cls, number: int | np.integer | jax.Array) -> Self:
        """From an int, of [0, 2^64) bits, or an array of ints in [0, 2^32).

        Raises:
          ValueError: an int outside.
        """
        if isinstance(number, int | np.integer):
            number = int(number) * cls.unit
            if not 0 <= number < 2**64:
                raise ValueError(f"number must be in [0, 2**64) bits, got {number}.")
            return cls(jnp.uint32(number >> 32), jnp.uint32(number % 2**32))
        low = jnp.asarray(number).astype(jnp.uint32)
        return cls(jnp.zeros_like(low), low) * cls.unit

    def as_bytes(self) -> "Bytes":
        """The same amount, read as bytes."""
        return Bytes(self.high, self.low)

    def __add__(self, other: "Bits | int | np.integer | jax.Array") -> Self:
        other = other if isinstance(other, Bits) else self.of(other)
        high, low = _add((self.high, self.low), (other.high, other.low))
        return dataclasses.replace(self, high=high, low=low)

    __radd__ = __add__

    def __mul__(self, times: int | np.integer | jax.Array) -> Self:
        """So many times as much; `times` in [0, 2^32)."""
        half = jnp.uint32(2**16 - 1)
        if isinstance(times, np.integer):
            times = int(times)  # which JAX checks to fit
        times = jnp.asarray(times, jnp.uint32)
        a, b, c, d = self.low >> 16, self.low & half, times >> 16, times & half
        middle = (b * d >> 16) + (a * d & half) + (b * c & half)
        carry = a * c + (a * d >> 16) + (b * c >> 16) + (middle >> 16)
        high = self.high * times + carry
        return dataclasses.replace(self, high=high, low=self.low * times)

    def __rshift__(self, places: int) -> Self:
        """So many times halved, 1 to 31, and rounded down."""
        low = self.high << (32 - places) | self.low >> places
        return dataclasses.replace(self, high=self.high >> places, low=low)

    def sum(self, axis: int = 0) -> Self:
        """The sum over an axis."""
        zero = (jnp.uint32(0), jnp.uint32(0))
        axis = axis % self.ndim
        high, low = jax.lax.reduce((self.high, self.low), zero, _add, (axis,))
        return dataclasses.replace(self, high=high, low=low)

    def minimum(self, other: "Bits") -> Self:
        """The smaller of both."""
        equal = (self.high == other.high) & (self.low < other.low)
        less = (self.high < other.high) | equal
        high = jnp.where(less, self.high, other.high)
        return type(self)(high, jnp.where(less, self.low, other.low))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        high = np.asarray(self.high).astype(np.uint64)
        number = (high << np.uint64(32)) | np.asarray(self.low).astype(np.uint64)
        # A float64 holds eighths of up to 2^50 bytes.
        number = number if self.unit == 1 else number / self.unit
        return np.asarray(number, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers."""
        return self.low.shape

    @property
    def ndim(self) -> int:
        """Axes."""
        return self.low.ndim

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __eq__(self, other: object) -> Any:
        return np.asarray(self) == np.asarray(other)

    def __lt__(self, other: Any) -> Any:
        return np.asarray(self) < np.asarray(other)

    def __gt__(self, other: Any) -> Any:
        return np.asarray(self) > np.asarray(other)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Bytes(Bits):
    """A number of bytes that is exact to the bit, see `Bits`."""

    unit: ClassVar[int] = 8


class CalibrationError(NamedTuple):
    r"""The expected calibration error (ECE), by bins of confidence.

    With :math:`n_b` of :math:`n` examples in bin :math:`b`, the share of them that are
    right and their mean confidence,

    .. math::

      \mathrm{ECE} = \sum_b \frac{n_b}{n} |\mathrm{acc}_b - \mathrm{conf}_b| .

    Over few examples it is far above 0 even for a calibrated classifier.

    References:
      Guo et al., "On Calibration of Modern Neural Networks", ICML 2017, eq. 3 and 5.
    """

    gap: jax.Array  # [..., bins], sum of right minus confidence
    hits: jax.Array  # [..., bins], examples

    @classmethod
    def per_example(
        cls, confidence: jax.Array, correct: jax.Array, bins: int = 15
    ) -> "CalibrationError":
        """What each example adds, leaves ``[B, bins]``.

        Args:
          confidence: ``[B]`` in [0, 1], the probability of the predicted class.
          correct: ``[B]`` bool or 0 and 1, whether it is the true class.
          bins: of equal width, closed on the right.
        """
        place = jnp.clip(jnp.ceil(confidence * bins) - 1, 0, bins - 1)
        hits = jax.nn.one_hot(place.astype(jnp.int32), bins)
        return cls(hits * (wide(correct) - wide(confidence))[:, None], hits)

    @classmethod
    def per_batch(
        cls,
        confidence: jax.Array,
        correct: jax.Array,
        mask: jax.Array,
        size: int = 10,
        bins: int = 15,
    ) -> Mean:
        """The mean of the errors of `size` examples at a time, as some papers have it.

        It says little: of tens, classifiers that are calibrated have one of about 0.3.
        Where an evaluation mixes clients, tens may do so as well.

        Args:
          confidence: as in `per_example`, as is `correct`.
          correct: see there.
          mask: ``[B]`` bool, False for padding.
          size: examples of a small batch; the last one of B may be short.
          bins: as in `per_example`.

        Returns:
          What each example adds, leaves ``[B]``: the error of its small batch.
        """
        each = jax.tree.map(
            lambda x: jnp.where(mask[:, None], x, 0),
            cls.per_example(confidence, correct, bins),
        )

        def small(x):
            x = jnp.pad(x, ((0, -len(x) % size), (0, 0)))
            return x.reshape(-1, size, x.shape[1]).sum(1)

        errors = cls(small(each.gap), small(each.hits)).value
        errors = jnp.where(mask, jnp.repeat(errors, size)[: len(mask)], 0)
        return Mean(errors, jnp.ones_like(errors))

    @property
    def count(self) -> jax.Array:  # type: ignore[override]
        """``[...]``, examples."""
        return self.hits.sum(-1)

    @property
    def value(self) -> jax.Array:
        """The error, ``[...]`` in [0, 1]; NaN without an example."""
        return Mean(jnp.abs(self.gap).sum(-1), self.count).value


class MaximumCalibrationError(CalibrationError):
    """The largest gap of a bin that holds an example (MCE), see `CalibrationError`."""

    @property
    def value(self) -> jax.Array:
        """The error, ``[...]`` in [0, 1]; NaN without an example."""
        gaps = jnp.abs(self.gap) / jnp.maximum(self.hits, 1)
        return jnp.where(self.count > 0, gaps.max(-1), jnp.nan)


class AUROC(NamedTuple):
    """The area under the ROC curve of a binary label, by bins of scores.

    The chance that a random positive scores above a random negative, ties counting
    half. Scores in the same bin tie, so it is off by at most half the share of
    (positive, negative) pairs that share one.

    References:
      Hanley and McNeil, "The Meaning and Use of the Area under a ROC Curve",
      Radiology 143, 1982.
    """

    positives: jax.Array  # [..., bins]
    negatives: jax.Array  # [..., bins]

    @classmethod
    def per_example(
        cls,
        scores: jax.Array,
        labels: jax.Array,
        bins: int = 256,
        low: float = -16.0,
        high: float = 16.0,
    ) -> "AUROC":
        """What each example adds, leaves ``[B, bins]``.

        Args:
          scores: ``[B]``, larger where the label is more likely.
          labels: ``[B]``, 1 for a positive, 0 for a negative; any other number marks
            an example whose label is not known.
          bins: of equal width, for every client a model is evaluated on.
          low: where they start; scores below are in the first. The defaults suit
            logits.
          high: where they end.
        """
        place = jnp.clip((scores - low) * (bins / (high - low)), 0, bins - 1)
        hits = jax.nn.one_hot(place.astype(jnp.int32), bins)
        hits = jnp.where(jnp.isnan(scores)[:, None], jnp.nan, hits)
        labels = labels[:, None]
        return cls(jnp.where(labels == 1, hits, 0), jnp.where(labels == 0, hits, 0))

    @property
    def count(self) -> jax.Array:  # type: ignore[override]
        """``[...]``, examples; 0 without a positive or without a negative."""
        positives, negatives = self.positives.sum(-1), self.negatives.sum(-1)
        return jnp.where(positives * negatives == 0, 0, positives + negatives)

    @property
    def value(self) -> jax.Array:
        """The area, ``[...]``; NaN without a positive or without a negative."""
        lower = jnp.cumsum(self.negatives, -1) - self.negatives / 2
        wins = (self.positives * lower).sum(-1)
        return Mean(wins, self.positives.sum(-1) * self.negatives.sum(-1)).value


def value(metric: Any) -> jax.Array:
    """Returns the number that a summand or a bare array stands for."""
    return getattr(metric, "value", metric)


def total(metrics: dict[str, Any]) -> dict[str, Any]:
    """Adds up metrics along their leading axis."""
    return jax.tree.map(
        lambda x: x.sum(0), metrics, is_leaf=lambda x: isinstance(x, Bits)
    )


def values(metrics: dict[str, Any]) -> dict[str, jax.Array]:
    """Applies `value` to every entry."""
    return {name: value(metric) for name, metric in metrics.items()}


def client_mean(values: jax.Array, counts: jax.Array) -> jax.Array:
    """The mean over clients, each weighing the same."""
    return jnp.mean(values, where=counts != 0)


def client_p10(values: jax.Array, counts: jax.Array) -> jax.Array:
    """The 10th percentile over clients, interpolated."""
    ordered, n = _ordered(values, counts)
    at = 0.1 * (n - 1)
    low = jnp.floor(at).astype(n.dtype)
    high = jnp.minimum(low + 1, n - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - jnp.floor(at))


def gini(values: jax.Array, counts: jax.Array) -> jax.Array:
    r"""The Gini coefficient over clients, each weighing the same.

    .. math::

      G = \frac{\sum_{ij} |a_i - a_j|}{2 n \sum_i a_i}
        = \frac{\sum_i (2 i - n - 1) a_{(i)}}{n \sum_i a_i}

    It is 0 where all have the same, (n - 1) / n where one has everything and NaN where
    nobody has anything or somebody less than nothing.
    """
    ordered, n = _ordered(values, counts)
    rank = jnp.arange(1, len(values) + 1)
    a = jnp.where(rank <= n, ordered, 0)
    a = jnp.where((a < 0).any(), jnp.nan, a)
    return ((2 * rank - n - 1) * a).sum() / (n * a.sum())


def lowest_decile(values: jax.Array, counts: jax.Array) -> jax.Array:
    """The mean over the tenth of the clients with the lowest values: accuracy's worst.

    A tenth of n clients are ``max(1, n // 10)``; they weigh by their counts.
    """
    there = counts != 0
    order = jnp.lexsort((values, ~there))
    tenth = jnp.maximum(1, there.sum() // 10)
    weights = jnp.where(jnp.arange(len(values)) < tenth, counts[order], 0)
    mean = jnp.where(weights > 0, values[order] * weights, 0).sum() / weights.sum()
    return jnp.where(_any_nan(values, counts), jnp.nan, mean)


def highest_decile(values: jax.Array, counts: jax.Array) -> jax.Array:
    """The mean over the tenth with the highest values, see `lowest_decile`."""
    return -lowest_decile(-values, counts)


def parity_gap(values: jax.Array, counts: jax.Array) -> jax.Array:
    """How far the highest tenth is above the lowest one, see `lowest_decile`."""
    return highest_decile(values, counts) - lowest_decile(values, counts)


def weighted_mean(values: jax.Array, counts: jax.Array) -> jax.Array:
    """The mean over clients by their counts; of accuracy, that over all examples."""
    return jnp.where(counts != 0, values * counts, 0).sum() / counts.sum()


def _ordered(values: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ascending values of the clients that count, others behind; and their number."""
    there = counts != 0
    ordered = jnp.sort(jnp.where(there, values, jnp.inf))
    return jnp.where(_any_nan(values, counts), jnp.nan, ordered), there.sum()


def _any_nan(values: jax.Array, counts: jax.Array) -> jax.Array:
    # A diverged model's NaN must show, so only clients without examples are left out.
    return jnp.any(jnp.isnan(values) & (counts != 0))
