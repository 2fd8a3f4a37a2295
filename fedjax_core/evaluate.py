"""Evaluation of a shared model: pooled over all examples, and per client.

Examples are evaluated in full batches whatever client they belong to; what they add to
each metric is added up per client. Padding is masked, so averages are exact.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fedjax_core import check
from fedjax_core import metrics as metrics_lib
from fedjax_core.arrays import along_rows
from fedjax_core.data.memmap import gather
from fedjax_core.data.packed import FederatedData, Packed
from fedjax_core.devices import Spec, ship
from fedjax_core.execution import batch_shapes
from fedjax_core.metrics import Mean
from fedjax_core.rounds import replicated
from fedjax_core.types import Batch, Metrics, Params

# Rows added up before they join a larger sum, and bytes shipped at once.
_CHUNK_ROWS, _CHUNK_BYTES = 2**16, 2**26

MetricsFn = Callable[[Params, Batch], Mapping[str, Any]]
"""``metrics_fn(params, batch)``: name -> one value per example, ``[B]``; or a `Mean` of
what each example adds to numerator and denominator, ``[B]`` both; or any other summand
of `fedjax_core.metrics` with leaves ``[B, ...]``, what each example adds to them."""

ClientSummaries = Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]]
"""Name -> ``(values, counts) -> []``, see `fedjax_core.metrics`; traced."""

Scalars = dict[str, np.ndarray]
"""Name -> ``[S]``, or per client ``[S, N]``."""


class Evaluation(NamedTuple):
    """Averages of one split.

    Attributes:
      pooled: name -> ``[]``, the mean over all examples (of a `Mean`, over all that its
        denominator counts; of another summand, its value over all examples).
      client_mean: name -> ``[]``, the mean over clients of each client's own value;
        clients without an example do not count.
      client_p10: name -> ``[]``, the 10th percentile over those clients.
      per_client: name -> ``[N]``, each client's value, NaN without an example.
      summaries: name and client summary, as in "accuracy_gini" -> ``[]``.
    """

    pooled: Metrics
    client_mean: Metrics
    client_p10: Metrics
    per_client: Metrics
    summaries: Metrics

    def named(self, split: str) -> Metrics:
        """The scalars as "test_accuracy", "test_accuracy_client_mean", ..."""
        return {
            f"{split}_{name}{suffix}": value
            for suffix, metrics in (
                ("", self.pooled),
                ("_client_mean", self.client_mean),
                ("_client_p10", self.client_p10),
                ("", self.summaries),
            )
            for name, value in metrics.items()
        }


class Evaluator:
    """Adds up the metrics of any model over one split, client by client.

    Arguments are as in `compile_evaluation`. Examples that stay on the host,
    memory-mapped perhaps, are shipped chunk by chunk in every evaluation; otherwise the
    devices hold them all.
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
        self._data = None if on_host else self._ship(0, self._chunks)

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

    def sums(self, params: Params, data: tuple) -> Metrics:
        """Sums of one model over some `pieces`, leaves ``[N, ...]``; traceable."""
        zeros = zero_sums(self._metrics_fn, params, self._packed, self._batch_size)
        by_client = jax.tree.map(
            lambda x: jnp.zeros((self._packed.num_clients, *x.shape), x.dtype), zeros
        )

        def chunk(params, batches, client):
            def add(sums, piece):
                batch, client = piece
                values = per_example(self._metrics_fn, params, batch)
                return jax.tree.map(lambda s, v: s.at[client].add(v), sums, values), ()

            sums, _ = lax.scan(add, by_client, (batches, client))
            return sums if self._mesh is None else lax.psum(sums, "clients")

        if self._mesh is not None:
            chunk = jax.shard_map(
                chunk,
                mesh=self._mesh,
                in_specs=(Spec(), Spec("clients"), Spec("clients")),
                out_specs=Spec(),
                check_vma=False,
            )

        # Chunk by chunk: adding one by one, a float32 stands still at 2^24.
        def add_chunk(total, piece):
            # Or XLA adds the examples to the running totals after all.
            sums = lax.optimization_barrier(chunk(params, *piece))
            return optax.tree.add(total, sums), ()

        return lax.scan(add_chunk, by_client, data)[0]

    def pieces(self) -> Iterator[tuple]:
        """The split in pieces, whose sums add; all of it at once unless `on_host`."""
        if self._data is not None:
            return iter([self._data])
        return (self._ship(chunk, 1) for chunk in range(self._chunks))


_add = jax.jit(optax.tree.add)


def per_example(metrics_fn: MetricsFn, params: Params, batch: Batch) -> Metrics:
    """What each example adds to every metric: summands with leaves ``[B, ...]``.

    Leaves are at least float32, and 0 where an example is masked.

    Raises:
      ValueError: a metric has not one value per example, or a leaf not one row.
      TypeError: a metric has a value but no count.
    """
    mask = batch["example_mask"]

    def masked(x):
        return jnp.where(along_rows(mask, x), metrics_lib.wide(x), 0)

    out = {}
    for name, metric in metrics_fn(params, batch).items():
        if not hasattr(metric, "value"):
            metric = Mean(jnp.asarray(metric), jnp.ones_like(mask))
        elif callable(getattr(metric, "count", len)):  # a tuple's own method
            raise TypeError(
                f"metrics_fn must return values with a count for {name!r}, got "
                f"{type(metric).__name__}."
            )
        for x in jax.tree.leaves(metric):
            shape = jnp.shape(x)
            if shape[:1] != mask.shape or (isinstance(metric, Mean) and shape[1:]):
                raise ValueError(
                    f"metrics_fn must return one value per example, shape "
                    f"{mask.shape}, got shape {shape} for {name!r}."
                )
        out[name] = jax.tree.map(masked, metric)
    return out


