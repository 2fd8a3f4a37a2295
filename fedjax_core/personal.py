"""Personalised methods: what clients keep of a model, what they share of it.

In all of them the server averages, as in FedAvg, whatever of the model is shared, and
every client keeps a row of its own from which its personal model comes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from fedjax_core import random, server
from fedjax_core.arrays import name_of, num_bytes, repeat_rows
from fedjax_core.local import Carry, init_bytes, sgd_step, with_stats
from fedjax_core.map import map_clients
from fedjax_core.metrics import Mean
from fedjax_core.reduce import Reduction, mean, select
from fedjax_core.result import Result
from fedjax_core.transform import Transform, identity, with_transform
from fedjax_core.types import (
    Algorithm,
    Batch,
    ClientProgram,
    Key,
    LossFn,
    Params,
    PyTree,
    Stateful,
    Turn,
    trained,
    with_trained,
)

Split = Callable[[Params], tuple[Params, Params]]
"""``params -> (shared, own)``, which `merge` makes the whole of again."""


def split(params: Params, names: Sequence[str]) -> tuple[Params, Params]:
    """Parameters without those of some layers, and these alone.

    Args:
      params: any pytree.
      names: paths, or the beginnings of paths, as in "Dense_1" or "Dense_1/kernel".
        Running statistics of a named layer go with it.

    Returns:
      Two trees like `params`, with None in the place of what the other one holds.

    Raises:
      ValueError: a name that no parameter has.
    """
    leaves = jax.tree.leaves_with_path(trained(params))
    paths = [name_of(path) for path, _ in leaves]
    for name in names:
        if not any(_within(path, name) for path in paths):
            raise ValueError(
                f"names of layers must begin the path of a parameter, which are "
                f"{', '.join(paths)}; got {name!r}."
            )

    def named(path: Any, statistic: bool) -> bool:
        path = name_of(path)
        # Flax files statistics under a collection: batch_stats/BatchNorm_0/mean.
        known_as = (path, path.partition("/")[2]) if statistic else (path,)
        return any(_within(path, name) for path in known_as for name in names)

    def part(keep: bool) -> Params:
        def of(tree: PyTree, statistic: bool) -> PyTree:
            return jax.tree.map_with_path(
                lambda path, x: x if named(path, statistic) == keep else None, tree
            )

        if not isinstance(params, Stateful):
            return of(params, False)
        return Stateful(of(params.params, False), of(params.stats, True))

    return part(False), part(True)


def _within(path: str, name: str) -> bool:
    return f"{path}/".startswith(f"{name}/")


def merge(shared: Params, own: Params) -> Params:
    """What `split` took apart, in either order."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, shared, own, is_leaf=lambda x: x is None
    )


def mix(federated: PyTree, personal: PyTree, lam: Any) -> PyTree:
    r"""The model :math:`(1 - \lambda) \theta_f + \lambda \theta_l`, trained parameters.

    `lam` is a number in [0, 1], or one for each parameter.
    """

    def one(k, f, p):
        return ((1 - k) * f + k * p).astype(f.dtype)

    return jax.tree.map(one, jax.tree.broadcast(lam, federated), federated, personal)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("federated", "personal"),
    meta_fields=("lambdas",),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Mixtures(Mapping[str, Params]):
    """Models on the way from the server's to a client's own, made when asked for.

    That of 0.3 is called "personal_0.3". Evaluation holds one at a time.

    Attributes:
      federated: what stands at 0.
      personal: what stands at 1; running statistics are its own.
      lambdas: in [0, 1].
    """

    federated: Params
    personal: Params
    lambdas: tuple[float, ...]

    def at(self, lam: ArrayLike) -> Params:
        """The model at a lambda, which may be traced."""
        ends = trained(self.federated), trained(self.personal)
        return with_trained(self.personal, mix(*ends, lam))

    def __getitem__(self, name: str) -> Params:
        return self.at(dict(zip(self, self.lambdas, strict=True))[name])

    def __iter__(self) -> Iterator[str]:
        return (f"personal_{lam:g}" for lam in self.lambdas)

    def __len__(self) -> int:
        return len(self.lambdas)


def with_mixtures(
    algorithm: Algorithm,
    lambdas: Sequence[float],
    own: Callable[[PyTree], Params] = lambda kept: kept,
) -> Algorithm:
    """A method of `averaging` whose clients evaluate all `Mixtures`, by `lambdas`.

    `own` makes the model at 1 of what a client keeps; by default it is that itself.
    """

    def own_models(state: Any, row: Any) -> Mixtures:
        kept, _ = row
        end = select(kept.took_part, own(kept.own), state.params)
        return Mixtures(state.params, end, tuple(lambdas))

    return dataclasses.replace(algorithm, own_models=own_models)


