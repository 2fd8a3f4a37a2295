r"""PAO-Fed: online learning where clients come when they can and share parts of models.

In iteration n client k has a new sample or not, can take part or not, and what it sends
arrives l iterations later. With :math:`M_k` and :math:`S_k` the m entries that it
receives and sends, :math:`C_l` those whose message of iteration n - l arrives now,

.. math::

  V_k &= M_k^n w + (I - M_k^n) w_k \quad\text{(taking part, else } w_k) \\
  w_k &\leftarrow V_k + \mu z_k (y_k - z_k^\top V_k)
    \quad\text{(with a new sample)} \\
  w &\leftarrow w + \sum_l \alpha^l \frac{1}{|C_l|} \sum_{k \in C_l}
    S_k^{n-l} (w_k^{n+1-l} - w) .

An entry that a message of smaller l has written is left alone by those of larger l.
Entries are m in a row from m(n + k), or from m n for all clients alike (coordinated),
modulo d: both sides know them. Sent are those that the client receives next, which it
has refined since it last received them.

Flags give the variants and what it is compared with, see `METHODS`.

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024, Algorithm 3; Gauthier et al., "Asynchronous Online Federated Learning with
  Reduced Communication Requirements", IEEE Internet of Things Journal 10(23), 2023,
  with the rule that the latest entry wins.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_core import check, random
from fedjax_core.networks.run import System
from fedjax_core.networks.streaming import (
    World,
    check_world,
    featurise,
    held_out_error,
)
from fedjax_core.types import Checked, Key, Positive, PositiveInt, Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Checked):
    """What PAO-Fed and its relatives differ in.

    Attributes:
      step_size: mu, > 0.
      num_shared: m, entries of a message in each direction; None is all d.
      coordinated: all clients share the same entries.
      refined: clients send what they receive next; otherwise what they just received.
      late_weight: alpha in [0, 1], a message that is l late weighs alpha^l; 1 where
        they are pooled or signs.
      max_delay: l_max; messages that are later are dropped.
      delay_unit: of which delays are multiples, as max_delay is; others are dropped.
      sample_rate: share of the available clients that take part, drawn at random.
      autonomous: clients that don't take part learn from new samples.
      full_downlink: the server sends all d entries.
      latest_wins: see above; without it sums over l may diverge.
      pooled: all messages that arrive together are averaged as one class C.
      signs: clients send the signs of their gradients, and the server steps by mu along
        the majority's: SignSGD. Others' models are not kept.
    """

    step_size: Positive = 0.4
    num_shared: PositiveInt | None = 4
    coordinated: bool = False
    refined: bool = True
    late_weight: Share = 1.0
    max_delay: Annotated[int, check.non_negative_int] = 10
    delay_unit: PositiveInt = 1
    sample_rate: Share = 1.0
    autonomous: bool = True
    full_downlink: bool = False
    latest_wins: bool = True
    pooled: bool = False
    signs: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.max_delay % self.delay_unit:
            raise ValueError(
                f"max_delay must be a multiple of delay_unit={self.delay_unit}, got "
                f"{self.max_delay}."
            )
        if self.signs and self.num_shared is not None:
            raise ValueError(
                f"num_shared must be None where signs are sent, got {self.num_shared}."
            )
        if (self.signs or self.pooled) and self.late_weight != 1:
            raise ValueError(
                f"late_weight must be 1 where messages are pooled or signs, got "
                f"{self.late_weight}."
            )


_WHOLE = Config(num_shared=None, autonomous=False, pooled=True)
METHODS = {
    "PAO-Fed-C0": Config(coordinated=True, refined=False),
    "PAO-Fed-U0": Config(refined=False),
    "PAO-Fed-C1": Config(coordinated=True),
    "PAO-Fed-U1": Config(),
    "PAO-Fed-C2": Config(coordinated=True, late_weight=0.2),
    "PAO-Fed-U2": Config(late_weight=0.2),
    "PSO-Fed": Config(num_shared=40, sample_rate=0.1),
    "Online-FedSGD": _WHOLE,
    "Online-Fed": dataclasses.replace(_WHOLE, sample_rate=0.02),
    "SignSGD": dataclasses.replace(_WHOLE, signs=True, step_size=0.01),
}
"""The text's methods by name, with d = 200 entries in mind where m counts."""


class State(NamedTuple):
    """Of a run; L = max_delay + 1 and Q = max_delay / delay_unit + 1.

    What is under way is kept as sums by delay, not by client, so that it does not grow
    with their number: slot n mod L of the ring has what was sent in iteration n.

    Attributes:
      params: w, ``[d]``.
      models: w_k, ``[K, d]``.
      sums: ``[L, Q, d]``, sums of messages by slot and delay.
      hits: ``[L, Q, d]``, how many messages have the entry.
      senders: ``[L, Q]``, how many messages there are.
    """

    params: jax.Array
    models: jax.Array
    sums: jax.Array
    hits: jax.Array
    senders: jax.Array


def make(
    config: Config, world: Callable[[Key], World] | World, name: str = "pao_fed"
) -> System:
    """Builds the method for `networks.run`, which reports "test_mse".

    Every round reports "participants" and the bytes they send and receive, float32
    entries and packed signs.

    Args:
      config: hyper-parameters.
      world: the streams, see `System`.
      name: recorded.

    Raises:
      ValueError: num_shared is larger than the number of features, or as
        `streaming.check_world`.
    """
    check.instance(Config, config=config)
    shapes = (
        world if isinstance(world, World) else jax.eval_shape(world, random.seed_key(0))
    )
    check_world(shapes)
    d, m = shapes.test_z.shape[1], config.num_shared
    if m is not None:
        check.in_range(1, d, num_shared=m)
    return System(
        name=name,
        config=config,
        world=world,
        init=lambda world, key: init(config, world),
        step=lambda world, state, t, key: step(config, world, state, t, key),
        evaluate=lambda world, state: held_out_error(world, state.params),
        horizon=shapes.y.shape[0],
    )


