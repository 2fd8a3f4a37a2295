"""Evaluation of the models that clients use themselves, each on its own examples.

Personalised and clustered methods have more than the model of the server. Every client
evaluates its own through `map_clients`, as it would train: models are made one client
at a time, so those of all ``[N, ...]`` exist nowhere.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_core import metrics
from fedjax_core.data.packed import FederatedData, Packed
from fedjax_core.devices import ship, ship_cohort
from fedjax_core.evaluate import (
    ClientSummaries,
    MetricsFn,
    Scalars,
    compile_averages,
    filled_splits,
    named,
    per_example,
    zero_sums,
)
from fedjax_core.feed import with_local_examples
from fedjax_core.map import map_clients
from fedjax_core.personal import Mixtures
from fedjax_core.plan import Capacity, Draft
from fedjax_core.reduce import stack
from fedjax_core.rounds import compiler_options, replicated
from fedjax_core.types import (
    ClientProgram,
    Cohort,
    Execution,
    LocalWork,
    Metrics,
    Params,
    PyTree,
)

OwnModels = Callable[[Any, PyTree], Mapping[str, Params]]
"""``own_models(state, row)``, see `Algorithm`."""

_GROUP = 256  # clients whose rows, or examples, are shipped at once
_BATCH_SIZE = 128  # at most


class _OwnSums:
    """Adds up the metrics of every client's own models over one split.

    Arguments are as in `compile_own_evaluation`.
    """

    def __init__(
        self,
        own_models: OwnModels,
        metrics_fn: MetricsFn,
        packed: Packed,
        execution: Execution,
        on_host: bool,
        rows_on_host: bool,
    ):
        self._packed, self._mesh = packed, execution.mesh
        self._rows_on_host = rows_on_host
        sizes = packed.sizes[packed.sizes > 0]
        # Larger batches would mostly be padding.
        batch_size = min(_BATCH_SIZE, int(np.percentile(sizes, 90)))
        num_clients = packed.num_clients
        size = min(_GROUP, num_clients) if on_host or rows_on_host else num_clients
        self._groups = [
            np.arange(first, min(first + size, num_clients))
            for first in range(0, num_clients, size)
        ]
        work = LocalWork(batch_size=batch_size)
        how = dataclasses.replace(execution, max_steps=0)
        self._drafts = [
            Draft(ids, packed.offsets, work, seed=0, round=0, execution=how)
            for ids in self._groups
        ]
        # The largest group's, so that all share one compiled program.
        needs = [dataclasses.astuple(draft.need) for draft in self._drafts]
        self._capacity = Capacity(*(max(need) for need in zip(*needs, strict=True)))
        self._cohorts = None if on_host else list(map(self._cohort, self._drafts))
        self._sums = jax.jit(
            functools.partial(_sums, _program(own_models, metrics_fn, packed)),
            out_shardings=replicated(self._mesh),
            compiler_options=compiler_options(),
        )

    def _cohort(self, draft: Draft) -> Cohort:
        cohort = draft.build(
            self._capacity, num_clients=self._packed.num_clients, local=True
        )
        cohort = with_local_examples(cohort, draft, self._packed, self._capacity)
        return ship_cohort(cohort, self._mesh)

    def __call__(self, state: PyTree, rows: PyTree) -> Metrics:
        """Sums of S runs, leaves ``[S, N, ...]``."""
        parts, cohorts = [], self._cohorts or map(self._cohort, self._drafts)
        for ids, cohort in zip(self._groups, cohorts, strict=True):
            row, some = np.resize(ids, self._capacity.slots).astype(np.int32), rows
            if self._rows_on_host:
                some = ship(jax.tree.map(lambda x: x[:, row], rows), self._mesh)  # noqa: B023
                row = np.arange(len(row), dtype=np.int32)
            parts.append(self._sums(state, some, ship(row, self._mesh), cohort))
        return _join(parts, self._packed.num_clients)


def _program(
    own_models: OwnModels, metrics_fn: MetricsFn, packed: Packed
) -> ClientProgram:
    """A client that evaluates its own models; its update are the sums.

    `shared` is ``((state, rows, s), i)``: states and rows of all runs, which run, and
    which of its rows is the client's.
    """

    def own(shared):
        (states, rows, s), i = shared
        return own_models(
            jax.tree.map(lambda x: x[s], states), jax.tree.map(lambda x: x[s, i], rows)
        )

    def by_model(f, models):
        names, stacked = models
        if isinstance(names, Mixtures):
            each = _rows(lax.map(lambda k: f(names.at(k)), jnp.array(names.lambdas)))
        elif stacked is None:
            each = map(f, names.values())
        else:  # one program for all of them
            each = _rows(lax.map(f, stacked))
        return {
            f"{name}_{metric}": sums
            for name, of_model in zip(names, each, strict=True)
            for metric, sums in of_model.items()
        }

    def init(shared, client_state, turn):
        models = _stacked(own(shared))
        zeros = by_model(lambda p: zero_sums(metrics_fn, p, packed, 1), models)
        return models, zeros

    def step(shared, carry, batch, turn):
        def sums_of(params):
            return metrics.total(per_example(metrics_fn, params, batch))

        models, sums = carry
        return models, jax.tree.map(jnp.add, sums, by_model(sums_of, models))

    def finish(shared, carry, client_state, turn):
        # A diverged model's NaN is a result, and no reason to leave the client out.
        return carry[1], client_state, {"failure": jnp.int32(0)}

    return ClientProgram(init, step, finish)


def _rows(sums: PyTree) -> list[PyTree]:
    count = len(jax.tree.leaves(sums)[0])
    return [jax.tree.map(lambda x: x[m], sums) for m in range(count)]  # noqa: B023


def _stacked(models: Mapping[str, Params]) -> tuple[Mapping[str, Any], PyTree]:
    """Models by name; if all are of one kind names alone, and leaves ``[M, ...]``."""
    if isinstance(models, Mixtures):
        return models, None
    kinds = {
        (jax.tree.structure(p), *((x.shape, x.dtype) for x in jax.tree.leaves(p)))
        for p in models.values()
    }
    if len(models) == 1 or len(kinds) > 1:
        return models, None
    names = sorted(models)  # as they come back from a carry
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(models[k] for k in names))
    return dict.fromkeys(names), stacked


def _sums(
    program: ClientProgram, states: PyTree, rows: PyTree, row: jax.Array, cohort: Cohort
) -> Metrics:
    def run(s):
        return map_clients(
            program,
            (states, rows, s),
            cohort,
            jax.random.key(0),
            reduce=stack(),
            each=row,
        ).update

    return lax.map(run, jnp.arange(len(jax.tree.leaves(states)[0])))


@functools.partial(jax.jit, static_argnums=1)
def _join(parts: Sequence[Metrics], num_clients: int) -> Metrics:
    """Sums of groups, ``[S, C, ...]``, as those of all clients, ``[S, N, ...]``."""
    return jax.tree.map(
        lambda *xs: jnp.concatenate(xs, axis=1)[:, :num_clients], *parts
    )


def compile_own_evaluation(
    own_models: OwnModels,
    metrics_fn: MetricsFn,
    data: FederatedData,
    splits: Sequence[str],
    execution: Execution,
    on_host: bool = False,
    rows_on_host: bool = False,
    client_summaries: ClientSummaries | None = None,
) -> Callable[[Any, PyTree], tuple[Scalars, Scalars]]:
    """Evaluation of clients' own models, on those of `splits` that there are.

    Args:
      own_models: which models a client has, as in `Algorithm`.
      metrics_fn: what to measure, as in `compile_evaluation`.
      data: the population.
      splits: names of splits.
      execution: blocks and devices.
      on_host: leave the examples on the host and ship them in every evaluation.
      rows_on_host: rows of clients are NumPy arrays; those of some clients are shipped
        at a time.
      client_summaries: as in `compile_evaluation`.

    Returns:
      ``(state, rows) -> (scalars, per_client)``. The state's leaves are ``[S, ...]``,
      without the field `clients`, which is `rows`, ``[S, N, ...]``. Names are as in
      "test_<model>_accuracy", which is pooled: over all examples, each under the model
      of the client that holds it.
    """
    how = execution, on_host, rows_on_host
    sums = {
        name: _OwnSums(own_models, metrics_fn, split, *how)
        for name, split in filled_splits(data, splits).items()
    }
    finish = compile_averages(execution.mesh, client_summaries or {})
    return lambda *of: named({name: finish(f(*of)) for name, f in sums.items()})
