"""Random maps that protect data: before, inside and after an algorithm.

An algorithm becomes private by what is done to its data first and to its output last,
``post(algorithm(pre(data)))``; what comes after never weakens a guarantee as long as it
does not look at the data (Jung, Prop. 9.1). How much noise to add is in `calibration`.

The noise is drawn in floating point, which is fine for experiments and not for
releases: its last bits can give away what it hides (Mironov, "On Significance of the
Least Significant Bits for Differential Privacy", CCS 2012).

References:
  Jung, "Federated Learning: From Theory to Practice", Section 9.2.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from fedjax_core import check, random
from fedjax_core.arrays import is_known
from fedjax_core.types import Key, PyTree

Stage = Callable[[Key, Any], Any]
"""A step of `concatenate`: of a key and its input."""


def add_gaussian(key: Key, tree: PyTree, sigma: jax.Array | float) -> PyTree:
    """Adds independent normal noise to every entry (Jung, (181)); dtypes stay.

    Its standard deviation sigma is > 0 (leave the noise out instead) and may be traced.

    Raises:
      TypeError: a leaf is not of float32 or float64. Halves are multiples of so large
        a step that small noise is rounded away, and what is left tells what it hides.
    """
    check.positive(sigma=sigma)
    return noise_by_leaf(key, tree, sigma, jax.random.normal)


def add_laplace(key: Key, tree: PyTree, scale: jax.Array | float) -> PyTree:
    """Adds independent noise of density exp(-|x|/b)/(2b) to every entry (Jung, (181)).

    As `add_gaussian`, with the scale b > 0, the standard deviation over sqrt(2).
    """
    check.positive(scale=scale)
    return noise_by_leaf(key, tree, scale, jax.random.laplace)


def noise_by_leaf(key: Key, tree: PyTree, scale: Any, draw: Any) -> PyTree:
    """Adds ``scale * draw(key, shape, dtype)`` to every leaf, with a key for each.

    The scale is one number or an array that broadcasts to the leaves; leaves and errors
    are those of `add_gaussian`.
    """

    def add(leaf, key):
        x = _floats(leaf)
        if jnp.finfo(x.dtype).bits < 32:
            raise TypeError(
                f"noise needs arrays of float32 or float64, got dtype {x.dtype}, which "
                "would round it away: cast them first."
            )
        return x + jnp.asarray(scale, x.dtype) * draw(key, x.shape, x.dtype)

    keys = optax.tree_utils.tree_split_key_like(key, tree)
    return jax.tree.map(add, tree, keys)


def response_probability(num_classes: int, epsilon: float) -> float:
    """How often `randomised_response` tells the truth, e^eps / (e^eps + K - 1)."""
    check_classes(num_classes)
    check.positive(epsilon=epsilon)
    return 1 / (1 + (num_classes - 1) * math.exp(-epsilon))


def randomised_response(
    key: Key, labels: jax.Array, num_classes: int, epsilon: float
) -> jax.Array:
    """Keeps a label with `response_probability`, else takes another one at random.

    Exactly (epsilon, 0)-DP for each label: no answer is more than e^epsilon times as
    likely for one label as for another.

    Args:
      key: PRNG key.
      labels: ints in 0..K-1 of any shape; others are an error outside jit.
      num_classes: K >= 2.
      epsilon: > 0.

    Returns:
      Like `labels`.

    References:
      Kairouz, Oh and Viswanath, "Extremal Mechanisms for Local Differential Privacy",
      JMLR 2016.
    """
    keep = response_probability(num_classes, epsilon)
    labels = _labels(labels, num_classes)
    coin, other = jax.random.split(key)
    wide = jnp.promote_types(labels.dtype, jnp.int32)  # a sum may not fit the labels'
    shift = jax.random.randint(other, labels.shape, 1, num_classes, wide)
    lie = labels.astype(wide) + (shift - num_classes)
    lie = jnp.where(lie < 0, lie + num_classes, lie).astype(labels.dtype)
    return jnp.where(jax.random.bernoulli(coin, keep, labels.shape), labels, lie)


def random_labels(key: Key, labels: jax.Array, num_classes: int) -> jax.Array:
    """Replaces every label by a random element of 0..K-1: (0, 0)-DP for the labels.

    Args and result are those of `randomised_response`.
    """
    labels = _labels(labels, num_classes)
    return jax.random.randint(key, labels.shape, 0, num_classes, labels.dtype)


def replace_features(
    key: Key,
    x: jax.Array,
    probability: jax.Array | float = 1.0,
    matched: Literal["gaussian", "marginals"] = "gaussian",
) -> jax.Array:
    """Replaces rows of features by draws from a distribution matched to them.

    The match looks at the data, so that this hides rows without a guarantee of
    differential privacy.

    Args:
      key: PRNG key.
      x: ``[m, d]`` features, whose dtype stays.
      probability: with which a row is replaced, in [0, 1].
      matched: "gaussian" draws rows from the normal distribution with the mean and
        covariance of `x`; "marginals" draws every entry from its own column, which
        keeps the columns' distributions and loses what ties them.
    """
    check.in_range(0, 1, probability=probability)
    check.one_of(("gaussian", "marginals"), matched=matched)
    x = _floats(x)
    if x.ndim != 2:
        raise ValueError(f"x must have shape (m, d), got {x.shape}.")
    coin, draw = jax.random.split(key)
    if matched == "gaussian":
        mean = x.mean(0, keepdims=True)
        # The symmetric root exists for singular covariances too.
        spread, axes = jnp.linalg.eigh((x - mean).T @ (x - mean) / len(x))
        root = axes * jnp.sqrt(jnp.maximum(spread, 0))[None] @ axes.T
        new = mean + jax.random.normal(draw, x.shape, x.dtype) @ root
    else:
        rows = jax.random.randint(draw, x.shape, 0, len(x))
        new = jnp.take_along_axis(x, rows, 0)
    replaced = jax.random.bernoulli(coin, probability, (len(x), 1))
    return jnp.where(replaced, new, x)


def subsample(key: Key, examples: PyTree, size: int) -> PyTree:
    """Keeps `size` of the m data points at random, without repetition.

    For datasets that differ in one data point this alone is (0, size/m)-DP and no
    better: that point, when kept, is shown as it is. Batches of FedSGD are such
    samples.

    Args:
      key: PRNG key.
      examples: leaves ``[m, ...]``.
      size: in 1..m.

    Returns:
      Leaves ``[size, ...]``, rows in random order.
    """
    check.positive_int(size=size)
    counts = {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(examples)}
    if len(counts) != 1:
        raise ValueError(f"examples must agree in length, got {sorted(counts)}.")
    if size > (num := counts.pop()):
        raise ValueError(f"size must be <= {num}, the data points, got {size}.")
    chosen = jax.random.permutation(key, num)[:size]
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[chosen], examples)


def constant(tree: PyTree, value: float = 0.0) -> PyTree:
    """Replaces every entry by `value`: (0, 0)-DP, and useless."""
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), tree)


def concatenate(*stages: Stage) -> Stage:
    """Chains maps of a key and an input, each with a key of its own.

    ``concatenate(pre, algorithm, post)`` has the guarantee of the algorithm if `pre`
    leaves neighbours neighbours, and that of ``pre`` or ``post`` if these have one
    (Jung, Section 9.2 and Prop. 9.1).
    """

    def run(key: Key, data: Any) -> Any:
        for i, stage in enumerate(stages):
            data = stage(random.stream(key, f"stage {i}"), data)
        return data

    return run


def _floats(x: ArrayLike) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"noise needs floating-point arrays, got dtype {x.dtype}.")
    return x


def check_classes(num_classes: int, dtype: Any = int) -> None:
    """Raises unless K is an int >= 2 and a dtype of ints holds the labels 0..K-1."""
    check.positive_int(num_classes=num_classes)
    if num_classes < 2 or num_classes - 1 > jnp.iinfo(dtype).max:
        raise ValueError(
            f"num_classes must be >= 2 and fit labels of {jnp.dtype(dtype)}, got "
            f"{num_classes}."
        )


def _labels(labels: jax.Array, num_classes: int) -> jax.Array:
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be ints, got dtype {labels.dtype}.")
    check_classes(num_classes, labels.dtype)
    if is_known(labels) and labels.size:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"labels must be in 0..{num_classes - 1}, got {low} to {high}."
            )
    return labels
