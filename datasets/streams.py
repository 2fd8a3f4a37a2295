"""Streams for online learning: autoregressive inputs of a nonlinear function, CalCOFI.

Samples arrive at clients in iterations of their own, some clients can hardly ever take
part, and messages are late. A world, `fedjax_core.networks.streaming.World`, holds all
of that and the held-out data; it is a function of a key.

Client key: the client's number. Client k gets samples in a share of iterations by
k mod 4 and is available with a probability by (k div 4) mod 4, so that in 256 clients
each pair has 16.

Licence: none needed, the data is generated; of CalCOFI see `calcofi`.

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024, Section 4.4; when samples arrive and the kernel's width are not printed.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_core import check, random
from fedjax_core.arrays import check_finite
from fedjax_core.data.packed import FederatedData, Packed
from fedjax_core.networks import streaming
from fedjax_core.networks.streaming import World
from fedjax_core.types import Checked, Key, Positive, PositiveInt, Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Checked):
    """Of a world.

    Attributes:
      num_clients: K.
      iterations: T.
      num_features: d.
      width: kappa, of the kernel.
      shares: share of iterations in which a client gets a sample, by group; not empty.
      availability: probability to be available with a new sample, by group; not empty.
      delay_decay: delta in [0, 1), a message is l or more late with chance delta^l.
      delay_unit: of which delays are multiples.
      tests: held-out samples of a client.
    """

    num_clients: PositiveInt = 256
    iterations: PositiveInt = 2000
    num_features: PositiveInt = 200
    width: Positive = 2.0
    shares: tuple[Share, ...] = (0.25, 0.5, 0.75, 1.0)
    availability: tuple[Share, ...] = (0.25, 0.1, 0.025, 0.005)
    delay_decay: float = 0.2
    delay_unit: int = 1
    tests: PositiveInt = 8


def nonlinear(config: Config) -> Callable[[Key], World]:
    r"""Worlds where every client has an AR(1) process of its own.

    .. math::

      s_n = \theta_k s_{n-1} + \sqrt{1 - \theta_k^2}\, u_n, \qquad
      u_n \sim \mathcal{N}(\mu_k, \sigma_k^2), \\
      y = \sqrt{x_1^2 + \sin^2(\pi x_4)} + 0.8 - 0.5 e^{-x_2^2} x_3 + e, \qquad
      x = (s_n, s_{n-1}, s_{n-4}, s_{n-3})

    with theta in U(0.2, 0.9), mu in U(-0.2, 0.2), sigma^2 in U(0.2, 1.2) and the
    variance of e in U(0.005, 0.03), drawn for each client.
    """
    num_clients, tests = config.num_clients, config.tests

    def world(key: Key) -> World:
        # Compiling a draw takes longer than making it: few of them, that are large.
        laws, stream, test, rest = jax.random.split(key, 4)
        low = jnp.array([0.2, -0.2, 0.2, 0.005])
        high = jnp.array([0.9, 0.2, 1.2, 0.03])
        share = jax.random.uniform(laws, (4, num_clients))
        law = low[:, None] + (high - low)[:, None] * share

        def samples(key, length, repeats):
            theta, mean, variance, noise = jnp.tile(law, (1, repeats))
            normal = jax.random.normal(key, (2 * length + 4, len(theta)))
            s = autoregressive(normal[length:], theta, mean, jnp.sqrt(variance))
            x = jnp.stack([s[4:], s[3:-1], s[:-4], s[1:-3]], axis=2)
            return x, target(x) + jnp.sqrt(noise)[None] * normal[:length]

        x, y = samples(stream, config.iterations, 1)
        test_x, test_y = samples(test, 1, tests)
        return _world(config, rest, x, y, test_x[0], test_y[0])

    return world


def autoregressive(
    normal: jax.Array, theta: jax.Array, mean: jax.Array, std: jax.Array
) -> jax.Array:
    """The AR(1) processes of `nonlinear`, from their stationary law on.

    Args:
      normal: ``[T, K]`` standard normal numbers.
      theta: ``[K]``.
      mean: ``[K]``, mu.
      std: ``[K]``, sigma.

    Returns:
      ``[T, K]``.
    """
    root = jnp.sqrt(1 - theta**2)
    u = mean[None] + std[None] * normal
    centre = mean * jnp.sqrt((1 + theta) / (1 - theta))
    first = centre + u[0] - mean

    def follow(s, u):
        return theta * s + root * u, s

    last, before = lax.scan(follow, first, u[1:])
    return jnp.concatenate([before, last[None]])


def target(x: jax.Array) -> jax.Array:
    """The function of `nonlinear`, (4.35), of inputs ``[..., 4]``."""
    x1, x2, x3, x4 = jnp.moveaxis(x, -1, 0)
    root = jnp.sqrt(x1**2 + jnp.sin(jnp.pi * x4) ** 2)
    return root + 0.8 - 0.5 * jnp.exp(-(x2**2)) * x3


def from_population(config: Config, data: FederatedData) -> Callable[[Key], World]:
    """Worlds of a data set's rows, such as `calcofi.load` gives, dealt out at random.

    Clients get different rows, each one when it arrives; the target is standardised.
    Held-out rows are test rows. The shares of `config` say how many rows a client gets,
    `data` has finite examples ``{"x": [n, L], "y": [n]}``.

    Raises:
      ValueError: fewer rows than clients get, or numbers that are not finite.
      TypeError: no test rows.
    """
    check.instance(Packed, test=data.test)
    assert data.test is not None
    train, held_out = data.train.examples, data.test.examples
    check_finite(**{k: train[k] for k in ("x", "y")})
    needed = int(_samples(config).sum())
    if len(train["y"]) < needed:
        wanted = f"{needed} train rows for these shares"
        raise ValueError(f"data must have {wanted}, got {len(train['y'])}.")
    centre, scale = np.mean(train["y"]), np.std(train["y"])
    tests = config.num_clients * config.tests

    def world(key: Key) -> World:
        deal, test, rest = jax.random.split(key, 3)
        rows = jax.random.permutation(deal, len(train["y"]))
        shape = config.iterations, config.num_clients
        # The n-th sample that arrives anywhere is the n-th row.
        arrived = _arrived(config, rest)
        number = jnp.cumsum(arrived.ravel()).reshape(shape) - 1
        row = rows[jnp.maximum(number, 0)]
        x, y = jnp.asarray(train["x"])[row], jnp.asarray(train["y"])[row]
        row = jax.random.randint(test, (tests,), 0, len(held_out["y"]))
        test_y = (jnp.asarray(held_out["y"])[row] - centre) / scale
        test_x = jnp.asarray(held_out["x"])[row]
        return _world(config, rest, x, (y - centre) / scale, test_x, test_y)

    return world


def _samples(config: Config) -> np.ndarray:
    """How many samples each client gets, ``[K]``."""
    share = np.resize(config.shares, config.num_clients)
    return np.rint(share * config.iterations).astype(int)


def _arrived(config: Config, key: Key) -> jax.Array:
    """See `draw_arrivals`; `_world` of the same key has the same."""
    key = random.stream(key, "arrivals")
    return streaming.draw_arrivals(key, _samples(config), config.iterations)


def _world(
    config: Config,
    key: Key,
    x: jax.Array,
    y: jax.Array,
    test_x: jax.Array,
    test_y: jax.Array,
) -> World:
    """Adds events and features."""
    group = np.arange(config.num_clients) // len(config.shares)
    p = np.asarray(config.availability)[group % len(config.availability)]
    of_events, of_features = jax.random.split(key)
    late = config.delay_decay, config.delay_unit
    events = streaming.draw_events(of_events, _arrived(config, key), p, *late)
    size = x.shape[-1], config.num_features
    features = streaming.draw_features(of_features, *size, config.width)
    return World(x, y, events, features, streaming.featurise(features, test_x), test_y)
