r"""SuPerFed: a federated and a personal model, and all between them are trained.

Client :math:`i` of the cohort S receives :math:`\theta_g` as :math:`\theta_f` and has a
model :math:`\theta_l` of its own, from an initialisation of its own. In every local
step it draws :math:`\lambda \sim U(0, 1)`, one number (SuPerFed-MM, "model mixing") or
one for each layer (SuPerFed-LM, "layer mixing"), takes the gradient :math:`G` of its
loss at the mixture :math:`(1 - \lambda) \theta_f + \lambda \theta_l`, and steps along

.. math::

  g_f &= (1 - \lambda) G + \mu (\theta_f - \theta_g)
    + \nu \nabla_{\theta_f} \cos^2(\theta_f, \theta_l), \\
  g_l &= \lambda G + \nu \nabla_{\theta_l} \cos^2(\theta_f, \theta_l), \qquad
  \theta_g \leftarrow \theta_g + \frac{\sum_{i \in S} n_i (\theta_f^i - \theta_g)}
    {\sum_{i \in S} n_i} .

Before round :math:`t_{pers}` :math:`\lambda` is 0, :math:`\theta_l` stands still and
the term of :math:`\nu` is left out (read literally it would move both): the round is
FedAvg's, or FedProx's where :math:`\mu > 0`. The force of :math:`\nu` is zero between
parallel models, hence the different initialisations. A client uses the mixture of the
server's model with its own for any :math:`\lambda`; one that has not trained its own,
for it took part in the warm-up at most, uses the server's.

References:
  Hahn, "Algorithms for Collaborative Machine Learning under Statistical Heterogeneity",
  dissertation, UNIST, 2024, Algorithms 2.3 and 2.4, equations 2.1 to 2.6. Its cosine
  has the same norm twice, its equation 2.3 the gradient at an end point: slips.

  Hahn et al., "Connecting Low-Loss Subspace for Personalized Federated Learning", KDD
  2022.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_core import check, random
from fedjax_core.arrays import name_of, wide
from fedjax_core.local import (
    Carry,
    LocalConfig,
    init_bytes,
    proximal_gradient,
    sgd_step,
    with_stats,
)
from fedjax_core.metrics import Mean
from fedjax_core.parts import check_parts
from fedjax_core.personal import Parts, averaging, mix, with_mixtures
from fedjax_core.types import (
    Algorithm,
    ClientProgram,
    Key,
    LossFn,
    NonNegative,
    Params,
    Positive,
    PyTree,
    trained,
    with_trained,
)

LAMBDAS = tuple(k / 10 for k in range(11))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    r"""Hyper-parameters of SuPerFed, with those of `LocalConfig`.

    Attributes:
      mixing: "model" (MM) or "layer" (LM), where the parameters of a layer, as kernel
        and bias, share a number.
      client_lr: :math:`\eta`, step size of both models.
      mu: :math:`\mu`, pull of the federated model to the received one.
      nu: :math:`\nu`, weight of the squared cosine between the two models.
      warm_up: :math:`t_{pers}`, rounds before personal models are trained.
      lambdas: which mixtures are evaluated; that of 0.3 is "personal_0.3".
    """

    mixing: Literal["model", "layer"] = "model"
    client_lr: Positive = 0.01
    mu: NonNegative = 0.01
    nu: NonNegative = 2.0
    warm_up: Annotated[int, check.seed] = 0  # an int >= 0
    lambdas: tuple[float, ...] = LAMBDAS

    def __post_init__(self):
        super().__post_init__()
        for lam in self.lambdas:
            check.in_range(0, 1, lambdas=lam)
        if len({f"{lam:g}" for lam in self.lambdas}) < len(self.lambdas):
            raise ValueError(
                f"lambdas must differ in six digits, by which their models are named, "
                f"got {self.lambdas}."
            )


def squared_cosine(f: PyTree, p: PyTree) -> jax.Array:
    r"""The squared cosine of the angle between two models, in [0, 1]; ``[]``.

    .. math::

      \nabla_f \cos^2 = \frac{2 \cos}{\|f\|}
        \Big(\frac{p}{\|p\|} - \cos \frac{f}{\|f\|}\Big)

    The gradients are at right angles to their models, and zero where the models are
    parallel. Of a model of norm 0, where it isn't defined, all are 0.
    """

    def dot(a, b):
        parts = jax.tree.map(lambda x, y: jnp.sum(wide(x) * wide(y)), a, b)
        return jax.tree.reduce(jnp.add, parts)

    fp, ff, pp = dot(f, p), dot(f, f), dot(p, p)
    return fp / jnp.where(ff > 0, ff, 1) * (fp / jnp.where(pp > 0, pp, 1))


def _mixing(config: Config, params: PyTree, key: Key) -> PyTree:
    """A step's lambda, or that of each parameter."""
    if config.mixing == "model":
        return jax.random.uniform(key)
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    layers = [name_of(path).rpartition("/")[0] for path, _ in paths]
    layers, of = np.unique(layers, return_inverse=True)
    return jax.tree.unflatten(tree, jax.random.uniform(key, layers.shape)[of])


