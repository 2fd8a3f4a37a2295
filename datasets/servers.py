r"""Clients of several servers, whose clusters learn tasks that are alike.

- `related_lines`: those of `networks.related_tasks`, in few noisy rows.
- `class_pairs`: two groups of classes to tell apart, of images at hand.

All that is random comes from the key, also under `jax.jit` and `jax.vmap`.

Client key: the client's number; clients of a server follow one another.

Licence: none needed for what is generated; images keep theirs.

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024:92, Section 5.4. Laws of features and noise are ours.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.datasets.networks import related_tasks
from fedjax_core.networks.served import Clients
from fedjax_core.types import Key


def related_lines(
    key: Key,
    num_servers: int = 10,
    clients: int = 15,
    num_clusters: int = 3,
    num_features: int = 60,
    sizes: tuple[int, int] = (2, 9),
    spread: float = 0.15,
    noise_std: float = 2.0,
) -> Clients:
    """Draws `networks.related_tasks` for the clients of servers, one split of them.

    Args:
      key: of the draw.
      num_servers: S.
      clients: of every server; clusters are random and as equal as they can be.
      num_clusters: Q.
      num_features: d.
      sizes: least and most rows of a client, >= 1, drawn uniformly.
      spread: of the models, >= 0.
      noise_std: of labels, >= 0.
    """
    check.non_negative(noise_std=noise_std)
    server = _servers(num_servers, clients)
    shape = len(server), num_clusters, num_features
    variance = noise_std**2, noise_std**2
    tasks = related_tasks(key, *shape, sizes, spread, variance)
    X, y, mask, truth = tasks.train
    return Clients(server, tasks.cluster, X, y, mask, truth)


def class_pairs(
    key: Key,
    train: ArrayLike,
    test: ArrayLike,
    tasks: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_servers: int = 10,
    clients: int = 15,
    sizes: tuple[int, int] = (2, 4),
) -> Clients:
    """Draws images of two groups of classes for every client, labelled -1 and 1.

    An example of the text is an image of every class of its task, drawn with
    replacement from `train`: two images for a pair of classes, six for two triplets.
    Images become rows of norm 1, so that C = 1 bounds the gradients of logistic errors.

    Args:
      key: of the draw.
      train: ``[C, n, d]``, images of every class.
      test: ``[C, n', d]``, others.
      tasks: of every cluster, two groups of as many classes, numbers below C.
      num_servers: S.
      clients: of every server.
      sizes: least and most examples of a client, >= 1, drawn uniformly.

    Raises:
      ValueError: groups of unlike size or classes out of range.
    """
    groups = np.asarray(tasks)
    if groups.ndim != 3 or groups.shape[1] != 2:
        raise ValueError(f"tasks must be pairs of groups of one size, got {tasks!r}.")
    last = np.shape(train)[0] - 1
    if groups.min() < 0 or groups.max() > last:
        raise ValueError(f"tasks must have classes in 0..{last}, got {tasks!r}.")
    split, rows, which = jax.random.split(key, 3)
    server = _servers(num_servers, clients)
    cluster = jax.random.permutation(split, np.arange(len(server)) % len(groups))
    least, most = sizes
    check.positive_int(least_size=least, largest_size=most)
    check.in_range(1, most, least_size=least)
    count = jax.random.randint(rows, (len(server),), least, most + 1)
    mask = jnp.arange(most)[None] < count[:, None]
    each = groups[0].size
    classes = jnp.asarray(groups.reshape(len(groups), each))
    shape = (*mask.shape, each)
    chosen = jax.random.randint(which, shape, 0, np.shape(train)[1])
    X = _unit(train)[classes[cluster][:, None], chosen]
    X = jnp.where(mask[..., None, None], X, 0).reshape(len(cluster), -1, X.shape[-1])
    label = jnp.repeat(jnp.array([-1.0, 1.0]), each // 2)
    y = jnp.broadcast_to(label, shape).reshape(len(cluster), -1)
    held = _unit(test)[classes]
    labels = jnp.broadcast_to(label[None, :, None], held.shape[:3])
    held = held.reshape(len(groups), -1, held.shape[-1])
    exam = held, labels.reshape(len(groups), -1)
    return Clients(server, cluster, X, y, jnp.repeat(mask, each, 1), test=exam)


def _servers(num_servers: int, clients: int) -> Any:
    """The server of every client, of NumPy, so that it is known in a program too."""
    check.positive_int(num_servers=num_servers, clients=clients)
    return np.arange(num_servers * clients) // clients


def _unit(images: ArrayLike) -> jax.Array:
    # On the host: the compiler would fold it, and slowly.
    rows = np.asarray(images, np.float64)
    size = np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
    return jnp.asarray(rows / size, jnp.result_type(float))
