r"""Pre-training of a model's extractor on unlabelled data of the server.

A model is an extractor and a head, the last layer: features are what the head receives.
Contrastive training pulls the features of two views of an example together, through a
projection that is thrown away, and pushes those of different examples apart:

.. math::

  \ell_a = -\log \frac{e^{z_a^\top z_b / \tau}}{\sum_{c \ne a} e^{z_a^\top z_c / \tau}},
  \qquad \lVert z \rVert = 1, \quad a, b \text{ views of one example}.

Text is trained on by its next word: `fedjax_core.server.fit` with the loss of a
language model.

References:
  Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations",
  ICML 2020 (SimCLR), equation 1.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from fedjax_core import check, random, server
from fedjax_core.arrays import as_float
from fedjax_core.data.packed import FederatedData
from fedjax_core.models.model import Model
from fedjax_core.models.zoo import MLP
from fedjax_core.personal import merge, split
from fedjax_core.run_dir import checksum
from fedjax_core.types import (
    Algorithm,
    Batch,
    Checked,
    Fraction,
    Key,
    LocalWork,
    LossFn,
    NonNegative,
    Params,
    Positive,
    PositiveInt,
    Stateful,
    trained,
    with_trained,
)

Augment = Callable[[Key, jax.Array], jax.Array]
"""``(key, x) -> x``, another view of every example, ``[B, ...]``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Checked):
    """How an extractor is trained.

    Attributes:
      learning_rate: of Adam.
      temperature: of the loss.
      projection: widths of the two layers behind the features.
      work: epochs and batch size.
    """

    learning_rate: Positive = 1e-3
    temperature: Positive = 0.5
    projection: tuple[PositiveInt, PositiveInt] = (512, 128)
    work: LocalWork = LocalWork(batch_size=512, epochs=100)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Views(Checked):
    """Random views of images ``[B, H, W, C]`` in [0, 1], an `Augment`.

    Attributes:
      shift: pixels by which a view moves at most, its border repeated.
      flip: whether half of the views are mirrored, left to right.
      brightness: what is added to a view is uniform up to this.
      contrast: by how much more or less than 1 the contrast is.
      noise: standard deviation of normal noise on every pixel.
    """

    shift: Annotated[int, check.non_negative] = 4
    flip: bool = True
    brightness: NonNegative = 0.3
    contrast: Fraction = 0.4
    noise: NonNegative = 0.05

    def __call__(self, key: Key, x: jax.Array) -> jax.Array:
        """Views of the dtype and shape of `x`."""
        return jax.vmap(self._one)(jax.random.split(key, len(x)), x)

    def _one(self, key: Key, x: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 5)
        wide = jnp.pad(x, ((self.shift,) * 2, (self.shift,) * 2, (0, 0)), "edge")
        by = jax.random.randint(keys[0], (2,), 0, 2 * self.shift + 1)
        view = jax.lax.dynamic_slice(wide, (by[0], by[1], 0), x.shape)
        if self.flip:
            view = jnp.where(jax.random.bernoulli(keys[1]), view[:, ::-1], view)
        contrast = 1 + self.contrast * jax.random.uniform(keys[2], minval=-1)
        bright = self.brightness * jax.random.uniform(keys[3], minval=-1)
        view = contrast * (view - view.mean()) + view.mean() + bright
        view += self.noise * jax.random.normal(keys[4], x.shape)
        return jnp.clip(view, 0, 1).astype(x.dtype)


