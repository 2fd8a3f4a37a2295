"""Evaluation of a shared model: pooled over all examples, and per client.

Examples are evaluated in full batches whatever client they belong to; every value is
then added up per client. Padding is masked, so averages are exact.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_core import check
from fedjax_core import metrics as metrics_lib
from fedjax_core.data.memmap import gather
from fedjax_core.data.packed import FederatedData, Packed
from fedjax_core.devices import Spec, ship
from fedjax_core.metrics import Mean
from fedjax_core.rounds import replicated
from fedjax_core.types import Batch, Metrics, Params, PyTree

# Rows added up before they join a larger sum, and bytes shipped at once.
_CHUNK_ROWS, _CHUNK_BYTES = 2**16, 2**26

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
    """Evaluates any parameters on one split.

    Args:
      metrics_fn: per-example values.
      packed: the split.
      mesh: devices that share the batches, or None.
      batch_size: examples evaluated at once.
      on_host: leave the examples where they are, memory-mapped perhaps, and ship them
        chunk by chunk in every evaluation. Otherwise the devices hold them all.
    """

    def __init__(
        self,
        metrics_fn: MetricsFn,
        packed: Packed,
        mesh: jax.sharding.Mesh | None = None,
        batch_size: int = 128,
        on_host: bool = False,
    ):
        check.positive_int(batch_size=batch_size)
        n = packed.num_examples
        if n == 0:
            raise ValueError("packed must hold at least one example to evaluate on.")
        self._metrics_fn, self._packed, self._mesh = metrics_fn, packed, mesh
        self._client = np.repeat(
            np.arange(packed.num_clients, dtype=np.int32), packed.sizes
        )
        longest = _CHUNK_ROWS
        if on_host:
            row_bytes = sum(x[:1].nbytes for x in packed.examples.values())
            longest = max(1, min(longest, _CHUNK_BYTES // max(row_bytes, 1)))
        chunks, devices = -(-n // longest), 1 if mesh is None else mesh.size
        self._batch_size = min(batch_size, -(-n // (chunks * devices)))
        self._batches = -(-n // (chunks * self._batch_size * devices)) * devices
        self._chunks = -(-n // (self._batches * self._batch_size))
        self.data = None if on_host else self._ship(0, self._chunks)

    def _ship(self, first: int, count: int) -> tuple:
        """Chunks as batches and their clients, leaves ``[count, batches, B, ...]``."""
        size = self._batches * self._batch_size
        start, end = first * size, (first + count) * size
        rows = np.arange(start, min(end, self._packed.num_examples))
        shape = (count, self._batches, self._batch_size)

        def lay_out(x: np.ndarray) -> np.ndarray:
            out = np.empty((end - start, *x.shape[1:]), x.dtype)
            gather(x, rows, out[: len(rows)])
            out[len(rows) :] = out[len(rows) - 1]  # filled up with the last example
            return out.reshape(*shape, *x.shape[1:])

        batch = {k: lay_out(x) for k, x in self._packed.examples.items()}
        mask = np.arange(end - start) < len(rows)
        batch |= {"example_mask": mask.reshape(shape)}
        data = (batch, lay_out(self._client))
        spec = Spec(None, "clients")
        return ship(data, self._mesh, jax.tree.map(lambda _: spec, data))

    def chunks(self) -> Iterator[tuple]:
        """The split in pieces for `sums`; all of it at once unless `on_host`."""
        if self.data is not None:
            yield self.data
            return
        for chunk in range(self._chunks):
            yield self._ship(chunk, 1)

    def sums(self, params: Params, data: tuple) -> dict[str, Mean]:
        """Numerators and denominators by client, ``[N]`` each; they add over chunks."""

        def values(params, batches):
            def one(batch):
                mask = batch["example_mask"]
                means = {
                    k: v if isinstance(v, Mean) else Mean(v, jnp.ones_like(mask))
                    for k, v in self._metrics_fn(params, batch).items()
                }
                return jax.tree.map(
                    lambda v: jnp.where(mask, v.astype(jnp.float32), 0.0), means
                )

            return lax.map(one, batches)

        if self._mesh is not None:
            values = jax.shard_map(
                values,
                mesh=self._mesh,
                in_specs=(Spec(), Spec("clients")),
                out_specs=Spec("clients"),
                check_vma=False,
            )
        num_clients = self._packed.num_clients

        def chunk(batches, client):
            by_client = jax.tree.map(
                lambda x: jax.ops.segment_sum(x.ravel(), client.ravel(), num_clients),
                values(params, batches),
            )
            # Or XLA adds the examples to the running totals after all.
            return lax.optimization_barrier(by_client)

        # Chunk by chunk: adding one by one, a float32 stands still at 2^24.
        zeros = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype),
            jax.eval_shape(chunk, *jax.tree.map(lambda x: x[0], data)),
        )
        return lax.scan(
            lambda total, piece: (jax.tree.map(jnp.add, total, chunk(*piece)), None),
            zeros,
            data,
        )[0]

    def __call__(self, params: Params, data: tuple | None = None) -> Evaluation:
        """Evaluates `params`; traceable when given ``evaluator.data``."""
        pieces = self.chunks() if data is None else [data]
        sums = (self.sums(params, piece) for piece in pieces)
        return _averages(functools.reduce(_add, sums))


def _averages(sums: dict[str, Mean]) -> Evaluation:
    per_client = metrics_lib.values(sums)
    counted = {k: m.count > 0 for k, m in sums.items()}
    return Evaluation(
        metrics_lib.values(metrics_lib.total(sums)),
        {k: jnp.mean(v, where=counted[k]) for k, v in per_client.items()},
        {k: _p10(v, where=counted[k]) for k, v in per_client.items()},
        per_client,
    )


def _add(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, a, b)


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
    on_host: bool = False,
) -> Callable[[Params], tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Evaluation of S models, leaves ``[S, ...]``, on those of `splits` that there are.

    Args:
      metrics_fn: per-example values.
      data: the population.
      splits: names of splits.
      mesh: devices that share the batches, or None.
      on_host: leave the examples on the host, see `Evaluator`.

    Returns:
      ``params -> (scalars, per_client)``: name -> ``[S]`` and name -> ``[S, N]``, with
      names as in "test_accuracy".
    """
    evaluators = {
        name: Evaluator(metrics_fn, data.splits[name], mesh, on_host=on_host)
        for name in splits
        if name in data.splits and data.splits[name].num_examples
    }
    jit = functools.partial(jax.jit, out_shardings=replicated(mesh))

    def over_models(evaluator: Evaluator) -> Callable:
        return jit(lambda p, piece: lax.map(lambda q: evaluator.sums(q, piece), p))

    sums = {name: over_models(evaluator) for name, evaluator in evaluators.items()}
    add, averages = jit(_add), jit(lambda sums: lax.map(_averages, sums))

    def run(params):
        scalars, per_client = {}, {}
        for name, evaluator in evaluators.items():
            pieces = (sums[name](params, piece) for piece in evaluator.chunks())
            out = averages(functools.reduce(add, pieces))
            scalars |= out.named(name)
            per_client |= {f"{name}_{k}": v for k, v in out.per_client.items()}
        return jax.tree.map(np.asarray, (scalars, per_client))

    return run
