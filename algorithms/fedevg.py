r"""FedEvg: a server refines labelled samples by the energies of clients' classifiers.

The server holds M samples, the same number of each class, from normal noise on. Clients
read a classifier f as an energy :math:`E(x, y) = -f(x)_y` and train one, in the chapter
from scratch in every round, by the loss `energies.contrast` of real examples, of
samples, and of those after steps of a Langevin chain on the energy, which go on where
they ended when a sample is drawn again (persistent contrastive divergence). Of the
samples as received a client sends the sign of -E and :math:`\nabla_x E`, and the server
takes one step of the same chain,

.. math::

  x \leftarrow x - \beta_t \frac{\sum_i n_i e_i \nabla E_i(x)}{\sum_i n_i e_i}
    + \delta \epsilon, \qquad e_i = \exp(\mathrm{sgn}(-E_i(x, y))) .

Samples and labels go down, as many numbers up, and never a model. A classifier that has
taken few local steps has little to say: `work` should count tens of them. The chapter
gives no guarantee of convergence, and grants that normalisers of clients are not equal.

References:
  Hahn, "Algorithms for Collaborative Machine Learning under Statistical Heterogeneity",
  UNIST 2024, chapter IV, Algorithms 4.1 and 4.2.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_core import energies, generated, random
from fedjax_core.arrays import num_bytes, repeat_rows
from fedjax_core.energies import langevin, mixture, says
from fedjax_core.generated import Classifier
from fedjax_core.local import Carry, by_round, init_bytes, sgd_step
from fedjax_core.map import map_clients
from fedjax_core.metrics import Mean
from fedjax_core.parts import check_parts
from fedjax_core.personal import Row
from fedjax_core.reduce import select
from fedjax_core.types import (
    Algorithm,
    ClientProgram,
    NonNegative,
    Positive,
    PositiveInt,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(generated.Config, energies.Chains):
    r"""Hyper-parameters of FedEvg, with those of `generated.Config` and of `Chains`.

    Attributes:
      client_lr: step size of clients' Adam.
      weight_decay: of it, added to gradients.
      decay: factor of its step size every `decay_every` rounds.
      decay_every: rounds.
      replay: :math:`\lambda`, weight of the cross-entropy of samples.
      replayed: those of the server as "received", or the client's own "refined" ones as
        they are before the step.
      signed: weigh by the sign of -E, as Algorithm 4.2 does, or by -E, with which the
        server's step follows the energy of the mixture.
      stateful: clients keep their classifier for the next round they take part in.
    """

    client_lr: Positive = 1e-3
    weight_decay: NonNegative = 1e-4
    decay: Positive = 0.9
    decay_every: PositiveInt = 50
    replay: NonNegative = 0.1
    replayed: Literal["received", "refined"] = "received"
    signed: bool = True
    stateful: bool = False


class State(NamedTuple):
    """What survives a round."""

    params: jax.Array  # [M, ...], samples, class by class
    clients: Any  # [N, ...], a `Row` of the classifier, or () where nothing is kept
    seed: jax.Array  # [] uint32, of the server's classifier


class Local(NamedTuple):
    """A client in the middle of its local steps."""

    model: Carry
    chain: jax.Array  # [M, ...], its copy of the samples


def client_program(
    config: Config, classifier: Classifier, optimizer: optax.GradientTransformation
) -> ClientProgram:
    """One client; shared is ``{"x", "y"}``, the samples and their labels."""

    def init(shared, row, turn):
        params = classifier.init(random.stream(turn.key, "init"))
        if config.stateful:
            params = select(row.took_part, row.own, params)
        return Local(Carry(params, optimizer.init(params), Mean.zero()), shared["x"])

    def step(shared, carry, batch, turn):
        model, chain = carry
        size = min(config.work.batch_size, len(chain))
        key = random.stream(turn.key, "samples")
        rows = jax.random.choice(key, len(chain), (size,), replace=False)
        x, y = chain[rows], shared["y"][rows]
        refined = langevin(
            lambda x: says(config, classifier, model.params, x, y).gradient,
            x,
            random.stream(turn.key, "chain"),
            step_size=config.chain_step_size,
            noise=config.chain_noise,
            num_steps=config.chain_steps,
            within=config.within,
        )
        replayed = shared["x"][rows] if config.replayed == "received" else x
        loss = energies.contrast(
            config.kind, classifier, refined, replayed, y, config.replay
        )
        model = sgd_step(loss, optimizer, model, batch, turn.key, round=turn.round)
        return Local(model, chain.at[rows].set(refined))

    def finish(shared, carry, row, turn):
        params = carry.model.params
        update = says(config, classifier, params, shared["x"], shared["y"])
        if config.signed:
            update = update._replace(log_weight=jnp.sign(update.log_weight))
        kept = Row(params, jnp.bool_(True)) if config.stateful else row
        return update, kept, {"train_loss": carry.model.train_loss}

    return ClientProgram(init, step, finish)


def make(
    config: Config,
    classifier: Classifier,
    *,
    client_optimizer: optax.GradientTransformation | None = None,
) -> Algorithm:
    """Builds FedEvg; initial params are samples ``[M, ...]``, normal noise say.

    What is evaluated is a classifier trained on the samples alone.

    Args:
      config: hyper-parameters.
      classifier: of clients and of the server.
      client_optimizer: instead of Adam with weight decay and falling steps.
    """
    learn = generated.learner(config, classifier)
    check_parts(Config, config, classifier.logits, client_optimizer=client_optimizer)
    optimizer = client_optimizer or optax.chain(
        optax.add_decayed_weights(config.weight_decay),
        optax.adam(config.client_lr),
        by_round(lambda t: config.decay ** (jnp.asarray(t) // config.decay_every)),
    )
    client = client_program(config, classifier, optimizer)
    beta = energies.step_sizes(
        config.first_step, config.last_step, config.rounds, config.schedule
    )

    def init(params, num_clients):
        generated.balanced_labels(len(params), config.num_classes)
        row = Row(classifier.init(random.seed_key(0)), jnp.bool_(False))
        clients = repeat_rows(row, num_clients) if config.stateful else ()
        return State(jnp.asarray(params), clients, jnp.uint32(0))

    def round(state, cohort, key):
        x = state.params
        shared = {"x": x, "y": generated.balanced_labels(len(x), config.num_classes)}
        results = map_clients(
            client, shared, cohort, key, reduce=mixture(), client_state=state.clients
        )
        x = langevin(
            lambda _: results.update,
            x,
            random.stream(key, "server"),
            step_size=beta(cohort.round),
            noise=config.noise,
            within=config.within,
        )
        return State(x, results.client_state, generated.fit_seed(key)), results.metrics

    def client_bytes(params):
        weights = jax.eval_shape(classifier.init, random.seed_key(0))
        rows = 4 + 2 * config.stateful  # parameters, gradient, update, twice its row
        return num_bytes(params) + init_bytes(optimizer, models=rows)(weights)

    return Algorithm(
        name="fedevg",
        config=config,
        work=config.work,
        init=init,
        round=round,
        model=lambda state: learn(state.params, state.seed),
        client_bytes=client_bytes,
        parts={"client_optimizer": "custom" if client_optimizer else "adam"},
    )
