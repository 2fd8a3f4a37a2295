"""Runs a cohort: one client's program over the client axis.

Blocks of clients go through a queue: a loop over blocks, `vmap` inside a block, a loop
to the block's longest client, `finish` once per client, then the reduction. Several
devices work through queues of their own.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_core import metrics as metrics_lib
from fedjax_core import random
from fedjax_core.arrays import along_rows, num_bytes
from fedjax_core.metrics import Bytes, Sum
from fedjax_core.reduce import Arrivals, Cast, Reduction, select
from fedjax_core.types import ClientProgram, Cohort, Key, Metrics, PyTree, Turn

_P = jax.sharding.PartitionSpec

STAGES = ("", "local update", "transform")
"""What `ClientResults.failure` counts: where an update stopped being finite."""


class ClientResults(NamedTuple):
    """What a cohort hands back.

    Attributes:
      update: the reduced update.
      client_state: ``[N, ...]``, rows of the cohort replaced.
      metrics: scalars: the program's metrics over all valid clients, and
        "valid_clients", "num_examples", "excluded_clients", "local_steps" (the sum
        over valid clients), "uplink_bytes" and "downlink_bytes", exact `Bytes`;
        "failure" ``[C]`` is as below, and "idle" ``[]`` bool says that nobody counts
        and no reduction adds noise: then `simulate` keeps the state as it was.
      client_metrics: the program's metrics per client, ``[C]`` each.
      failure: ``[C]`` int32 into `STAGES`: non-zero for a client whose update, state or
        metrics (its loss, say) had a NaN or an infinity. It is excluded from every
        reduction and its state stays as it was.
      valid: ``[C]`` bool, clients that count.
    """

    update: PyTree
    client_state: PyTree
    metrics: Metrics
    client_metrics: Metrics
    failure: jax.Array
    valid: jax.Array


def two_passes(first: ClientResults, second: ClientResults) -> Metrics:
    """The metrics of a round that went over its cohort twice.

    The second pass is meant to leave out clients that the first one excluded,
    ``cohort.only(first.valid)``. Local steps and what clients send add up, a client
    that either pass excludes is excluded, and all else that both have is the second's,
    but for what clients received: they keep it from the first pass.
    """
    failure = jnp.where(first.failure > 0, first.failure, second.failure)
    sums = {
        name: first.metrics[name] + second.metrics[name]
        for name in ("local_steps", "uplink_bytes")
    }
    return (first.metrics | second.metrics | sums) | {
        "excluded_clients": (failure > 0).sum(),
        "downlink_bytes": first.metrics["downlink_bytes"],
        "failure": failure,
    }


def disjoint_passes(passes: Sequence[Metrics]) -> Metrics:
    """The metrics of a round whose clients were in several passes, each in one.

    Counts add up; other averages are over local steps, as the training loss is.
    """
    if len(passes) == 1:
        return passes[0]
    sums = {"valid_clients", "num_examples", "excluded_clients", "local_steps"}
    sums |= {"uplink_bytes", "downlink_bytes", "failure"}
    steps = jnp.stack([metrics["local_steps"] for metrics in passes])
    weights = steps / jnp.maximum(steps.sum(), 1)

    def together(name: str) -> Any:
        values = [metrics[name] for metrics in passes]
        if name in sums:
            return functools.reduce(operator.add, values)
        if name == "idle":
            return jnp.stack(values).all()
        # Where nobody was in a pass its averages are NaN.
        return jnp.where(steps > 0, weights * jnp.stack(values), 0).sum(0)

    return {name: together(name) for name in passes[0]}


def map_clients(
    program: ClientProgram,
    shared: PyTree,
    cohort: Cohort,
    key: Key,
    *,
    reduce: PyTree,
    client_state: PyTree = (),
    each: PyTree = (),
) -> ClientResults:
    """Runs `program` for every client of the cohort and reduces their updates.

    Args:
      program: what one client does.
      shared: what the server broadcasts to all of them.
      cohort: who trains, on what.
      key: the round's key; a client draws from ``fold_in(key, client_id)``.
      reduce: a `Reduction`, or a pytree of them that is a prefix of the update, as in
        ``{"delta": mean("examples"), "control": mean("uniform")}``.
      client_state: leaves ``[N, ...]``, rows by client.
      each: leaves ``[C, ...]``, what the server sends to each client alone. With it the
        program's `shared` is the pair ``(shared, the client's row)``.

    Returns:
      `ClientResults`. Independent, to float tolerance, of block size, devices and the
      order of the cohort.
    """
    client_key = random.stream(key, "client")
    mesh = cohort.execution.mesh
    examples_spec = _P("clients") if cohort.sharded_examples else _P()
    state_spec = _P("clients") if cohort.sharded_state else _P()
    reductions, treedef = jax.tree.flatten(
        reduce, is_leaf=lambda x: isinstance(x, Reduction)
    )
    if not all(isinstance(r, Reduction) for r in reductions):
        raise TypeError(f"reduce must consist of Reductions, got {reduce!r}.")

    def device(shared, queue, cohort, examples, client_state, each):
        queue = jax.tree.map(lambda x: x[0], queue)  # this device's own
        if cohort.sharded_examples:
            examples = jax.tree.map(lambda x: x[0], examples)
        state_row = cohort.state_row
        if cohort.sharded_state and mesh is not None:  # of this device's part
            before = lax.axis_index("clients") * queue.slot.size
            state_row = jnp.maximum(state_row - before, 0)

        def client(slot, row_start, client_state):
            """One client, start to end, and whether its update can be used."""
            key = jax.random.fold_in(client_key, cohort.client_id[slot])
            state = jax.tree.map(lambda s: s[state_row[slot]], client_state)
            steps = jnp.where(
                slot < cohort.num_steps.shape[0], cohort.num_steps[slot], 0
            )
            received = shared
            if jax.tree.leaves(each):
                received = (shared, jax.tree.map(lambda x: x[slot], each))

            def turn(name, step):
                return Turn(
                    random.stream(key, name),
                    cohort.round,
                    step,
                    jnp.maximum(steps, 1),
                    cohort.num_examples[slot],
                )

            carry = program.init(received, state, turn("init", jnp.int32(0)))
            carry = _local_steps(
                program, received, carry, turn("step", jnp.int32(0)), steps, row_start,
                queue.rows, examples, cohort.execution,
            )  # fmt: skip
            update, new, metrics = program.finish(
                received, carry, state, turn("finish", steps)
            )
            failure = metrics.pop("failure", None)
            metrics = {
                "uplink_bytes": Bytes.of(num_bytes(update)),
                "local_steps": Sum(steps.astype(jnp.float32)),
            } | metrics
            if failure is None:
                failure = jnp.where(all_finite((update, new)), 0, 1)
            failure = jnp.where((failure == 0) & ~all_finite(metrics), 1, failure)
            ok = (failure == 0) & (steps > 0)
            update = select(ok, update, jax.tree.map(jnp.zeros_like, update))
            metrics = select(ok, metrics, jax.tree.map(jnp.zeros_like, metrics))
            return update, select(ok, new, state), metrics, failure, ok

        # Asked for its shapes and run, but traced once.
        client = jax.jit(client, inline=True)

        def block(i, carry):
            accs, kept, states, pending = carry
            # A block writes its rows in the next one's turn, when nothing is left that
            # reads the states as they were: then XLA need not copy them all.
            states = _put_rows(states, *pending)
            slot = queue.slot[i]
            if slot.shape[0] == 1:
                # No batch axis of one: products and convolutions stay plain.
                out = client(slot[0], queue.row_start[i, 0], states)
                out = jax.tree.map(lambda x: x[None], out)
            else:
                out = jax.vmap(client, (0, 0, None))(slot, queue.row_start[i], states)
            update, new, metrics, failure, ok = out
            arrivals = Arrivals(
                slot, ok, cohort.num_examples[slot], cohort.num_steps[slot]
            )
            updates = treedef.flatten_up_to(update)
            accs = [
                () if r.stacked else r.add(acc, u, arrivals)
                for r, acc, u in zip(reductions, accs, updates, strict=True)
            ]
            keep = (_stacked(reductions, updates), metrics, failure, ok)
            kept = jax.tree.map(
                lambda buffer, x: lax.dynamic_update_index_in_dim(buffer, x, i, 0),
                kept,
                keep,
            )
            return accs, kept, states, (new, state_row[slot], ok)

        shapes = jax.eval_shape(
            lambda: client(queue.slot[0, 0], queue.row_start[0, 0], client_state)
        )
        updates = treedef.flatten_up_to(shapes[0])
        accs = [
            () if r.stacked else r.identity(u)
            for r, u in zip(reductions, updates, strict=True)
        ]
        lead = queue.slot.shape
        kept = jax.tree.map(
            lambda s: jnp.zeros((*lead, *s.shape), s.dtype),
            (_stacked(reductions, updates), *shapes[2:]),
        )
        last = lead[0] if cohort.execution.max_steps else queue.blocks
        row = state_row[queue.slot[0]]
        pending = (jax.tree.map(lambda s: s[row], client_state), row, row < 0)
        accs, kept, states, pending = lax.fori_loop(
            0, last, block, (accs, kept, client_state, pending)
        )
        states = _put_rows(states, *pending)
        if mesh is not None and not cohort.sharded_state:
            states = _exchange_rows(states, state_row[queue.slot], kept[-1])
        if mesh is not None:
            accs = [
                () if r.stacked else r.merge(acc, "clients")
                for r, acc in zip(reductions, accs, strict=True)
            ]
        slots = lead[0] * lead[1]  # -1 fails for what has no entries
        kept = jax.tree.map(lambda x: x.reshape(slots, *x.shape[2:]), kept)
        return accs, kept, states

    slots = dataclasses.replace(cohort, queue=None, examples=None, public={})
    if mesh is not None:
        device = jax.shard_map(
            device,
            mesh=mesh,
            in_specs=(_P(), _P("clients"), _P(), examples_spec, state_spec, _P()),
            out_specs=(_P(), _P("clients"), state_spec),
            check_vma=False,
        )
    accs, kept, client_state = device(
        shared, cohort.queue, slots, cohort.examples, client_state, each
    )
    # From queue order to cohort order; clients that never ran have no place in it.
    ran = cohort.client_mask
    kept = jax.tree.map(
        lambda x: jnp.where(
            along_rows(ran, x), x[cohort.position], jnp.zeros_like(x[:1])
        ),
        kept,
    )
    stacks, client_metrics, failure, valid = kept
    reduce_key = random.stream(key, "reduce")
    results = []
    for i, r in enumerate(reductions):
        cast = Cast(jax.random.fold_in(reduce_key, i), valid, slots, program.norm_bound)
        results.append(r.finish(stacks.pop(0) if r.stacked else accs[i], cast))
    with jax.debug_nans(False):  # NaN says that there was nothing to average
        metrics = metrics_lib.values(metrics_lib.total(client_metrics))
        client_metrics = metrics_lib.values(client_metrics)
    metrics |= {
        "valid_clients": valid.sum(),
        "num_examples": jnp.where(valid, cohort.num_examples, 0).sum(),
        "excluded_clients": (failure > 0).sum(),
        # Each client receives the broadcast and its own row, dropping out or not.
        "downlink_bytes": _received_bytes(shared, each) * ran.sum(),
        "failure": failure,
        "idle": ~valid.any() & (not any(r.noisy for r in reductions)),
    }
    return ClientResults(
        treedef.unflatten(results),
        client_state,
        metrics,
        client_metrics,
        failure,
        valid,
    )


def _received_bytes(shared: PyTree, each: PyTree) -> Bytes:
    row = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], each))
    return Bytes.of(num_bytes(jax.eval_shape(lambda: shared)) + num_bytes(row))


def _local_steps(program, shared, carry, turn, steps, row_start, rows, examples, how):
    """Takes a client's local steps, however many the data says."""

    def step(t, carry):
        # Masked steps past the client's last repeat that one.
        row = rows[row_start + jnp.minimum(t, jnp.maximum(steps - 1, 0))]
        mask = row >= 0
        # Padding repeats the batch's first example: whatever a model does with it, it
        # is a row of this client and no stranger's NaN.
        row = jnp.where(mask, row, row[0])
        batch = jax.tree.map(lambda x: x[row], examples)
        if how.max_steps:
            # Gradients pass through masked steps too, and zero times NaN is NaN:
            # padding clients see zeros.
            batch = jax.tree.map(lambda x: jnp.where(steps > 0, x, 0), batch)
        batch = dict(batch) | {"example_mask": mask}
        now = turn._replace(key=jax.random.fold_in(turn.key, t), step=t)
        return program.step(shared, carry, batch, now)

    if how.max_steps:
        return lax.fori_loop(
            0,
            how.max_steps,
            lambda t, carry: select(t < steps, step(t, carry), carry),
            carry,
        )
    # Under vmap it runs to the block's longest client; those that are done stay as they
    # are.
    return lax.while_loop(
        lambda s: s[0] < steps,
        lambda s: (s[0] + 1, step(*s)),
        (jnp.int32(0), carry),
    )[1]


