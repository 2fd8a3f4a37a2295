"""The contracts: what one client does, what a round is, what an algorithm is."""

import dataclasses
import functools
import inspect
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_core import check

PyTree = Any
Params = PyTree
Key = jax.Array
Batch = Mapping[str, jax.Array]
Metrics = dict[str, Any]

LossFn = Callable[[Params, Batch, Key], Any]
"""``loss_fn(params, batch, key)``: per-example losses, ``[B]``; of a `Stateful` model
the pair of them and its new statistics.

The engine averages losses over ``batch["example_mask"]``, so padding can't leak into a
mean. A masked row holds a copy of a real row of the same client.
"""


Positive = Annotated[float, check.positive]
NonNegative = Annotated[float, check.non_negative]
Fraction = Annotated[float, check.fraction]  # in [0, 1)
Share = Annotated[float, functools.partial(check.in_range, 0, 1)]
PositiveInt = Annotated[int, check.positive_int]
Seed = Annotated[int, check.seed]
Names = Annotated[tuple[str, ...], check.names]


class Checked:
    """The base of a dataclass whose fields are checked by their types.

    A `Literal` lists the values of a field, and an `Annotated` has its rule: a function
    of `fedjax_core.check`. A tuple of one such type is not empty, and the rules hold
    for its entries. None passes where the type is a union with it. Rules of a field
    that a subclass declares anew still hold; a new `Literal` replaces the old.
    Annotations that are text are understood where their names are of the module.
    """

    def __post_init__(self):
        for name, rule, optional in _rules(type(self)):
            value = getattr(self, name)
            if value is not None or not optional:
                rule(**{name: value})


@functools.cache
def _rules(kind: type) -> list[tuple[str, Callable[..., None], bool]]:
    """Names of fields, their rules, and whether they may be None."""
    rules: dict[tuple[str, Any], Callable[..., None]] = {}
    optional = {}
    for cls in reversed(kind.__mro__):
        for name, hint in inspect.get_annotations(cls).items():
            if isinstance(hint, str):  # from __future__ import annotations
                try:
                    hint = eval(hint, vars(sys.modules[cls.__module__]))
                except NameError:
                    hint = Any
            union = typing.get_origin(hint) in (typing.Union, types.UnionType)
            options = typing.get_args(hint) if union else (hint,)
            optional[name] = type(None) in options
            for option in options:
                rules |= {(name, key): rule for key, rule in _said(option)}
    return [(name, rule, optional[name]) for (name, _), rule in rules.items()]


def _said(hint: Any) -> Iterator[tuple[Any, Callable[..., None]]]:
    """Rules of a type, each with what a rule that replaces it has as well."""
    for rule in getattr(hint, "__metadata__", ()):
        yield rule, rule
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if kind is Literal:
        yield Literal, check.among(args)
    if kind is tuple and len({*args} - {...}) == 1:
        size = None if args[-1] is ... else len(args)
        for key, rule in _said(args[0]):
            yield (tuple, key), functools.partial(check.each, rule, size)


class Turn(NamedTuple):
    """One client's turn in a round: its key, and where in the round it stands.

    Attributes:
      key: for the function that sees it, and for this step only.
      round: ``[]`` int32, the round's number, from 0.
      step: ``[]`` int32, local steps taken so far: 0 in `init`, all in `finish`.
      num_steps: ``[]`` int32, local steps of this client in the round, at least 1 (a
        client without any takes no part, and a division by it stays finite).
      num_examples: ``[]`` int32, examples that the client holds.
    """

    key: Key
    round: jax.Array
    step: jax.Array
    num_steps: jax.Array
    num_examples: jax.Array


class Stateful(NamedTuple):
    """Parameters of a model that keeps running statistics, as batch normalisation does.

    A client's update is one as well: the change of `params`, and as `stats` the
    client's own statistics as a `fedjax_core.metrics.Mean` of pytrees, a sum with its
    weight. So every reduction averages them by the weights it gives to clients.

    Attributes:
      params: what optimisers train; all that a transform of the update sees.
      stats: running statistics and counters, which the loss itself moves. They are
        averaged over clients and never stepped by an optimiser.
    """

    params: Params
    stats: PyTree


def trained(params: Params) -> Params:
    """What optimisers see of a model or an update: all but running statistics."""
    return params.params if isinstance(params, Stateful) else params


def with_trained(params: Params, new: PyTree) -> Params:
    """`params` with `new` in the place of what `trained` returns."""
    return params._replace(params=new) if isinstance(params, Stateful) else new


class ClientProgram(NamedTuple):
    """What ONE client does in a round; no client axis appears anywhere in it.

    Attributes:
      init: ``(shared, client_state, turn) -> carry``. `shared` is what the server
        broadcasts; `client_state` is the client's row of the state ``[N, ...]``.
      step: ``(shared, carry, batch, turn) -> carry``, once per local step. Leaves of
        `batch` are ``[B, ...]``; ``batch["example_mask"]`` is bool ``[B]``.
      finish: ``(shared, carry, client_state, turn) -> (update, client_state,
        metrics)``. Values of `metrics` are `Mean` or `Sum` (see
        `fedjax_core.metrics`). Two entries are the engine's unless a program makes
        them: "uplink_bytes", `Bytes`, the size of the update as it is; and "failure",
        int32, at which of `fedjax_core.map.STAGES` the update stopped being finite, 0
        if it did not, found by looking at update and client state.
      norm_bound: an upper bound on the L2 norm of any `update`, infinite when nothing
        bounds it. Noise is calibrated to it, see `fedjax_core.privacy`.
    """

    init: Callable[[PyTree, PyTree, Turn], PyTree]
    step: Callable[[PyTree, PyTree, Batch, Turn], PyTree]
    finish: Callable[[PyTree, PyTree, PyTree, Turn], tuple[PyTree, PyTree, Metrics]]
    norm_bound: float = float("inf")


@dataclasses.dataclass(frozen=True)
class Execution(Checked):
    """How a cohort runs. It changes speed and memory, never the result.

    Attributes:
      block_size: L, clients that run side by side under `vmap`; 1 means no client
        axis at all inside a device.
      mesh: device mesh with an axis ``clients``, or None for one device.
      max_steps: when positive, blocks run that many masked steps in loops of fixed
        length, which makes the round reverse-mode differentiable.
    """

    block_size: PositiveInt = 1
    mesh: jax.sharding.Mesh | None = None
    max_steps: Annotated[int, check.non_negative] = 0

    @property
    def num_devices(self) -> int:
        """Devices along the mesh axis ``clients``."""
        return 1 if self.mesh is None else self.mesh.shape["clients"]