def init(config: Config, world: World) -> State:
    """All models 0, nothing under way."""
    d, slots = world.test_z.shape[1], config.max_delay + 1
    dtype = jnp.promote_types(world.test_z.dtype, jnp.float32)  # halves lose counts
    ring = jnp.zeros((slots, len(_delays(config)), d), dtype)
    models = jnp.zeros((world.y.shape[1], d), dtype)
    return State(models[0], models, ring, ring, ring[:, :, 0])


def step(
    config: Config, world: World, state: State, t: jax.Array, key: Key
) -> tuple[State, dict[str, jax.Array]]:
    """One iteration, see `System`."""
    num_clients, d = state.models.shape
    m = config.num_shared or d
    arrived, takes_part, delay = (x[t] for x in world.events)
    if config.sample_rate < 1:
        drawn = jax.random.uniform(key, (num_clients,)) < config.sample_rate
        takes_part = takes_part & drawn
    z = featurise(world.features, world.x[t]).astype(state.models.dtype)

    received = takes_part[:, None]
    if not config.full_downlink and m < d:
        offset = offsets(config, m, d, t, num_clients)
        place = jnp.arange(d)[None] - offset[:, None]
        received &= jnp.where(place < 0, place + d, place) < m
    merged = jnp.where(received, state.params[None], state.models)
    # Not as a sum, for which XLA wakes threads on CPU.
    ones = jnp.ones(d, z.dtype)
    error = world.y[t] - jnp.matmul(merged * z, ones, precision="highest")
    if config.signs:
        models, sent = state.models, jnp.sign(error[:, None] * z)
    else:
        learns = arrived if config.autonomous else takes_part
        # Not as a product with 0: inputs of no sample may be anything.
        moved = merged + config.step_size * error[:, None] * z
        sent = models = jnp.where(learns[:, None], moved, merged)
    sent = jnp.where(takes_part[:, None], sent, 0)

    by_delay = takes_part[None] & (delay[None] == _delays(config)[:, None])
    by_delay = by_delay.astype(z.dtype)  # [Q, K]
    later = t + 1 if config.refined else t
    if m < d:
        rows = offsets(config, m, d, later, num_clients)[:, None] + jnp.arange(m)[None]
        sent = jnp.take_along_axis(sent, rows % d, axis=1)
    first = m * (later % d) % d
    shared = _summed(config, by_delay, sent, d, first)
    hits = _summed(config, by_delay, jnp.ones_like(sent), d, first)
    now, put = t % (config.max_delay + 1), lax.dynamic_update_index_in_dim
    state = state._replace(
        models=models,
        sums=put(state.sums, shared, now, 0),
        hits=put(state.hits, hits, now, 0),
        senders=put(state.senders, by_delay.sum(1), now, 0),
    )
    count = takes_part.sum()
    up = m / 8 if config.signs else 4 * m
    down = 4 * (d if config.full_downlink else m)
    metrics = {
        "participants": count,
        "uplink_bytes": count.astype(z.dtype) * up,
        "downlink_bytes": count.astype(z.dtype) * down,
    }
    return state._replace(params=_arrive(config, state, t)), metrics


def _delays(config: Config) -> jax.Array:
    """Those that a message can have, ``[Q]``."""
    return jnp.arange(0, config.max_delay + 1, config.delay_unit)


def offsets(
    config: Config, m: int, d: int, t: jax.Array, num_clients: int
) -> jax.Array:
    """Where the m entries of each client start in iteration t, ``[K]``."""
    turn = t + jnp.arange(num_clients) * (not config.coordinated)
    return m * (turn % d) % d


def _summed(
    config: Config, by_delay: jax.Array, sent: jax.Array, d: int, first: jax.Array
) -> jax.Array:
    """Sums of the messages ``[K, m]`` by delay, each entry in its place, ``[Q, d]``."""
    num_clients, m = sent.shape
    if config.coordinated or m == d:
        flat = jnp.matmul(by_delay, sent, precision="highest")
    else:
        # Client k's entries start m k after client 0's: one row after the other they
        # wrap around d, so that sums are those of rows of d.
        flat = (by_delay[:, :, None] * sent[None]).reshape(-1, num_clients * m)
    flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % d)))
    return jnp.roll(flat.reshape(len(flat), -1, d).sum(1), first, axis=1)


def _arrive(config: Config, state: State, t: jax.Array) -> jax.Array:
    """The server's model after the messages that arrive in iteration t."""
    late = _delays(config)
    slot, row = (t - late) % (config.max_delay + 1), jnp.arange(len(late))
    sums, hits, senders = (x[slot, row] for x in state[2:])
    w = state.params
    if config.signs:
        return w + config.step_size * jnp.sign(sums.sum(0))
    change = sums - hits * w[None]  # [Q, d]
    if config.pooled:
        return w + change.sum(0) / jnp.maximum(senders.sum(), 1)
    if config.latest_wins:
        seen = jnp.cumsum(hits, axis=0) - hits > 0
        change = jnp.where(seen, 0, change)
    weight = (config.late_weight**late).astype(w.dtype) / jnp.maximum(senders, 1)
    return w + jnp.matmul(weight, change, precision="highest")
