"""Evaluation of a shared model: pooled over all examples, and per client.

Examples are evaluated in full batches whatever client they belong to; every value is
then added up per client. Padding is masked, so averages are exact.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_core import check
from fedjax_core import metrics as metrics_lib
from fedjax_core.data import FederatedData, Packed
from fedjax_core.devices import Spec, ship
from fedjax_core.metrics import Mean
from fedjax_core.rounds import replicated
from fedjax_core.types import Batch, Metrics, Params

MetricsFn = Callable[[Params, Batch], Mapping[str, jax.Array | Mean]]
"""``metrics_fn(params, batch)``: name -> one value per example, ``[B]``, or a `Mean` of
what each example adds to numerator and denominator, ``[B]`` both."""


class Evaluation(NamedTuple):
    """Averages of one split.

    Attributes:
      pooled: name -> ``[]``, the mean over all examples (of a `Mean`, over all that its
        denominator counts).
      client_mean: name -> ``[]``, the mean over clients of each client's own mean;
        clients without an example do not count.
      client_p10: name -> ``[]``, the 10th percentile over those clients.
      per_client: name -> ``[N]``, each client's mean, NaN without an example.
    """

    pooled: Metrics
    client_mean: Metrics
    client_p10: Metrics
    per_client: Metrics

    def named(self, split: str) -> Metrics:
        """The scalars as "test_accuracy", "test_accuracy_client_mean", ..."""
        return {
            f"{split}_{name}{suffix}": value
            for suffix, metrics in (
                ("", self.pooled),
                ("_client_mean", self.client_mean),
                ("_client_p10", self.client_p10),
            )
            for name, value in metrics.items()
        }


class Evaluator:
    """Evaluates any parameters on one split, whose examples it keeps on the devices.

    Args:
      metrics_fn: per-example values.
      packed: the split.
      mesh: devices that share the batches, or None.
      batch_size: examples evaluated at once.
    """

    def __init__(
        self,
        metrics_fn: MetricsFn,
        packed: Packed,
        mesh: jax.sharding.Mesh | None = None,
        batch_size: int = 128,
    ):
        check.positive_int(batch_size=batch_size)
        if packed.num_examples == 0:
            raise ValueError("packed must hold at least one example to evaluate on.")
        self._metrics_fn, self._mesh = metrics_fn, mesh
        self._num_clients = packed.num_clients
        n, devices = packed.num_examples, 1 if mesh is None else mesh.size
        batch_size = min(batch_size, -(-n // devices))
        batches = -(-n // (batch_size * devices)) * devices

        def lay_out(x: np.ndarray) -> np.ndarray:
            # The last batch is filled up with copies of the last example.
            index = np.minimum(np.arange(batches * batch_size), n - 1)
            return x[index].reshape(batches, batch_size, *x.shape[1:])

        client = np.repeat(np.arange(packed.num_clients), packed.sizes)
        mask = np.arange(batches * batch_size) < n
        batch = {k: lay_out(x) for k, x in packed.examples.items()} | {
            "example_mask": mask.reshape(batches, batch_size)
        }
        spec = Spec("clients")
        self.data = ship(batch, mesh, jax.tree.map(lambda _: spec, batch))
        self.data = (self.data, ship(lay_out(client.astype(np.int32)), mesh))

    def __call__(self, params: Params, data: tuple | None = None) -> Evaluation:
        """Evaluates `params`; traceable when given ``evaluator.data``."""
        batches, client = self.data if data is None else data

        def run(params, batches):
            def one(batch):
                mask = batch["example_mask"]
                means = {
                    k: v if isinstance(v, Mean) else Mean(v, jnp.ones_like(mask))
                    for k, v in self._metrics_fn(params, batch).items()
                }
                return jax.tree.map(
                    lambda v: jnp.where(mask, v.astype(jnp.float32), 0.0), means
                )

            return jax.lax.map(one, batches)

        if self._mesh is not None:
            run = jax.shard_map(
                run,
                mesh=self._mesh,
                in_specs=(Spec(), Spec("clients")),
                out_specs=Spec("clients"),
                check_vma=False,
            )
        values = run(params, batches)

        def by_client(x: jax.Array) -> jax.Array:
            return jax.ops.segment_sum(x.ravel(), client.ravel(), self._num_clients)

        sums = jax.tree.map(by_client, values)
        per_client = metrics_lib.values(sums)
        counted = {k: sums[k].count > 0 for k in sums}
        return Evaluation(
            metrics_lib.values(metrics_lib.total(sums)),
            {k: jnp.mean(v, where=counted[k]) for k, v in per_client.items()},
            {k: _p10(v, where=counted[k]) for k, v in per_client.items()},
            per_client,
        )


def _p10(values, where):
    # A diverged model's NaN must show, so only clients without examples are left out.
    n = where.sum()
    ordered = jnp.sort(jnp.where(where, values, jnp.inf))
    at = 0.1 * (n - 1)
    low = jnp.floor(at).astype(n.dtype)
    low, high = ordered[low], ordered[jnp.minimum(low + 1, n - 1)]
    quantile = low + (high - low) * (at - jnp.floor(at))
    return jnp.where(jnp.any(jnp.isnan(values) & where), jnp.nan, quantile)


def evaluate(metrics_fn: MetricsFn, params: Params, packed: Packed) -> Evaluation:
    """Evaluates one model on one split; compiled once per call."""
    evaluator = Evaluator(metrics_fn, packed)
    return jax.jit(evaluator)(params, evaluator.data)


def compile_evaluation(
    metrics_fn: MetricsFn,
    data: FederatedData,
    splits: Sequence[str],
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[[Params], tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Evaluation of S models, leaves ``[S, ...]``, on those of `splits` that there are.

    Returns:
      ``params -> (scalars, per_client)``: name -> ``[S]`` and name -> ``[S, N]``, with
      names as in "test_accuracy".
    """
    evaluators = {
        name: Evaluator(metrics_fn, data.splits[name], mesh)
        for name in splits
        if name in data.splits and data.splits[name].num_examples
    }
    examples = {name: e.data for name, e in evaluators.items()}

    @functools.partial(jax.jit, out_shardings=replicated(mesh))
    def run(params, examples):
        def one(params):
            scalars, per_client = {}, {}
            for name, evaluator in evaluators.items():
                out = evaluator(params, examples[name])
                scalars |= out.named(name)
                per_client |= {f"{name}_{k}": v for k, v in out.per_client.items()}
            return scalars, per_client

        return jax.lax.map(one, params)

    return lambda params: jax.tree.map(np.asarray, run(params, examples))
