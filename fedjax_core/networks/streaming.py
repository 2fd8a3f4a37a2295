r"""Clients that learn from streams, at times of their own: events, features, worlds.

What happens in a run is drawn before it, so that all methods see the same: who gets a
sample in which iteration, who of them can take part, how long its message travels. A
nonlinear function is learnt as a linear one of random Fourier features,

.. math::

  z = \sqrt{2/d} \cos(\Omega^\top x + b), \qquad
  E\, z(x)^\top z(x') = \exp(-\lVert x - x' \rVert^2 / (2 \kappa^2)) .

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024, Section 4.1.
  Rahimi and Recht, "Random Features for Large-Scale Kernel Machines", NIPS 2007.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import is_known
from fedjax_core.types import Key, Metrics


class Events(NamedTuple):
    """What happens to K clients in T iterations.

    Attributes:
      arrived: ``[T, K]`` bool, there is a new sample.
      available: ``[T, K]`` bool, the client can take part; only where one arrived.
      delay: ``[T, K]`` int32, iterations that a message sent now travels.
    """

    arrived: jax.Array
    available: jax.Array
    delay: jax.Array


class Features(NamedTuple):
    """Random Fourier features.

    Attributes:
      frequencies: Omega, ``[L, d]``.
      phases: b, ``[d]``, in [0, 2 pi).
    """

    frequencies: jax.Array
    phases: jax.Array


class World(NamedTuple):
    """Streams of K clients, what happens to them, and what they are tested on.

    Attributes:
      x: ``[T, K, L]`` inputs; read where a sample arrived.
      y: ``[T, K]`` their outputs.
      events: see `Events`.
      features: of the model, the server's and the clients' alike; None for a model
        that is linear in x, d = L.
      test_z: ``[M, d]``, features of held-out inputs.
      test_y: ``[M]``.
    """

    x: jax.Array
    y: jax.Array
    events: Events
    features: Features | None
    test_z: jax.Array
    test_y: jax.Array


def check_world(world: World) -> None:
    """Refuses streams and events that do not belong together.

    Raises:
      ValueError: other shapes than those of `World`; or, where events are known, a
        delay below 0, or a client that is available without a sample.
    """
    for name, leaf in {"x": world.x, **world.events._asdict()}.items():
        if leaf.shape[:2] != world.y.shape:
            raise ValueError(
                f"{name} must be [T, K] like y, {world.y.shape}, got {leaf.shape}."
            )
    arrived, available, delay = world.events
    if isinstance(delay, jax.ShapeDtypeStruct) or not is_known(*world.events):
        return
    check.each_in_range(0, np.inf, delay=delay)
    if (np.asarray(available) & ~np.asarray(arrived)).any():
        raise ValueError("available must be False where no sample arrived, got True.")


def draw_arrivals(key: Key, samples: ArrayLike, iterations: int) -> jax.Array:
    """When samples arrive: in random iterations, each client's all different.

    `samples` ``[K]`` ints are D_k in [0, T]; returns ``[T, K]`` bool.
    """
    check.positive_int(iterations=iterations)
    samples = np.asarray(samples)
    if ((samples < 0) | (samples > iterations)).any():
        raise ValueError(
            f"samples must be in [0, {iterations}], as many as there are iterations, "
            f"got {samples.min()} to {samples.max()}."
        )
    # Of 2^32 values: two alike at the limit, one chance in a million for a client,
    # would give it a sample more.
    order = jax.random.bits(key, (len(samples), iterations))
    last = jnp.sort(order, axis=1)[jnp.arange(len(samples)), samples - 1]
    return ((order <= last[:, None]) & (samples[:, None] > 0)).T


def draw_events(
    key: Key,
    arrived: ArrayLike,
    probability: ArrayLike,
    delay_decay: float = 0.0,
    delay_unit: int = 1,
) -> Events:
    r"""Draws who can take part, and delays with :math:`P(l \ge i u) = \delta^i`.

    Args:
      key: of the draws.
      arrived: ``[T, K]`` bool, see `Events`.
      probability: ``[K]``, of a client with a new sample to be available.
      delay_decay: delta in [0, 1); 0 is no delay.
      delay_unit: u, of which delays are multiples.

    Raises:
      ValueError: a number out of range.
    """
    for p in np.ravel(probability):
        check.in_range(0, 1, probability=p)
    check.fraction(delay_decay=delay_decay)
    check.positive_int(delay_unit=delay_unit)
    arrived = jnp.asarray(arrived)
    there, u = jax.random.uniform(key, (2, *arrived.shape))
    late = jnp.zeros(arrived.shape, jnp.int32)
    if delay_decay:
        late = jnp.floor(jnp.log1p(-u) / np.log(delay_decay)).astype(jnp.int32)
    available = arrived & (there < jnp.asarray(probability)[None])
    return Events(arrived, available, delay_unit * late)


def draw_features(
    key: Key, num_inputs: int, num_features: int, width: float
) -> Features:
    """Draws features of the Gaussian kernel of a width, kappa > 0."""
    check.positive_int(num_inputs=num_inputs, num_features=num_features)
    check.positive(width=width)
    normal, uniform = jax.random.split(key)
    frequencies = jax.random.normal(normal, (num_inputs, num_features)) / width
    phases = jax.random.uniform(uniform, (num_features,), maxval=2 * np.pi)
    return Features(frequencies, phases)


def featurise(features: Features | None, x: jax.Array) -> jax.Array:
    """The features ``[n, d]`` of inputs ``[n, L]``; squared norms are <= 2.

    Without features, the inputs.
    """
    if features is None:
        return x
    frequencies, phases = features
    # Inputs are few: as a sum, not a product of matrices, all of it is one loop.
    angle = phases[None]
    for i in range(len(frequencies)):
        angle = angle + x[:, i : i + 1] * frequencies[i : i + 1]
    return np.sqrt(2 / len(phases)).astype(x.dtype) * _cosine(angle)


# Of sin(2 pi u) / u in powers of u^2 on [0, 1/4], least squares of relative errors.
_SINE = (6.28318528, -41.34168065, 81.60247959, -76.58125642, 39.76049716)


def _cosine(angle: jax.Array) -> jax.Array:
    """The cosine, to 1e-7 and the rounding of its angle."""
    if angle.dtype != jnp.float32:
        return jnp.cos(angle)
    # XLA's takes 40 times as long on CPU, more than all else in an iteration.
    turns = angle * np.float32(0.5 / np.pi)
    u = 0.25 - jnp.abs(turns - jnp.round(turns))
    return u * jnp.polyval(jnp.asarray(_SINE[::-1], u.dtype), u * u, unroll=5)


def held_out_error(world: World, w: jax.Array) -> Metrics:
    """The mean squared error "test_mse" of the server's model on held-out data."""
    prediction = jnp.matmul(world.test_z, w, precision="highest")
    return {"test_mse": jnp.mean(jnp.square(world.test_y - prediction))}
