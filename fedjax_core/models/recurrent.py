"""A recurrent layer that runs fast where the simulator runs.

The textbook loop over time multiplies by the input's weights in every step, and its
automatic derivative adds up a gradient of all weights in every step. But only the
product with the previous output has to wait for the step before. Here the input's
product is one for all steps, the backward loop carries the derivatives of the two
states and nothing else, and the gradient of the recurrent weights is one product after
it.

The layer defines its own reverse derivative, which can be differentiated in reverse
again. Forward-mode differentiation (`jax.jvp`, `jax.hessian`) is not supported.
"""

from typing import NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array: TypeAlias = jax.Array

_BLOCK = 8  # rows transposed together, measured


class LSTM(nn.Module):
    r"""Long short-term memory over whole sequences, from zero states.

    .. math::

      (i_t, f_t, g_t, o_t) &= x_t W + h_{t-1} U + b \\
      c_t &= \sigma(f_t) \, c_{t-1} + \sigma(i_t) \tanh(g_t) \\
      h_t &= \sigma(o_t) \tanh(c_t)

    Its 4 H (C + H + 1) parameters are "input" W [C, 4H], "recurrent" U [H, 4H] and one
    "bias" b [4H], columns in the order i, f, g, o. (PyTorch's layer has 4H more: it
    adds up two biases.) As in Keras, W starts uniform as Glorot has it, U orthogonal,
    and b at 0 but for 1 at f, so that a new layer remembers.

    Attributes:
      features: H.
    """

    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps [T, B, C] to the output of every step, [T, B, H]."""
        steps, batch, channels = x.shape
        width = 4 * self.features
        weights = self.param(
            "input", nn.initializers.glorot_uniform(), (channels, width), jnp.float32
        )
        recurrent = self.param(
            "recurrent",
            nn.initializers.orthogonal(),
            (self.features, width),
            jnp.float32,
        )
        bias = self.param("bias", _ones_at_f, (width,), jnp.float32)
        product = x.reshape(-1, channels) @ weights + bias[None]
        return lstm(product.reshape(steps, batch, width), recurrent)


def _ones_at_f(key: Array, shape: tuple[int], dtype: jnp.dtype) -> Array:
    del key
    return jnp.repeat(jnp.array([0, 1, 0, 0], dtype), shape[0] // 4)


class _Trace(NamedTuple):
    """What the backward pass needs of the forward pass."""

    h: Array  # [T, B, H]
    c: Array  # [T, B, H]
    gates: Array  # [T, B, 4H], behind their nonlinearities
    recurrent: Array  # [H, 4H]


@jax.custom_vjp
def lstm(inputs: Array, recurrent: Array) -> Array:
    """An LSTM on inputs that have been multiplied already; see `LSTM`.

    Args:
      inputs: x_t W + b of every step, [T, B, 4H].
      recurrent: U, [H, 4H].

    Returns:
      h of every step, [T, B, H].
    """
    return _forward(inputs, recurrent)[0]


def _forward(inputs: Array, recurrent: Array) -> tuple[Array, _Trace]:
    features = recurrent.shape[0]
    # sigmoid(x) = tanh(x / 2) / 2 + 1/2: one nonlinearity for all gates, one loop.
    scale = np.repeat(np.array([0.5, 0.5, 1, 0.5], np.float32), features)[None]
    shift = np.repeat(np.array([0.5, 0.5, 0, 0.5], np.float32), features)[None]

    def step(state, x):
        h, c = state
        gates = jnp.tanh((x + h @ recurrent) * scale) * scale + shift
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (h, c), (h, c, gates)

    start = jnp.zeros((inputs.shape[1], features), inputs.dtype)
    _, (h, c, gates) = lax.scan(step, (start, start), inputs)
    return h, _Trace(h, c, gates, recurrent)


def _backward(trace: _Trace, dh: Array) -> tuple[Array, Array]:
    start = jnp.zeros_like(dh[:1])
    h_before, c_before = (jnp.concatenate([start, x[:-1]]) for x in (trace.h, trace.c))
    # For all steps at once, what does not wait for later steps: how h depends on c, and
    # how c and (last quarter) h depend on the arguments of the gates.
    i, f, g, o = jnp.split(trace.gates, 4, axis=-1)
    tanh_c = jnp.tanh(trace.c)
    h_by_c = o * (1 - tanh_c**2)
    state_by_gates = jnp.concatenate(
        [
            g * i * (1 - i),
            c_before * f * (1 - f),
            i * (1 - g**2),
            tanh_c * o * (1 - o),
        ],
        axis=-1,
    )
    # Written out once: on CPU a product with a transposed right operand is slow.
    transposed = lax.optimization_barrier(_transpose(trace.recurrent))

    def step(later, now):
        dh, dc = later
        dh_here, h_by_c, state_by_gates, f = now
        dh = dh + dh_here
        dc = dc + dh * h_by_c
        dgates = jnp.concatenate([dc, dc, dc, dh], axis=-1) * state_by_gates
        return (dgates @ transposed, dc * f), dgates

    _, dgates = lax.scan(
        step, (start[0], start[0]), (dh, h_by_c, state_by_gates, f), reverse=True
    )
    features, width = trace.recurrent.shape
    drecurrent = h_before.reshape(-1, features).T @ dgates.reshape(-1, width)
    return dgates, drecurrent


lstm.defvjp(_forward, _backward)


def _transpose(x: Array) -> Array:
    """The transpose, by blocks of rows that stay in the cache.

    XLA's CPU backend goes down whole columns, 10 times slower on 256 x 1024.
    """
    blocks = [x[i : i + _BLOCK].T for i in range(0, x.shape[0], _BLOCK)]
    return jnp.concatenate(blocks, axis=1)