def client_program(
    config: Config, loss_fn: LossFn, optimizer: optax.GradientTransformation
) -> ClientProgram:
    r"""One client: shared is :math:`\theta_g`, its row :math:`\theta_l`."""

    def init(received, own, turn):
        both = {"federated": trained(received), "personal": trained(own)}
        # Statistics are those of the mixtures, the only models that see data.
        start = with_trained(received, both)
        return Carry(start, optimizer.init(both), Mean.zero())

    def step(received, carry, batch, turn):
        begun = turn.round >= config.warm_up
        both = trained(carry.params)
        draws = _mixing(config, both["federated"], random.stream(turn.key, "lambda"))
        lam = jax.tree.map(lambda x: jnp.where(begun, x, 0), draws)

        def loss(params, batch, key):
            models = trained(params)
            mixture = mix(models["federated"], models["personal"], lam)
            return loss_fn(with_trained(params, mixture), batch, key)

        nu = jnp.where(begun, config.nu, 0)
        angle = jax.grad(lambda m: squared_cosine(m["federated"], m["personal"]))(both)
        force = jax.tree.map(lambda slope: nu * slope, angle)
        pull = proximal_gradient(config.mu, both["federated"], received)
        force["federated"] = jax.tree.map(jnp.add, pull, force["federated"])
        return sgd_step(
            loss,
            optimizer,
            carry,
            batch,
            turn.key,
            correction=force,
            scale={"federated": 1, "personal": begun},
            round=turn.round,
        )

    def finish(received, carry, own, turn):
        both = trained(carry.params)
        delta = jax.tree.map(jnp.subtract, both["federated"], trained(received))
        own = with_trained(carry.params, both["personal"])
        return with_stats(delta, own), own, {"train_loss": carry.train_loss}

    return ClientProgram(init, step, finish)


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    init: Callable[[Key], Params],
    **parts: Unpack[Parts],
) -> Algorithm:
    """Builds SuPerFed; its state and `parts` are `fedjax_core.personal`'s.

    The metric "train_loss" is of the mixtures, without the regularisers.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      init: draws a client's personal model, as ``model.init`` does; unlike the server's
        where `nu` is to act.
      **parts: see there; `client_optimizer` is of both models, `reduce` instead of
        the mean by examples.

    Raises:
      TypeError, ValueError: `init` is no function; or, when the state is made, draws
        something unlike the server's parameters.
    """
    check_parts(Config, config, loss_fn, **parts)
    optimizer = parts.get("client_optimizer") or optax.sgd(config.client_lr)
    if not callable(init):
        raise TypeError(f"init must be a function, as model.init is, got {init!r}.")

    def keep(params):
        drawn = jax.eval_shape(init, jax.random.key(0))
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (params, drawn)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"init must draw parameters like the server's, of shapes {shapes[0]}, "
                f"got {shapes[1]}."
            )
        return params

    algorithm = averaging(
        "superfed",
        config,
        client_program(config, loss_fn, optimizer),
        keep=keep,
        draw=init,
        begins=config.warm_up,
        # The personal model before and after, the mixture and its gradient.
        client_bytes=init_bytes(optimizer, optimizer, models=4),
        weights="examples",
        **parts,
    )
    return with_mixtures(algorithm, config.lambdas)
