"""The LSTM layer is the textbook's, forward and in reverse, under any transform."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_core.models.recurrent import LSTM

STEPS, BATCH, CHANNELS, FEATURES = 7, 3, 5, 6


def make(seed=0, clients=()):
    """Parameters, inputs and a cotangent of the outputs."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal((*clients, *shape)), jnp.float32)

    params = {
        "input": normal(CHANNELS, 4 * FEATURES),
        "recurrent": normal(FEATURES, 4 * FEATURES),
        "bias": normal(4 * FEATURES),
    }
    return params, normal(STEPS, BATCH, CHANNELS), normal(STEPS, BATCH, FEATURES)


def ours(params, x) -> jax.Array:
    return LSTM(FEATURES).apply({"params": params}, x)  # pyright: ignore


def flax_cell(params, x):
    """The same parameters in flax's cell, its gates one by one."""
    cell = {}
    for k, gate in enumerate("ifgo"):
        columns = slice(k * FEATURES, (k + 1) * FEATURES)
        cell[f"i{gate}"] = {"kernel": params["input"][:, columns]}
        cell[f"h{gate}"] = {
            "kernel": params["recurrent"][:, columns],
            "bias": params["bias"][columns],
        }
    layer = nn.RNN(nn.OptimizedLSTMCell(FEATURES), time_major=True)
    with jax.numpy_rank_promotion("allow"):
        return layer.apply({"params": {"cell": cell}}, x)


def with_gradients(layer):
    def run(params, x, cotangent):
        h, pull = jax.vjp(layer, params, x)
        return h, pull(cotangent)

    return run


def assert_close(got, expected, rtol=1e-4):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10),
        got,
        expected,
    )


def test_outputs_follow_the_formula_in_double_precision():
    params, x, _ = make()
    w, u, b = (
        np.asarray(params[k], np.float64) for k in ("input", "recurrent", "bias")
    )
    h = c = np.zeros((BATCH, FEATURES))
    expected = []
    for x_t in np.asarray(x, np.float64):
        i, f, g, o = np.split(x_t @ w + h @ u + b, 4, axis=-1)
        c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
        h = np.tanh(c) / (1 + np.exp(-o))
        expected.append(h)
    np.testing.assert_allclose(ours(params, x), expected, rtol=1e-4, atol=1e-6)


def test_outputs_and_gradients_are_those_of_flax():
    # An empty batch and a single step as well.
    arguments = make()
    params, x, cotangent = arguments
    cuts = [arguments] + [
        (params, x[:1, cut], cotangent[:1, cut]) for cut in (slice(1), slice(0))
    ]
    got, expected = (
        jax.jit(lambda cuts, f=f: [with_gradients(f)(*a) for a in cuts])(cuts)
        for f in (ours, flax_cell)
    )
    assert_close(got, expected)


def test_clients_under_vmap():
    arguments = make(clients=(4,))
    got = jax.jit(jax.vmap(with_gradients(ours)))(*arguments)
    # One client after the other, in one loop.
    alone = jax.jit(lambda a: lax.map(lambda one: with_gradients(flax_cell)(*one), a))
    assert_close(got, alone(arguments))


def descend(layer, params, x, target):
    """The loss after three steps of gradient descent."""

    def loss(params):
        return jnp.square(layer(params, x) - target).mean()

    def step(params, _):
        gradient = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient), None

    return loss(lax.scan(step, params, length=3)[0])


def test_descent_can_be_differentiated_again():
    arguments = make()
    got, expected = (
        jax.jit(jax.value_and_grad(lambda *a, f=f: descend(f, *a), argnums=(0, 1)))(
            *arguments
        )
        for f in (ours, flax_cell)
    )
    assert_close(got, expected, rtol=1e-3)


def test_saturated_gates_stay_finite():
    params, x, cotangent = make()
    compiled = jax.jit(with_gradients(ours))
    for size in (1e3, 1e30):
        h, gradients = compiled(params, size * x, cotangent)
        assert np.abs(h).max() <= 1
        assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


def test_layers_start_as_in_keras():
    x = jnp.zeros((STEPS, BATCH, CHANNELS))
    params = jax.jit(LSTM(FEATURES).init)(jax.random.key(0), x)["params"]
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes == {"input": (5, 24), "recurrent": (6, 24), "bias": (24,)}
    np.testing.assert_array_equal(params["bias"], np.repeat([0, 1, 0, 0], FEATURES))
    u = np.asarray(params["recurrent"])
    np.testing.assert_allclose(u @ u.T, np.eye(FEATURES), atol=1e-5)
    bound = np.sqrt(6 / (CHANNELS + 4 * FEATURES))
    assert 0.8 * bound < np.abs(np.asarray(params["input"])).max() <= bound