def nt_xent(z: jax.Array, mask: jax.Array, temperature: float = 0.5) -> jax.Array:
    """The contrastive loss of every view, ``[2 B]``.

    Args:
      z: ``[2 B, P]`` projections; rows i and B + i are views of one example.
      mask: ``[2 B]`` bool, rows that count; others are nobody's opposite.
      temperature: > 0.
    """
    check.positive(temperature=temperature)
    # Not by the norm, which has no slope at 0, where dead layers and padding are.
    z = z * jax.lax.rsqrt(jnp.square(z).sum(1, keepdims=True) + 1e-12)
    near = z @ z.T / temperature
    near = jnp.where(jnp.eye(len(z), dtype=bool) | ~mask[None], -jnp.inf, near)
    pair = jnp.roll(jnp.arange(len(z)), len(z) // 2)
    right = (z * z[pair]).sum(1) / temperature
    # A row that does not count may have no opposite at all.
    return jax.nn.logsumexp(jnp.where(mask[:, None], near, 0.0), axis=1) - right


def _with_features(head: str, call: Callable[[], Any]) -> tuple[Any, Any]:
    """The features of what `call` has a model of flax (linen) do, and its result."""
    caught = []

    def catch(method, args, kwargs, context):
        path = "/".join(context.module.path)
        if context.method_name == "__call__" and path == head:
            caught.append(args[0])
        return method(*args, **kwargs)

    with nn.intercept_methods(catch):
        result = call()
    if len(caught) != 1:
        raise ValueError(
            f"head must name a layer that a network of flax (linen) calls once, as "
            f"'Dense_0', got {head!r}, called {len(caught)} times."
        )
    return caught[0], result


def features(
    model: Model, head: str, params: Params, x: ArrayLike, batch_size: int = 256
) -> np.ndarray:
    """What the head of a model receives in evaluation, ``[n, H]`` float32.

    Args:
      model: a classifier with one label an example, a network of flax (linen).
      head: name of its last layer, as in `fedjax_core.personal.split`.
      params: of the model.
      x: ``[n, ...]`` examples.
      batch_size: examples that are looked at together.

    Raises:
      ValueError: the network does not call a layer of that name once.
    """
    x = np.asarray(x)
    batches = max(1, -(-len(x) // batch_size))  # one of padding tells H without any
    short = batches * batch_size - len(x)
    padded = np.concatenate([x, np.zeros((short, *x.shape[1:]), x.dtype)])
    parts = [
        _extract(model.metrics, head, params, some)
        for some in padded.reshape(batches, batch_size, *x.shape[1:])
    ]
    return np.concatenate([np.asarray(p, np.float32) for p in parts])[: len(x)]


def on_features(
    features: Callable[[np.ndarray], np.ndarray], data: FederatedData
) -> FederatedData:
    """The population with features in the place of its examples, the server's "x" too.

    A linear model trained on them is the head of a network whose extractor stays as it
    is ("linear evaluation"), running statistics included. `features` maps ``[n, ...]``
    to ``[n, H]``: the function above with model, head and parameters filled in.
    """
    mapped = data.map(lambda examples: {**examples, "x": features(examples["x"])})
    if "x" not in data.public:
        return mapped
    public = {**data.public, "x": features(np.asarray(data.public["x"]))}
    return dataclasses.replace(mapped, public=public)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _extract(metrics_fn: Any, head: str, params: Params, x: jax.Array) -> jax.Array:
    batch = {"x": x, "y": jnp.zeros(len(x), jnp.int32)}
    return _with_features(head, lambda: metrics_fn(params, batch))[0]


def _contrastive_loss(
    config: Config, model: Model, head: str, augment: Augment
) -> LossFn:
    """The loss of an example, the mean of its two views', against those of its batch.

    Its parameters are the pair of the model's and the projection's.
    """
    project = _projection(config)

    def loss(params: Params, batch: Batch, key: Key) -> Any:
        (own, projection), x = trained(params), as_float(batch["x"])
        first, second, last = jax.random.split(key, 3)
        views = {
            "x": jnp.concatenate([augment(first, x), augment(second, x)]),
            "y": jnp.zeros(2 * len(x), jnp.int32),
            "example_mask": jnp.tile(batch["example_mask"], 2),
        }
        now = with_trained(params, own)
        h, out = _with_features(head, lambda: model.loss(now, views, last))
        z: Any = project.apply({"params": projection}, h)
        losses = nt_xent(z, views["example_mask"], config.temperature)
        losses = losses.reshape(2, -1).mean(0)
        return (losses, out[1]) if isinstance(params, Stateful) else losses

    return loss


def _projection(config: Config) -> MLP:
    *hidden, width = config.projection
    return MLP(width, tuple(hidden))


def contrastive(
    config: Config, model: Model, head: str, x: ArrayLike, key: Key, augment: Augment
) -> tuple[Params, jax.Array]:
    """Trains the extractor of a model on examples without labels.

    Args:
      config: of the training.
      model: a classifier, see `features`.
      head: name of its last layer, which stays as it was drawn.
      x: ``[n, ...]`` examples.
      key: of all that is random.
      augment: how views are drawn, as `Views` of images.

    Returns:
      The model's parameters, and the mean loss over steps.
    """
    start, x = model.init(random.stream(key, "model")), jnp.asarray(x)
    extract = functools.partial(_extract, model.metrics, head)
    width = jax.eval_shape(extract, start, x[:1])
    project = _projection(config)
    drawn = jax.jit(project.init)(
        random.stream(key, "projection"), jnp.zeros(width.shape)
    )
    params, loss = jax.jit(server.fit, static_argnums=(0, 1, 5))(
        _contrastive_loss(config, model, head, augment),
        optax.adam(config.learning_rate),
        with_trained(start, (trained(start), drawn["params"])),
        {"x": x},
        random.stream(key, "fit"),
        config.work,
    )
    return with_trained(params, trained(params)[0]), loss


def starting_from(
    algorithm: Algorithm, extractor: Params, heads: Sequence[str]
) -> Algorithm:
    """The method, but for the extractor that it starts from ("+P" in papers).

    Args:
      algorithm: any.
      extractor: parameters of the model, of which all but the heads are taken.
      heads: names of its last layers, ("Dense_0",) or, of a tuple of models,
        ("0/Dense_0", "1/Dense_1"); they start as the run draws them.
    """
    check.names(heads=heads)
    own, _ = split(extractor, heads)

    def init(params: Params, num_clients: int) -> Any:
        return algorithm.init(merge(own, split(params, heads)[1]), num_clients)

    parts = {**algorithm.parts, "extractor": checksum(jax.device_get(own))}
    return dataclasses.replace(algorithm, init=init, parts=parts)
