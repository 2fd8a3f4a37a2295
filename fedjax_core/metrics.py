"""Metrics that add up: averages over padded, ragged batches come out exact.

A metric is a small pytree whose parts add over examples, steps, batches, clients and
devices; `value` is taken once, at the end.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Mean(NamedTuple):
    """A mean kept as its numerator and denominator."""

    total: jax.Array
    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count

    @classmethod
    def of(cls, values: jax.Array, mask: jax.Array) -> "Mean":
        """Collects `values` ``[B]`` where `mask` ``[B]`` is True."""
        values = jnp.where(mask, values.astype(jnp.float32), 0.0)
        return cls(values.sum(), mask.sum().astype(jnp.float32))

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
        return Mean(self.total + other.total, self.count + other.count)


class Sum(NamedTuple):
    """A plain total."""

    total: jax.Array

    @property
    def value(self) -> jax.Array:
        """The total."""
        return self.total


def value(metric: Any) -> jax.Array:
    """Returns the number that a `Mean`, a `Sum` or a bare array stands for."""
    return metric.value if isinstance(metric, (Mean, Sum)) else metric


def total(metrics: dict[str, Any]) -> dict[str, Any]:
    """Adds up metrics along their leading axis."""
    return jax.tree.map(lambda x: x.sum(0), metrics)


def values(metrics: dict[str, Any]) -> dict[str, jax.Array]:
    """Applies `value` to every entry."""
    return {name: value(metric) for name, metric in metrics.items()}