def _put_rows(states: PyTree, new: PyTree, row: jax.Array, ok: jax.Array) -> PyTree:
    """The clients' states with those of a block, ``[L, ...]``, in their rows."""
    if row.shape[0] == 1:
        # In place, several times faster on CPU than scattering. A client that does not
        # count puts back what it read.
        return jax.tree.map(
            lambda s, x: lax.dynamic_update_index_in_dim(s, x[0], row[0], 0),
            states,
            new,
        )
    row = jnp.where(ok, row, jnp.iinfo(jnp.int32).max)
    return jax.tree.map(lambda s, x: s.at[row].set(x, mode="drop"), states, new)


def _exchange_rows(states: PyTree, row: jax.Array, ok: jax.Array) -> PyTree:
    """Each device's copy of the states with the rows that the others wrote."""
    row, ok = row.ravel(), ok.ravel()
    to = lax.all_gather(jnp.where(ok, row, jnp.iinfo(jnp.int32).max), "clients")

    def exchange(s):
        return s.at[to].set(lax.all_gather(s[row], "clients"), mode="drop")

    return jax.tree.map(exchange, states)


def _stacked(reductions: list[Reduction], updates: list[PyTree]) -> list[PyTree]:
    return [u for r, u in zip(reductions, updates, strict=True) if r.stacked]


def all_finite(tree: PyTree) -> jax.Array:
    """Whether every floating-point value of `tree` is finite; ``[]`` bool."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if not leaves:
        return jnp.bool_(True)

    def look_at_each():
        return functools.reduce(
            jnp.logical_and, [jnp.isfinite(x).all() for x in leaves]
        )

    # A finite sum proves it, several times faster on CPU than looking at each value;
    # one that is not may only have overflowed.
    return lax.cond(
        jnp.isfinite(sum_of_values(leaves)), lambda: jnp.bool_(True), look_at_each
    )


def sum_of_values(tree: PyTree) -> jax.Array:
    """The sum of all values, at least in float32; ``[]``.

    Summed as a matrix product: XLA's CPU backend does not vectorise a plain sum.
    """
    total = jnp.float32(0)
    for x in jax.tree.leaves(tree):
        if not x.size:
            continue
        rows = x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(1, -1)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        ones = jnp.ones(rows.shape[1], x.dtype)
        total += jnp.matmul(rows, ones, preferred_element_type=wide).sum()
    return total
