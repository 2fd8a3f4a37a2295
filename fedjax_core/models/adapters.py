"""Networks of flax, or plain functions, as models of the simulator.

In training a network is told that it trains, draws from the key of the step, and
normalises by the real rows of a batch; in evaluation it is deterministic and uses its
running statistics. Rows that `example_mask` hides are zeros on the way in, and their
labels missing or 0, so that not even a NaN in them reaches a gradient. Where `example`
is of floats, `x` of integers or bools is converted. When tracing, ValueError where `x`
or `y` has another shape, and where batch normalisation sees an array whose leading axis
is not the batch.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from fedjax_core import check
from fedjax_core.arrays import along_rows, name_of
from fedjax_core.models.model import Model
from fedjax_core.models.tasks import Task, classes, next_token
from fedjax_core.types import Batch, Key, Metrics, Params, PyTree, Stateful, trained

Array: TypeAlias = jax.Array
Example: TypeAlias = np.ndarray | jax.Array | jax.ShapeDtypeStruct
"""Shape and dtype of ONE example's `x`, without the batch axis."""


def classifier(
    module: nn.Module,
    example_shape: Sequence[int],
    dtype: DTypeLike = jnp.float32,
    *,
    missing: int | None = None,
) -> Model:
    """A flax module as a classifier: `from_linen` for the task `classes`.

    Args:
      module: maps `x` [B, *example_shape] to logits [B, num_classes].
      example_shape: shape of one example, without the batch axis.
      dtype: of `x`: an integer type where the module looks up embeddings.
      missing: a label that is not scored, see `classes`.

    Raises:
      ValueError, TypeError: `example_shape` holds what is not an int >= 1.
    """
    for size in example_shape:
        check.positive_int(example_shape=size)
    example = jax.ShapeDtypeStruct(tuple(example_shape), dtype)
    return from_linen(module, example, classes(missing))


def language_model(module: nn.Module, length: int, pad: int = 0) -> Model:
    """A flax module as a model of the next token at every position.

    An example is a piece of text: `x` [B, length] its tokens, `y` [B, length] the token
    after each, int32. Targets that are `pad` are not scored, see `next_token`.

    Args:
      module: maps `x` to logits [B, length, num_tokens].
      length: tokens of a piece.
      pad: the token that fills up pieces.

    Raises:
      ValueError, TypeError: `length` is not an int >= 1.
    """
    check.positive_int(length=length)
    example = jax.ShapeDtypeStruct((length,), jnp.int32)
    return from_linen(module, example, next_token(pad))


def from_functions(
    init: Callable[[Key], Params],
    apply: Callable[[Params, Array, Key | None], Array],
    example: Example,
    task: Task,
) -> Model:
    """A pair of plain functions as a model.

    Args:
      init: key -> params, any pytree of arrays.
      apply: (params, x [B, ...], key) -> outputs [B, ...]; the key is None in
        evaluation.
      example: shape and dtype of one example's `x`.
      task: what the outputs are for.
    """
    return _model(init, lambda p, x, _, key: (apply(p, x, key), ()), example, task)


def from_linen(module: nn.Module, example: Example, task: Task) -> Model:
    """A flax (linen) module as a model.

    Collections other than "params" (batch statistics, counters) are running statistics
    of a `Stateful`. A ``__call__`` with an argument `train`, `training` or
    `deterministic` is told through it whether it trains; dropout draws from the key of
    the step.

    Args:
      module: maps `x` [B, ...] to outputs [B, ...].
      example: shape and dtype of one example's `x`.
      task: what the outputs are for.
    """
    names = inspect.signature(type(module).__call__).parameters

    def told(training: bool) -> dict[str, Any]:
        told = {"train": training, "training": training, "deterministic": not training}
        return {name: value for name, value in told.items() if name in names}

    def init(key: Key) -> Params:
        x = jnp.zeros((1, *example.shape), example.dtype)
        stats = dict(module.init(key, x, **told(False)))
        params = stats.pop("params", {})
        return Stateful(params, stats) if stats else params

    def apply(params: Params, x: Array, mask: Array, key: Key | None) -> Any:
        stats = params.stats if isinstance(params, Stateful) else {}
        variables = {"params": trained(params), **stats}
        if key is None:
            return module.apply(variables, x, **told(False)), stats
        how = {"mutable": list(stats), **told(True)}
        with _real_rows(mask), nn.intercept_methods(_intercept):
            # Every stream of random numbers falls back to this one.
            return module.apply(variables, x, rngs={"params": key}, **how)

    return _model(init, apply, example, task)


def from_nnx(
    make: Callable[[nnx.Rngs], nnx.Module], example: Example, task: Task
) -> Model:
    """A flax NNX module as a model.

    Variables other than `nnx.Param` and the state of random streams are running
    statistics of a `Stateful`; parameters are named by their path, as in
    "layers/0/kernel". Streams start anew from the key of every step.

    Args:
      make: rngs -> module, which maps `x` [B, ...] to outputs [B, ...].
      example: shape and dtype of one example's `x`.
      task: what the outputs are for.
    """

    def split(module: nnx.Module) -> Any:
        return nnx.split(module, nnx.Param, nnx.RngState, ...)

    def build(key: Key) -> nnx.Module:
        module = make(nnx.Rngs(key))
        for _, layer in nnx.iter_modules(module):
            if isinstance(layer, nnx.BatchNorm):
                object.__setattr__(layer, "__class__", _masked(type(layer)))
        return module

    abstract = nnx.eval_shape(lambda: build(jax.random.key(0)))
    graph, *shapes = split(abstract)

    def init(key: Key) -> Params:
        _, params, _, stats = split(build(key))
        params, stats = _by_path(params), _by_path(stats)
        return Stateful(params, stats) if stats else params

    def apply(params: Params, x: Array, mask: Array, key: Key | None) -> Any:
        stats = params.stats if isinstance(params, Stateful) else {}
        module = nnx.merge(
            graph,
            _from_paths(shapes[0], trained(params)),
            _streams(shapes[1], jax.random.key(0) if key is None else key),
            _from_paths(shapes[2], stats),
        )
        if key is None:
            module.eval()
        else:
            module.train()
        with _real_rows(mask):
            outputs = module(x)  # pyright: ignore[reportCallIssue]
        return outputs, _by_path(split(module)[3])

    return _model(init, apply, example, task)