def best_lambda(
    result: Result,
    lambdas: Sequence[float],
    metric: str = "accuracy",
    split: str = "validation",
) -> np.ndarray:
    """Which of `Mixtures` is best for all clients at the end of a run, ``[S]``.

    On validation data this is a choice. On "test" it is what some papers report as
    their method's accuracy: that of the best number in hindsight.

    Args:
      result: of a method whose ``own_models`` are `Mixtures`.
      lambdas: as there.
      metric: whose mean over clients is to be large; of equals the first is taken.
      split: that it is measured on.

    Raises:
      ValueError: the metric is NaN for all of them in a run.
    """
    means = [
        result.series(f"{split}_personal_{lam:g}_{metric}_client_mean")[1][:, -1]
        for lam in lambdas
    ]
    if np.isnan(means).all(0).any():
        raise ValueError(f"{split} {metric} must be a number for some lambda, got NaN.")
    return np.asarray(lambdas)[np.nan_to_num(means, nan=-np.inf).argmax(0)]


class State(NamedTuple):
    """What survives a round.

    What is personal of `params` stays as it was at the start: nobody sends it.
    """

    params: Params
    clients: Any  # [N, ...], a `Row` and the state of the transform


class Parts(TypedDict, total=False):
    """What the `make` of a personal method takes beside its config.

    Attributes:
      client_optimizer: of clients, instead of plain SGD with the config's rates.
      transform: applied to every delta before it is sent: clipping, compression.
      reduce: instead of the method's mean: by other weights, robust or noisy.
    """

    client_optimizer: optax.GradientTransformation | None
    transform: Transform | None
    reduce: Reduction | None


class Row(NamedTuple):
    """What a client keeps; until it has trained it, it uses the server's model."""

    own: PyTree
    took_part: jax.Array  # [] bool, in a round that trains it


def averaging(
    name: str,
    config: Any,
    program: ClientProgram,
    *,
    keep: Callable[[Params], PyTree],
    own_model: Callable[[Params, PyTree], Params] = lambda params, own: own,
    client_bytes: Callable[[Params], int],
    draw: Callable[[Key], PyTree] | None = None,
    begins: int = 0,
    split: Split = lambda params: (params, None),
    server_lr: float = 1.0,
    weights: Literal["examples", "uniform"] = "uniform",
    client_optimizer: optax.GradientTransformation | None = None,
    transform: Transform | None = None,
    reduce: Reduction | None = None,
) -> Algorithm:
    """A method whose clients keep a row each and whose server averages deltas.

    Args:
      name: of the method.
      config: its hyper-parameters, with the field `work`.
      program: one client. What it receives and updates is what is shared; its row is
        what it keeps.
      keep: initial parameters -> what every client keeps at the start.
      own_model: ``(params, kept) -> params``, the personal model of a client that took
        part, evaluated as "personal"; `params` are the server's.
      client_bytes: as in `Algorithm`, without the transform.
      draw: what a client has when it first takes part, in the place of `keep`'s.
      begins: the first round that trains what clients keep.
      split: what of the model is shared, by default all of it.
      server_lr: step size along the mean delta.
      weights: of the mean over clients.
      client_optimizer: what `program` was given in the place of plain SGD, if anything.
      transform: as in `Parts`.
      reduce: as in `Parts`.
    """
    transform, reduce = transform or identity(), reduce or mean(weights)

    def start(received, row, turn):
        own = row.own
        if draw:  # once, and kept: rows start equal, and a client's key changes
            new = functools.partial(draw, random.stream(turn.key, "draw"))
            own = lax.cond(
                row.took_part,
                lambda: row.own,
                lambda: jax.tree.map(lambda x, o: x.astype(o.dtype), new(), row.own),
            )
        return program.init(received, own, turn)

    def finish(received, carry, row, turn):
        update, own, metrics = program.finish(received, carry, row.own, turn)
        return update, Row(own, row.took_part | (turn.round >= begins)), metrics

    client = with_transform(program._replace(init=start, finish=finish), transform)

    def of_transform(params: Params) -> PyTree:
        return transform.init(trained(split(params)[0]))

    def init(params, num_clients):
        row = (Row(keep(params), jnp.bool_(False)), of_transform(params))
        return State(params, repeat_rows(row, num_clients))

    def own_models(state, row):
        kept, _ = row
        own = own_model(state.params, kept.own)
        return {"personal": select(kept.took_part, own, state.params)}

    def round(state, cohort, key):
        shared, rest = split(state.params)
        results = map_clients(
            client, shared, cohort, key, reduce=reduce, client_state=state.clients
        )
        step = jax.tree.map(lambda d: server_lr * d, trained(results.update))
        shared = server.move(shared, step, results.update)
        params = shared if rest is None else merge(shared, rest)
        return State(params, results.client_state), results.metrics

    return Algorithm(
        name=name,
        config=config,
        work=config.work,
        init=init,
        round=round,
        own_models=own_models,
        client_bytes=lambda params: (
            client_bytes(params) + num_bytes(jax.eval_shape(of_transform, params))
        ),
        parts={
            "client_optimizer": "custom" if client_optimizer else "sgd",
            "transform": transform.name,
            "reduce": reduce.name,
        },
    )