def zero_sums(
    metrics_fn: MetricsFn, params: Params, packed: Packed, batch_size: int
) -> Metrics:
    """Sums over no example of `packed`, in the structure of `per_example`."""
    adds = functools.partial(per_example, metrics_fn)
    shapes = jax.eval_shape(adds, params, batch_shapes(packed, batch_size))
    return jax.tree.map(lambda s: jnp.zeros(s.shape[1:], s.dtype), shapes)


def averages(sums: Metrics, client_summaries: ClientSummaries) -> Evaluation:
    """What sums of one model by client, leaves ``[N, ...]``, come to.

    Raises:
      ValueError: a metric or a summary has several values.
    """
    per_client = metrics_lib.values(sums)
    for name, values in per_client.items():
        if values.ndim != 1:
            raise ValueError(
                f"metrics_fn must return summands with one value, got shape "
                f"{values.shape[1:]} for {name!r}."
            )

    def summary(f):
        return {k: f(v, sums[k].count) for k, v in per_client.items()}

    summaries = {
        f"{name}_{suffix}": value
        for suffix, f in client_summaries.items()
        for name, value in summary(f).items()
    }
    for name, value in summaries.items():
        if jnp.shape(value):
            raise ValueError(
                f"client_summaries must return one number, got shape {value.shape} for "
                f"{name!r}."
            )
    return Evaluation(
        metrics_lib.values(metrics_lib.total(sums)),
        summary(metrics_lib.client_mean),
        summary(metrics_lib.client_p10),
        per_client,
        summaries,
    )


def check_evaluation(
    metrics_fn: MetricsFn,
    params: Params,
    packed: Packed,
    client_summaries: ClientSummaries,
) -> None:
    """Raises what an evaluation would, from shapes alone."""

    def of_one_client(params):
        sums = zero_sums(metrics_fn, params, packed, 2)
        return averages(jax.tree.map(lambda x: x[None], sums), client_summaries)

    jax.eval_shape(of_one_client, params)


def evaluate(
    metrics_fn: MetricsFn,
    params: Params,
    packed: Packed,
    client_summaries: ClientSummaries | None = None,
) -> Evaluation:
    """Evaluates one model on one split; compiled once per call."""
    if client_summaries is not None:
        check.functions(client_summaries=client_summaries)
    evaluator = Evaluator(metrics_fn, packed)
    sums = jax.jit(evaluator.sums)(params, *evaluator.pieces())
    # A NaN here marks a client without examples; those of a model are in the sums.
    with jax.debug_nans(False):
        return jax.jit(lambda sums: averages(sums, client_summaries or {}))(sums)


def compile_averages(
    mesh: jax.sharding.Mesh | None, client_summaries: ClientSummaries
) -> Callable[[Metrics], Evaluation]:
    """``sums -> Evaluation`` of S models: leaves ``[S, N, ...]`` to ``[S, ...]``."""
    of_models = jax.jit(
        lambda sums: lax.map(lambda s: averages(s, client_summaries), sums),
        out_shardings=replicated(mesh),
    )

    def run(sums):
        with jax.debug_nans(False):  # as in `evaluate`
            return of_models(sums)

    return run


def compile_evaluation(
    metrics_fn: MetricsFn,
    data: FederatedData,
    splits: Sequence[str],
    mesh: jax.sharding.Mesh | None = None,
    on_host: bool = False,
    client_summaries: ClientSummaries | None = None,
) -> Callable[[Params], tuple[Scalars, Scalars]]:
    """Evaluation of S models, leaves ``[S, ...]``, on those of `splits` that there are.

    Args:
      metrics_fn: what to measure.
      data: the population.
      splits: names of splits.
      mesh: devices that share the batches, or None.
      on_host: leave the examples on the host, see `Evaluator`.
      client_summaries: what to say of every metric besides its mean and 10th percentile
        over clients; {"gini": metrics.gini} gives "test_accuracy_gini".

    Returns:
      ``params -> (scalars, per_client)``: name -> ``[S]`` and name -> ``[S, N]``, with
      names as in "test_accuracy".
    """

    def compiled_sums(split: Packed) -> Callable[[Params], Metrics]:
        evaluator = Evaluator(metrics_fn, split, mesh, on_host=on_host)
        sums = jax.jit(
            lambda params, piece: lax.map(lambda p: evaluator.sums(p, piece), params),
            out_shardings=replicated(mesh),
        )
        return lambda params: functools.reduce(
            _add, (sums(params, piece) for piece in evaluator.pieces())
        )

    sums = {k: compiled_sums(split) for k, split in filled_splits(data, splits).items()}
    finish = compile_averages(mesh, client_summaries or {})
    return lambda params: named({k: finish(f(params)) for k, f in sums.items()})


def filled_splits(data: FederatedData, splits: Sequence[str]) -> dict[str, Packed]:
    """Those of `splits` that hold an example."""
    found = {name: data.splits[name] for name in splits if name in data.splits}
    return {name: split for name, split in found.items() if split.num_examples}


def named(evaluations: Mapping[str, Evaluation]) -> tuple[Scalars, Scalars]:
    """Scalars and values per client of evaluations by split, on the host."""
    scalars, per_client = {}, {}
    for split, evaluation in evaluations.items():
        scalars |= evaluation.named(split)
        per_client |= {f"{split}_{k}": v for k, v in evaluation.per_client.items()}
    return jax.tree.map(np.asarray, (scalars, per_client))
