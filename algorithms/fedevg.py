r"""FedEvg: a server refines labelled samples by the energies of clients' classifiers.

The server holds M samples, the same number of each class, from normal noise on. Clients
read a classifier f as an energy :math:`E(x, y) = -f(x)_y` and train one, in the chapter
from scratch in every round, on real examples (x, y) and samples (x', y') by

.. math::

  \ell = E(x, y) - E(\check x, y') + H(f(x), y) + \lambda H(f(x'), y'),

where :math:`\check x` is x' after steps of a Langevin chain on the energy, which go on
where they ended when the sample is drawn again (persistent contrastive divergence), and
through which no gradient flows. Of the samples as received a client sends the sign of
-E and :math:`\nabla_x E`, and the server takes one step of the same chain,

.. math::

  x \leftarrow x - \beta_t \frac{\sum_i n_i e_i \nabla E_i(x)}{\sum_i n_i e_i}
    + \delta \epsilon, \qquad e_i = \exp(\mathrm{sgn}(-E_i(x, y))) .

Samples and labels go down, as many numbers up, and never a model. Printed with the
opposite sign, the first two terms would lower the likelihood. The chapter gives no
guarantee of convergence, and grants that normalisers of clients are not equal.

References:
  Hahn, "Algorithms for Collaborative Machine Learning under Statistical Heterogeneity",
  UNIST 2024, chapter IV, Algorithms 4.1 and 4.2.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_core import check, generated, random
from fedjax_core.arrays import num_bytes, repeat_rows
from fedjax_core.energies import (
    Range,
    Says,
    clipped,
    energy,
    langevin,
    mixture,
    step_sizes,
)
from fedjax_core.generated import Classifier
from fedjax_core.local import Carry, init_bytes, sgd_step
from fedjax_core.map import map_clients
from fedjax_core.metrics import Mean
from fedjax_core.parts import check_parts
from fedjax_core.reduce import select
from fedjax_core.types import Algorithm, ClientProgram, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(generated.Config):
    r"""Hyper-parameters of FedEvg, with those of `fedjax_core.generated.Config`.

    Attributes:
      client_lr: step size of clients' Adam.
      weight_decay: of it, added to gradients.
      decay: factor of the step size every `decay_every` rounds.
      decay_every: rounds.
      replay: :math:`\lambda`, weight of the cross-entropy of samples.
      replayed: those of the server as "received", or the client's own "refined" ones as
        they are before the step.
      chain_steps: of a client's chain in a local step.
      chain_step_size: :math:`\gamma`.
      chain_noise: :math:`\sigma`.
      rounds: T, of the schedule of :math:`\beta_t`; later ones are like the last.
      first_step: :math:`\beta_0`.
      last_step: :math:`\beta_{T-1}`.
      schedule: form of :math:`\beta_t`, see `fedjax_core.energies.step_sizes`.
      noise: :math:`\delta`.
      kind: energy of sample and label, "joint", or of the sample alone, "marginal".
      signed: weigh by the sign of -E, as Algorithm 4.2 does, or by -E, with which the
        server's step follows the energy of the mixture.
      stateful: clients keep their classifier for the next round they take part in.
      within: range that samples are clipped to, by clients and by the server.
      gradient_within: range of the entries of energies' gradients.
    """

    client_lr: float = 1e-3
    weight_decay: float = 1e-4
    decay: float = 0.9
    decay_every: int = 50
    replay: float = 0.1
    replayed: Literal["received", "refined"] = "received"
    chain_steps: int = 1
    chain_step_size: float = 1.0
    chain_noise: float = 0.01
    rounds: int = 500
    first_step: float = 10.0
    last_step: float = 0.01
    schedule: Literal["ddpm", "half"] = "ddpm"
    noise: float = 0.01
    kind: Literal["joint", "marginal"] = "joint"
    signed: bool = True
    stateful: bool = False
    within: Range | None = None
    gradient_within: Range | None = None

    def __post_init__(self):
        super().__post_init__()
        check.positive(client_lr=self.client_lr, decay=self.decay)
        check.positive_int(decay_every=self.decay_every, chain_steps=self.chain_steps)
        check.non_negative(
            weight_decay=self.weight_decay, replay=self.replay, noise=self.noise,
            chain_step_size=self.chain_step_size, chain_noise=self.chain_noise,
        )  # fmt: skip
        check.one_of(("received", "refined"), replayed=self.replayed)
        check.one_of(("joint", "marginal"), kind=self.kind)
        step_sizes(self.first_step, self.last_step, self.rounds, self.schedule)


class State(NamedTuple):
    """What survives a round."""

    params: jax.Array  # [M, ...], samples, class by class
    clients: Any  # [N, ...], a `Row`, or () where clients keep nothing


class Row(NamedTuple):
    """What a client keeps."""

    classifier: Params
    took_part: jax.Array  # [] bool


class Local(NamedTuple):
    """A client in the middle of its local steps."""

    model: Carry
    chain: jax.Array  # [M, ...], its copy of the samples


def client_program(
    config: Config, classifier: Classifier, optimizer: optax.GradientTransformation
) -> ClientProgram:
    """One client; shared is ``{"x", "y"}``, the samples and their labels."""

    def says(params, x, y):
        """Minus the energy of samples, ``[B]``, and its gradient, ``[B, ...]``."""

        def total(x):
            of_each = energy(classifier.logits(params, x), y, config.kind)
            return of_each.sum(), of_each

        gradient, of_each = jax.grad(total, has_aux=True)(x)
        return Says(-of_each, clipped(gradient, config.gradient_within))

    def init(shared, row, turn):
        params = classifier.init(random.stream(turn.key, "init"))
        if config.stateful:
            params = select(row.took_part, row.classifier, params)
        return Local(Carry(params, optimizer.init(params), Mean.zero()), shared["x"])

    def step(shared, carry, batch, turn):
        model, chain = carry
        size = min(config.work.batch_size, len(chain))
        key = random.stream(turn.key, "samples")
        rows = jax.random.choice(key, len(chain), (size,), replace=False)
        x, y = chain[rows], shared["y"][rows]
        refined = langevin(
            lambda x: says(model.params, x, y).gradient,
            x,
            random.stream(turn.key, "chain"),
            step_size=config.chain_step_size,
            noise=config.chain_noise,
            num_steps=config.chain_steps,
            within=config.within,
        )
        replayed = shared["x"][rows] if config.replayed == "received" else x
        cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels

        def loss(params, batch, key):
            del key
            x = jnp.concatenate([batch["x"], refined, replayed])  # one pass, not three
            of_all, many = classifier.logits(params, x), len(batch["x"])
            of_real, of_made, again = jnp.split(of_all, [many, many + size])
            real = energy(of_real, batch["y"], config.kind)
            real += cross_entropy(of_real, batch["y"])
            made = energy(of_made, y, config.kind).mean()
            return real - made + config.replay * cross_entropy(again, y).mean()

        scale = config.decay ** (turn.round // config.decay_every)
        model = sgd_step(loss, optimizer, model, batch, turn.key, scale=scale)
        return Local(model, chain.at[rows].set(refined))

    def finish(shared, carry, row, turn):
        del turn
        params = carry.model.params
        update = says(params, shared["x"], shared["y"])
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
      client_optimizer: instead of Adam with weight decay.
    """
    check_parts(Config, config, classifier.logits, client_optimizer=client_optimizer)
    optimizer = client_optimizer or optax.chain(
        optax.add_decayed_weights(config.weight_decay), optax.adam(config.client_lr)
    )
    client = client_program(config, classifier, optimizer)
    learn = generated.learner(config, classifier)
    beta = step_sizes(
        config.first_step, config.last_step, config.rounds, config.schedule
    )

    def init(params, num_clients):
        generated.balanced_labels(len(params), config.num_classes)
        row = Row(classifier.init(random.seed_key(0)), jnp.bool_(False))
        clients = repeat_rows(row, num_clients) if config.stateful else ()
        return State(jnp.asarray(params), clients)

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
        return State(x, results.client_state), results.metrics

    def client_bytes(params):
        weights = jax.eval_shape(classifier.init, random.seed_key(0))
        rows = 4 + 2 * config.stateful  # parameters, gradient, update, twice its row
        return (
            num_bytes(params) + rows * num_bytes(weights)
            + init_bytes(optimizer)(weights)
        )  # fmt: skip

    return Algorithm(
        name="fedevg",
        config=config,
        work=config.work,
        init=init,
        round=round,
        model=lambda state: learn(state.params),
        client_bytes=client_bytes,
        parts={"client_optimizer": "custom" if client_optimizer else "adam"},
    )