def with_own_model(
    program: ClientProgram,
    optimizer: optax.GradientTransformation,
    own_step: Callable[[Params, Params, Carry, Batch, Turn], Carry],
) -> ClientProgram:
    """FedAvg's client, who trains a model of its own beside the server's.

    The client's row is that model. Metrics gain "personal_train_loss", the mean over
    local steps. `program` is `fedjax_core.local.local_sgd`, and the optimiser of the
    own model starts anew in every round.
    ``own_step(received, model, own, batch, turn)`` is a step of that, given the
    server's as it was received and as it stands before the step.
    """

    def init(received, own, turn):
        carry = Carry(own, optimizer.init(trained(own)), Mean.zero())
        return program.init(received, (), turn), carry

    def step(received, carry, batch, turn):
        model, own = carry
        beside = turn._replace(key=random.stream(turn.key, "personal"))
        own = own_step(received, model.params, own, batch, beside)
        return program.step(received, model, batch, turn), own

    def finish(received, carry, own, turn):
        model, own = carry
        update, _, metrics = program.finish(received, model, (), turn)
        # It is of the update alone; without it the engine looks at the row as well.
        del metrics["failure"]
        return update, own.params, metrics | {"personal_train_loss": own.train_loss}

    return ClientProgram(init, step, finish)


def partial_averaging(
    name: str,
    config: Any,
    loss_fn: LossFn,
    split: Split,
    *,
    phase: Callable[[Turn], tuple[Any, Any]] | None = None,
    weights: Literal["examples", "uniform"] = "uniform",
    **parts: Unpack[Parts],
) -> Algorithm:
    """A method in which some parameters are shared and averaged, and others stay.

    Args:
      name: of the method.
      config: its hyper-parameters, with fields `work` and `client_lr`, of plain SGD.
      loss_fn: per-example losses.
      split: which parameters are shared.
      phase: whether a step trains those that are shared, and a client's own; both, if
        left out. An optimiser does not see the steps that it does not take.
      weights: as in `averaging`.
      **parts: the optimiser is instead of SGD with ``config.client_lr``.
    """
    optimizer = parts.get("client_optimizer") or optax.sgd(config.client_lr)
    if phase is not None:
        optimizer = _in_turns(optimizer, split)

    def init(shared, own, turn):
        params = merge(shared, own)
        return Carry(params, optimizer.init(trained(params)), Mean.zero())

    def step(shared, carry, batch, turn):
        told = {"phase": phase(turn)} if phase else {}
        key, round = turn.key, turn.round
        return sgd_step(loss_fn, optimizer, carry, batch, key, round=round, **told)

    def finish(shared, carry, own, turn):
        local, own = split(carry.params)
        delta = jax.tree.map(jnp.subtract, trained(local), trained(shared))
        return with_stats(delta, local), own, {"train_loss": carry.train_loss}

    return averaging(
        name,
        config,
        ClientProgram(init, step, finish),
        keep=lambda params: split(params)[1],
        own_model=lambda params, own: merge(split(params)[0], own),
        # A client's own parameters before and after.
        client_bytes=lambda params: (
            2 * num_bytes(split(params)[1]) + init_bytes(optimizer)(params)
        ),
        split=split,
        weights=weights,
        **parts,
    )


def _in_turns(
    optimizer: optax.GradientTransformation, split: Split
) -> optax.GradientTransformationExtraArgs:
    """An optimiser for each of two parts, that goes on in the steps of its `phase`."""
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params):
        return tuple(map(optimizer.init, split(params)))

    def update(updates, state, params, *, phase, **told):
        moved, kept = [], []
        for on, gradient, before, part in zip(
            phase, split(updates), state, split(params), strict=True
        ):
            step, after = optimizer.update(gradient, before, part, **told)
            still = jax.tree.map(jnp.zeros_like, step)
            moved.append(select(on, step, still))
            kept.append(select(on, after, before))
        return merge(*moved), tuple(kept)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore
