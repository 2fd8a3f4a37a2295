r"""Distillation: models that speak through what they say of a public data set.

Teachers are softmax outputs on inputs that the server holds (``cohort.public``), and a
student learns them by the cross-entropy to soft targets

.. math::

  \ell(w) = -\frac1n \sum_x \sum_k Y_k(x) \log p_w(k \mid x),

whose gradient is that of :math:`\mathrm{KL}(Y \| p_w)`. A loss function that is the
negative log-likelihood of a class, as cross-entropy is, says all there is to know of a
classifier: :math:`\log p_w(k \mid x)` is minus its loss for :math:`y = k`. So methods
here are built from a loss like any other, and cost one forward pass, not one a class.

The ensemble of a cohort is a streaming reduction: each client's program says what its
model makes of the public set, and sums of that are all that a round ever holds.

References:
  Sattler et al., "CFD: Communication-Efficient Federated Distillation via Soft-Label
  Quantization and Delta Coding", IEEE TNSE 2022; Lin et al., "Ensemble Distillation for
  Robust Model Fusion in Federated Learning", NeurIPS 2020.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from fedjax_core import check, server
from fedjax_core.arrays import num_bytes, wide
from fedjax_core.local import LocalConfig, local_sgd
from fedjax_core.map import all_finite
from fedjax_core.metrics import Bytes, Mean, value
from fedjax_core.models.model import Model
from fedjax_core.parts import check_parts
from fedjax_core.reduce import Reduction, mean
from fedjax_core.types import (
    Batch,
    ClientProgram,
    Cohort,
    Key,
    LocalWork,
    LossFn,
    Params,
    Positive,
    PositiveInt,
    PyTree,
    Stateful,
    Work,
    trained,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """Hyper-parameters of methods with distillation, with those of `LocalConfig`.

    Attributes:
      num_classes: K.
      distil_lr: step size of Adam in distillation.
      public_work: epochs, or steps, of distillation, and their batch size.
    """

    num_classes: PositiveInt = 10
    distil_lr: Positive = 1e-3
    public_work: Work = LocalWork()


def needs(num_classes: int) -> Callable[[Model, Any], None]:
    """What methods with labels of so many classes need, as `Algorithm.needs`."""

    def check_classes(model: Model, data: Any) -> None:
        own = model.ids["y"].num if "y" in model.ids else num_classes
        if own != num_classes:
            raise ValueError(
                f"num_classes must be that of the model, {own}, got {num_classes}."
            )

    return check_classes


Examples = Mapping[str, ArrayLike]
"""Inputs of the public set, leaves ``[n, ...]``: what a loss reads besides "y"."""

LogitsFn = Callable[[Params, Batch], jax.Array]
"""``(params, batch) -> [B, K]``, logits of a model in evaluation, each example's up to
a constant of its own, which no softmax sees."""


def _losses_by_class(
    loss_fn: LossFn, num_classes: int, params: Params, batch: Batch, key: Key
) -> tuple[jax.Array, PyTree]:
    """The loss for every class that an example might have, ``[B, K]``.

    And the new statistics of a `Stateful` model, () of any other.
    """
    rows = jax.tree.leaves(dict(batch))[0].shape[0]
    stateful = isinstance(params, Stateful)

    def of_class(k: jax.Array) -> Any:
        return loss_fn(params, {**batch, "y": jnp.full(rows, k)}, key)

    # Labels alone have the axis of classes: the network runs once.
    axes = (-1, None) if stateful else -1
    out = jax.vmap(of_class, out_axes=axes)(jnp.arange(num_classes, dtype=jnp.int32))
    return out if stateful else (out, ())


def soft_loss(loss_fn: LossFn, num_classes: int) -> LossFn:
    r"""The cross-entropy to soft targets, ``batch["labels"]`` ``[B, K]``.

    :math:`\sum_k Y_k \ell(x, k)`, where `loss_fn` is the cross-entropy
    :math:`\ell(x, k)`; it trains as that does, dropout and running statistics included.
    """

    def loss(params: Params, batch: Batch, key: Key) -> Any:
        rest = dict(batch)
        labels = rest.pop("labels")
        losses, stats = _losses_by_class(loss_fn, num_classes, params, rest, key)
        # A class without weight adds nothing, though its loss be infinite.
        terms = jnp.where(labels > 0, labels.astype(losses.dtype) * losses, 0)
        total = terms.sum(-1)
        return (total, stats) if isinstance(params, Stateful) else total

    return loss


def _log_probabilities(
    loss_fn: LossFn, num_classes: int, params: Params, batch: Batch
) -> jax.Array:
    key = jax.random.key(0)  # of no use to a deterministic loss
    losses, _ = _losses_by_class(loss_fn, num_classes, params, batch, key)
    return jax.nn.log_softmax(-wide(losses))


def logits_of_loss(loss_fn: LossFn, num_classes: int) -> LogitsFn:
    """Log-probabilities of classes by a loss that is the same in training.

    Raises:
      ValueError: when tracing, a model with running statistics, which are used in
        evaluation alone. With dropout too, `logits_of_model` is what is wanted.
    """

    def logits(params: Params, batch: Batch) -> jax.Array:
        if isinstance(params, Stateful):
            raise ValueError(
                "logits must be given for a model with running statistics, as "
                "logits_of_model(model), got None."
            )
        return _log_probabilities(loss_fn, num_classes, params, batch)

    return logits


def logits_of_model(model: Model) -> LogitsFn:
    """Log-probabilities of classes by a classifier in evaluation.

    Raises:
      ValueError: the model does not say how many classes it has, by ``ids["y"]``.
    """
    if "y" not in model.ids:
        raise ValueError("model must have ids of 'y', its classes, got none.")

    def evaluated(params: Params, batch: Batch, key: Key) -> Any:
        losses = value(model.metrics(params, batch)["loss"])
        return (losses, ()) if isinstance(params, Stateful) else losses

    return functools.partial(_log_probabilities, evaluated, model.ids["y"].num)


class Parts(TypedDict, total=False):
    """What the `make` of a method with a public set takes beside config and loss.

    Attributes:
      client_optimizer: instead of SGD with ``config.client_lr``.
      distil_optimizer: instead of Adam with ``config.distil_lr``.
      reduce: instead of the uniform mean of labels.
      logits: of a model with dropout or running statistics, in evaluation, as
        `logits_of_model` makes them.
    """

    client_optimizer: optax.GradientTransformation | None
    distil_optimizer: optax.GradientTransformation | None
    reduce: Reduction | None
    logits: LogitsFn | None


class Plugs(NamedTuple):
    """What methods with distillation are built from besides config and loss.

    Attributes:
      client: optimiser of clients.
      distil: ``(params, public, labels, key, **how) -> (params, loss)``, as `distil`.
      logits: of a model.
      reduce: of labels.
      names: of the optimisers, for `Algorithm.parts`.
    """

    client: optax.GradientTransformation
    distil: Callable[..., tuple[Params, jax.Array]]
    logits: LogitsFn
    reduce: Reduction
    names: dict[str, str]


def plugs(
    kind: type,
    config: Config,
    loss_fn: LossFn,
    client_optimizer: optax.GradientTransformation | None = None,
    distil_optimizer: optax.GradientTransformation | None = None,
    logits: LogitsFn | None = None,
    reduce: Reduction | None = None,
) -> Plugs:
    """What is given, or SGD on clients, Adam in distillation and `logits_of_loss`.

    Raises:
      TypeError: one of them is not what `check_parts` asks for, or `logits` is no
        function.
    """
    check_parts(
        kind, config, loss_fn, client_optimizer=client_optimizer,
        distil_optimizer=distil_optimizer, reduce=reduce,
    )  # fmt: skip
    if logits is None:
        logits = logits_of_loss(loss_fn, config.num_classes)
    if not callable(logits):
        raise TypeError(
            f"logits must be a function, as logits_of_model(model) is, got {logits!r}."
        )
    optimizer = distil_optimizer or optax.adam(config.distil_lr)
    learn = functools.partial(distil, loss_fn, optimizer, work=config.public_work)
    names = {
        "client_optimizer": "custom" if client_optimizer else "sgd",
        "distil_optimizer": "custom" if distil_optimizer else "adam",
    }
    client = client_optimizer or optax.sgd(config.client_lr)
    return Plugs(client, learn, logits, reduce or mean("uniform"), names)


def predict(
    logits_fn: LogitsFn, params: Params, examples: Examples, batch_size: int = 256
) -> jax.Array:
    """Logits of all public examples, ``[n, K]``, batch by batch."""
    data = jax.tree.map(jnp.asarray, dict(examples))
    n = jax.tree.leaves(data)[0].shape[0]
    size = min(n, batch_size)
    # The last batch is filled up with the last example.
    rows = jnp.minimum(jnp.arange(-(-n // size) * size), n - 1).reshape(-1, size)

    def one(row: jax.Array) -> jax.Array:
        return logits_fn(params, {name: x[row] for name, x in data.items()})

    out = lax.map(one, rows)
    return out.reshape(-1, out.shape[-1])[:n]


def public_inputs(cohort: Any, at_least: int = 1) -> dict[str, jax.Array]:
    """The inputs of the public set, ``FederatedData.public["x"]``, as `Examples`.

    Of a `Cohort` or the data themselves.

    Raises:
      ValueError: the server has none, or fewer than `at_least`.
    """
    x = cohort.public.get("x")
    if x is None or len(x) < at_least:
        raise ValueError(
            f"data must have {at_least} public inputs, as FederatedData(public={{'x': "
            f"...}}), got {0 if x is None else len(x)}."
        )
    return {"x": jnp.asarray(x)}


def first_inputs(cohort: Cohort, n: int) -> dict[str, jax.Array]:
    """The first n of `public_inputs`."""
    return {name: x[:n] for name, x in public_inputs(cohort, n).items()}


STRATEGIES = ("random", "entropy", "certainty", "margin")


def informative(logits: jax.Array, n: int, by: str, key: Key) -> jax.Array:
    r"""The n public inputs to learn from, by what a model says of them; ``[n]`` int32.

    Those of the largest entropy of :math:`q = \mathrm{softmax}` of the logits,
    the least certainty :math:`\max q`, the smallest margin between the largest two,
    or at random. Ties fall to the first; of two classes all three rank alike.

    Args:
      logits: ``[m, K]``.
      n: how many, 1 to m.
      by: one of `STRATEGIES`.
      key: of a random choice.

    Raises:
      ValueError: n is out of range, or `by` unknown.
    """
    check.one_of(STRATEGIES, by=by)
    check.in_range(1, logits.shape[0], n=n)
    log_q = jax.nn.log_softmax(wide(logits))
    largest = lax.top_k(jnp.exp(log_q), 2)[0]
    score = {
        "random": lambda: jax.random.uniform(key, log_q.shape[:1]),
        "entropy": lambda: -(jnp.exp(log_q) * log_q).sum(-1),
        "certainty": lambda: -largest[:, 0],
        "margin": lambda: largest[:, 1] - largest[:, 0],
    }
    return lax.top_k(score[by](), n)[1]


def distil(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    params: Params,
    examples: Examples,
    labels: ArrayLike,
    key: Key,
    work: LocalWork,
    *,
    average: int = 1,
) -> tuple[Params, jax.Array]:
    """Trains a model to say of the public set what `labels` say.

    All that is random comes from `key`: whoever starts from the same parameters ends,
    to the bit, with the same. So what every client of a cohort would do alike is done
    once.

    Args:
      loss_fn: per-example losses, the cross-entropy to one class.
      optimizer: any optax transformation; it starts anew.
      params: the student.
      examples: n public inputs.
      labels: ``[n, K]`` probabilities.
      key: of the order of examples and of the loss.
      work: as in `fedjax_core.server.fit`, whose errors are raised.
      average: likewise, steps over which the student is averaged.

    Returns:
      The student, and the mean loss over steps.
    """
    data = dict(examples) | {"labels": labels}
    soft = soft_loss(loss_fn, np.shape(labels)[-1])
    return server.fit(soft, optimizer, params, data, key, work, average=average)


def weighted(outputs: jax.Array, scores: jax.Array | None = None) -> Mean:
    r"""One client's outputs ``[n, K]`` as a summand of the ensemble's mean.

    Summed by `fedjax_core.reduce.total`, and over passes by ``+``, it is the numerator
    and the denominator of what `ensemble` divides: :math:`\sum_i s_i F_i` and
    :math:`\sum_i s_i`. Outputs are logits or probabilities, `scores` ``[n]`` > 0 the
    client's weight on each example; None is 1 everywhere.
    """
    if scores is None:
        return Mean(outputs, jnp.ones((outputs.shape[0], 1), outputs.dtype))
    scores = scores[:, None].astype(outputs.dtype)
    return Mean(scores * outputs, scores)


def ensemble(summed: Mean) -> jax.Array:
    """The (weighted) mean of the cohort's outputs, ``[n, K]``; 0 of nobody's."""
    return summed.total / jnp.where(summed.count > 0, summed.count, 1)


def with_outputs(
    program: ClientProgram,
    outputs: Callable[[Params, Any], PyTree],
    *,
    params: Callable[[Any], Params] = lambda received: received[0],
    alone: bool = False,
) -> ClientProgram:
    """The program with what the client's model makes of the public set.

    Its update becomes ``{"update": update, "outputs": outputs}``. The model is the
    server's parameters plus the update, as the server knows it once that has come, and
    only the update is counted as sent: outputs are the server's to work out. Made where
    a client finishes, they are reduced as clients do, and no two need be held at once.

    Args:
      program: one whose `shared` is the parameters it starts from and whose update is a
        delta: `fedjax_core.local.local_sgd`, with a transform or without.
      outputs: ``(params, received) -> pytree``, from the client's model and all that it
        was sent.
      params: what of `received` the program is to see. By default what is sent is
        ``(params, public)``; with a row of its own for every client it arrives as
        ``((params, public), row)``.
      alone: the update is the outputs, which then are what is sent.
    """

    def init(received, client_state, turn):
        return program.init(params(received), client_state, turn)

    def step(received, carry, batch, turn):
        return program.step(params(received), carry, batch, turn)

    def finish(received, carry, client_state, turn):
        start = params(received)
        update, kept, metrics = program.finish(start, carry, client_state, turn)
        said = outputs(server.move(start, trained(update), update), received)
        if "failure" in metrics:
            failure, ok = metrics["failure"], all_finite(said)
            metrics["failure"] = jnp.where((failure == 0) & ~ok, 1, failure)
        if alone:
            metrics.pop("uplink_bytes", None)
            return said, kept, metrics
        metrics.setdefault("uplink_bytes", Bytes.of(num_bytes(update)))
        return {"update": update, "outputs": said}, kept, metrics

    # Outputs are bounded by nothing.
    return ClientProgram(init, step, finish)


def labelling_clients(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, logits: LogitsFn
) -> ClientProgram:
    """Clients that train and send soft labels, ``[n, K]`` float32, and no model.

    What they receive begins with the parameters and the public inputs.
    """

    def says(params: Params, received: Any) -> jax.Array:
        said = jax.nn.softmax(predict(logits, params, received[1]))
        return said.astype(jnp.float32)

    return with_outputs(local_sgd(loss_fn, optimizer), says, alone=True)