def _model(
    init: Callable[[Key], Params],
    apply: Callable[[Params, Array, Array, Key | None], tuple[Array, PyTree]],
    example: Example,
    task: Task,
) -> Model:
    """A model of (params, x, mask, key) -> (outputs, new statistics)."""
    shape, dtype = tuple(example.shape), example.dtype
    ids = {}
    if task.ids is not None:
        one = jax.ShapeDtypeStruct((1, *shape), dtype)
        outputs, _ = jax.eval_shape(
            lambda x: apply(init(jax.random.key(0)), x, jnp.ones(1, bool), None), one
        )
        ids["y"] = task.ids(outputs.shape[1:])
    missing = ids["y"].missing if ids else None

    def run(params: Params, batch: Batch, key: Key | None) -> Any:
        """Outputs, the batch they are scored with, and new statistics."""
        x = batch["x"]
        if x.shape[1:] != shape:
            raise ValueError(
                f"batch['x'] must have shape (B, *{shape}), got {x.shape}."
            )
        wanted, given = (jnp.issubdtype(t, jnp.inexact) for t in (dtype, x.dtype))
        if wanted and not given:
            x = x.astype(dtype)
        batch = {**batch, "x": x}
        mask = batch.pop("example_mask", None)
        if mask is None:
            mask = jnp.ones(len(x), bool)
        else:
            mask = mask.astype(bool)
            for name, values in batch.items():
                fill = (missing or 0) if name == "y" else 0
                fill = np.asarray(fill).astype(values.dtype)
                batch[name] = jnp.where(along_rows(mask, values), values, fill)
        outputs, stats = apply(params, batch["x"], mask, key)
        wide = jnp.promote_types(outputs.dtype, jnp.float32)
        return outputs.astype(wide), {**batch, "example_mask": mask}, stats

    def loss(params: Params, batch: Batch, key: Key) -> Any:
        outputs, batch, stats = run(params, batch, key)
        losses = task.loss(outputs, batch)
        return (losses, stats) if isinstance(params, Stateful) else losses

    def metrics(params: Params, batch: Batch) -> Metrics:
        outputs, batch, _ = run(params, batch, None)
        if task.metrics is None:
            return {"loss": task.loss(outputs, batch)}
        return task.metrics(outputs, batch)

    return Model(init, loss, metrics, ids)


# ---- padding and batch normalisation ----

_MASK: contextvars.ContextVar[Array] = contextvars.ContextVar("mask")


@contextlib.contextmanager
def _real_rows(mask: Array) -> Iterator[None]:
    """Batch normalisation inside looks at the rows of `mask` alone."""
    # A client without work sees padding only, and the mean of nothing is NaN.
    token = _MASK.set(mask | ~mask.any())
    try:
        yield
    finally:
        _MASK.reset(token)


def _mask_for(x: Array) -> Array:
    mask = _MASK.get()
    if x.shape[0] != len(mask):
        raise ValueError(
            f"batch normalisation must see a leading axis of {len(mask)} examples, got "
            f"shape {x.shape}."
        )
    return along_rows(mask, x)


def _intercept(
    call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext
) -> Any:
    is_norm = isinstance(context.module, nn.BatchNorm)
    if is_norm and context.method_name == "__call__":
        kwargs = {"mask": _mask_for(args[0] if args else kwargs["x"]), **kwargs}
    return call(*args, **kwargs)


@functools.cache
def _masked(layer: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    """The class of a layer, but that it looks at real rows alone."""

    def __call__(self, x, *args, **kwargs):
        return layer.__call__(self, x, *args, **{"mask": _mask_for(x), **kwargs})

    make_class: Any = type(layer)  # a metaclass of NNX
    return make_class(layer.__name__, (layer,), {"__call__": __call__})


# ---- states of NNX as plain dicts ----


def _by_path(state: PyTree) -> dict[str, Array]:
    leaves = jax.tree.leaves_with_path(state)
    return {name_of(path).removesuffix("/value"): x for path, x in leaves}


def _from_paths(like: PyTree, arrays: dict[str, Array]) -> PyTree:
    order = _by_path(like)
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[k] for k in order])


def _streams(like: PyTree, key: Key) -> PyTree:
    """The state of random streams that start from keys of their own."""

    def start(i: int, x: jax.ShapeDtypeStruct) -> Array:
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jnp.zeros(x.shape, x.dtype)  # how many were drawn
        own = jax.random.fold_in(key, i)
        return jax.random.split(own, x.shape) if x.shape else own

    leaves, form = jax.tree.flatten(like)
    return jax.tree.unflatten(form, [start(i, x) for i, x in enumerate(leaves)])