class Queue(NamedTuple):
    """The clients of a round as every device meets them.

    D devices hold M blocks of L clients. Capacities (M, R) are rounded up so that
    rounds of any sizes share one compiled program; `blocks` says how many are in use.
    """

    slot: jax.Array  # [D, M, L] int32, position in the cohort; C marks padding
    row_start: jax.Array  # [D, M, L] int32, the client's first row in `rows`
    rows: jax.Array  # [D, R, B] int32, examples of one local step; -1 marks padding
    blocks: jax.Array  # [D] int32, blocks in use


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cohort:
    """The clients of one round, their data and how they are scheduled: a pytree.

    Attributes:
      client_id: ``[C]`` int32, rows of the population; -1 marks padding.
      num_examples: ``[C]`` int32.
      num_steps: ``[C]`` int32, local steps of the round; 0 for a client that has
        nothing to train on and so takes no part.
      state_row: ``[C]`` int32, the client's row in the state ``[N, ...]``, past its
        end for padding.
      start_round: ``[C]`` int32, the round whose model the client starts from: this
        one, unless the participation is asynchronous.
      num_clients: ``[]`` int32, N, the size of the population.
      round: ``[]`` int32, the round's number, from 0.
      position: ``[C]`` int32, where a slot sits in the flattened ``[D * M * L]``.
      queue: the schedule, see `Queue`.
      examples: leaves ``[n, ...]`` that `queue.rows` points into (with a leading
        device axis when `sharded_examples`).
      public: data of the server, ``FederatedData.public``: the same in every round.
      work: static; the local work that the steps were planned for.
      execution: static; see `Execution`.
      sharded_examples: static; every device holds the examples of its own clients.
      sharded_state: static; the state has rows ``[D * M * L, ...]`` instead, at
        `position`, and every device holds those of its own clients.
    """

    client_id: jax.Array
    num_examples: jax.Array
    num_steps: jax.Array
    state_row: jax.Array
    start_round: jax.Array
    num_clients: jax.Array
    round: jax.Array
    position: jax.Array
    queue: Queue
    examples: Mapping[str, jax.Array] | None
    work: "LocalWork" = dataclasses.field(metadata={"static": True})
    execution: Execution = dataclasses.field(metadata={"static": True})
    public: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    sharded_examples: bool = dataclasses.field(default=False, metadata={"static": True})
    sharded_state: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def client_mask(self) -> jax.Array:
        """``[C]`` bool: real clients that have something to train on."""
        return self.num_steps > 0

    def only(self, keep: jax.Array) -> "Cohort":
        """The cohort in which only clients where `keep`, ``[C]`` bool, take part."""
        return dataclasses.replace(self, num_steps=jnp.where(keep, self.num_steps, 0))

    def first_epochs(self, epochs: int = 1) -> "Cohort":
        """The cohort that stops after its first so many epochs.

        For methods that go over their data twice in a round, each time whole. A second
        pass repeats the order and, under the same key, the draws of the first: give it
        a key of its own, as ``random.stream(key, "second")``.

        Raises:
          ValueError: the work counts steps, so that a pass may see part of the data; or
            epochs < 1.
        """
        check.positive_int(epochs=epochs)
        if self.work.steps is not None:
            raise ValueError(
                f"work must count epochs for a method with passes over all data, got "
                f"steps={self.work.steps}."
            )
        per_epoch = self.work.steps_per_epoch(self.num_examples)
        return dataclasses.replace(
            self, num_steps=jnp.minimum(self.num_steps, epochs * per_epoch)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalWork(Checked):
    """How much a client trains in a round.

    A client walks through its examples in reshuffled epochs of ``ceil(n / batch_size)``
    batches; the last batch of an epoch is short and masked.

    Attributes:
      batch_size: B, examples per local step.
      epochs: passes over the client's examples; ignored when `steps` is given.
      steps: local steps, the same for every client; the walk stops in mid-epoch.
      drop_remainder: leave out an epoch's short batch. A client with fewer than B
        examples then has no step and takes no part in the round.
    """

    batch_size: PositiveInt = 20
    epochs: PositiveInt = 1
    steps: PositiveInt | None = None
    drop_remainder: bool = False

    def steps_per_epoch(self, sizes: Any) -> Any:
        """Batches in one epoch of clients with `sizes` examples, an array of ints."""
        whole = sizes // self.batch_size
        return whole if self.drop_remainder else -(-sizes // self.batch_size)


Work = Annotated[LocalWork, functools.partial(check.instance, LocalWork)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A federated method: pure functions and the local work they expect.

    Attributes:
      name: for tables and run directories.
      config: the frozen dataclass it was built from, recorded with every run.
      work: local work per client and round.
      init: ``(params, num_clients) -> state``. The state is a `NamedTuple` with a field
        `params`, the model to evaluate. What must survive for each client is its
        field `clients`, with leaves ``[N, ...]`` whose rows start out equal.
      round: ``(state, cohort, key) -> (state, metrics)``, jit- and vmap-able. Metrics
        are a flat dict of scalars, which `simulate` records, and "failure" ``[C]``,
        by which it names excluded clients; it drops other arrays.
      model: ``state -> params``, the model to evaluate, where it is not what the server
        learns: a classifier trained on synthetic data, say.
      own_models: ``(state, row) -> {name: params}``, the models that a client with this
        row of ``state.clients`` would use, or None where everyone uses `model`.
      client_bytes: ``params -> int``, device memory that a client in mid-step holds
        besides its model, gradient, update and activations: optimiser state, a second
        model, logits. It decides how many clients fit side by side.
      parts: what it was built from besides `config`, by name, recorded as well.
      needs: ``(model, data) -> None``, raises ValueError before the first round where
        they are not what the method is for.
    """

    name: str
    config: Any
    work: LocalWork
    init: Callable[[Params, int], Any]
    round: Callable[[Any, Cohort, Key], tuple[Any, Metrics]]
    model: Callable[[Any], Params] = operator.attrgetter("params")
    own_models: Callable[[Any, PyTree], Mapping[str, Params]] | None = None
    client_bytes: Callable[[Params], int] = lambda params: 0
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs: Callable[[Any, Any], None] = lambda model, data: None
