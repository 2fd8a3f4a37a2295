r"""Attacks on what nodes and clients send: model poisoning and denial of service.

An attack ``attack(message, key) -> message`` is made of operations on entries, so that
it acts alike on one client's update, on the messages of all nodes ``[n, ...]`` and on
those of all directed edges ``[2E, ...]``. `poison` applies one to chosen rows,
`networks.attacks.poison_channel` inside a round on a network, and `poisoned` to the
updates of a fraction of the clients of any server method, `by_mark` to those of clients
that the data name. Data poisoning is in `data`.

Arrays of other shapes and arguments out of the ranges given raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 10.1 and 10.2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_mask, keep_rows, wide
from fedjax_core.privacy.mechanisms import add_gaussian
from fedjax_core.random import stream
from fedjax_core.reduce import select
from fedjax_core.transform import Message, Transform
from fedjax_core.types import ClientProgram, Key, PyTree, trained, with_trained

Attack = Callable[[PyTree, Any], PyTree]
"""``(message, key) -> message``; the key may be None for one that draws nothing."""


def scale(factor: ArrayLike) -> Attack:
    """Sends `factor` times the truth; -1 flips its sign. The factor may be traced."""

    def attack(message, key):
        del key
        _require_floats(message)
        return jax.tree.map(lambda m: m * jnp.asarray(factor, m.dtype), message)

    return attack


def add_noise(sigma: jax.Array | float) -> Attack:
    """Adds independent normal noise of standard deviation `sigma` to every entry."""
    check.positive(sigma=sigma)

    def attack(message, key):
        _require_floats(message)
        # Noise that attacks may be rounded, unlike noise that hides.
        noisy = add_gaussian(key, jax.tree.map(wide, message), sigma)
        return jax.tree.map(lambda new, m: new.astype(m.dtype), noisy, message)

    return attack


def random_update(sigma: jax.Array | float = 1.0) -> Attack:
    """Sends normal noise of standard deviation `sigma` instead of the truth.

    The Byzantine clients of Sattler, "Concepts for Efficient, Adaptive and Robust Deep
    Learning from Distributed Data", TU Berlin 2021, chapter 6.
    """
    noise = add_noise(sigma)
    return lambda message, key: noise(jax.tree.map(jnp.zeros_like, message), key)


def nudge(target: PyTree, strength: ArrayLike = 1.0) -> Attack:
    """Moves messages towards `target`; strength 1 replaces them by it.

    With `high_loss` as the target it denies service, with the parameters of a model
    that has a back door it opens one. The target has leaves ``[...]`` like one message
    (or ``[k, ...]``, one for each); a strength above 1 overshoots, and may be traced.
    """

    def attack(message, key):
        del key
        _require_floats(message)

        def one(m, goal):
            goal = jnp.broadcast_to(jnp.asarray(goal, m.dtype), m.shape)
            move = jnp.asarray(strength, m.dtype) * (goal - m)
            # Exactly the target at full strength.
            return jnp.where(jnp.asarray(strength) == 1, goal, m + move)

        return jax.tree.map(one, message, target)

    return attack


def high_loss(Q: jax.Array, w: jax.Array, distance: ArrayLike) -> jax.Array:
    """Parameters of large loss for a denial of service, at a distance from w ``[d]``.

    From the minimiser w of f(w) = w'Qw + q'w + c, the target's, no other direction
    costs more. Q is ``[d, d]``.
    """
    return w + distance * jnp.linalg.eigh(Q)[1][:, -1]


def poison(
    messages: PyTree, attacked: jax.Array, attack: Attack, key: Key | None = None
) -> PyTree:
    """Replaces the messages of attacked rows and leaves all others bit by bit.

    Args:
      messages: leaves ``[k, ...]``, by node or by directed edge.
      attacked: ``[k]`` bool.
      attack: see the module.
      key: for an attack that draws.
    """
    rows = jax.tree.leaves(messages)[0].shape[:1]
    rows = as_mask("attacked", attacked, rows)
    return keep_rows(rows, attack(messages, key), messages)


def poisoned(attack: Attack, fraction: ArrayLike) -> Transform:
    """Makes attackers of a fraction in [0, 1) of the clients of a server method.

    Whether a client is one is drawn with that probability, which may be traced, when it
    first takes part and stays so: its state is an int8, 1 for an attacker, 0 for an
    honest client and -1 as long as it is open. Write 0 and 1 into these rows to choose
    them yourself. In a `chain` the attack comes after what the client does to its
    honest update and before what the server would enforce; nothing bounds its norm.
    """
    check.fraction(fraction=fraction)

    def apply(message: Message, role: jax.Array, key: Key):
        drawn = jax.random.bernoulli(stream(key, "role"), fraction)
        role = jnp.where(role < 0, drawn.astype(role.dtype), role)
        bad = attack(message.update, stream(key, "attack"))
        sent = select(role == 1, bad, message.update)
        return message._replace(update=sent), role

    return Transform(
        init=lambda update: jnp.int8(-1),
        apply=apply,
        norm_bound=lambda bound: float("inf"),
        name=f"poisoned({fraction})",
    )


def by_mark(
    program: ClientProgram, attack: Attack, mark: str = "attacker"
) -> ClientProgram:
    """Makes attackers of the clients whose examples are marked.

    They do as the honest program does until they send what `attack` makes of their
    update; running statistics beside it stay. Nothing bounds the norm of that. `mark`
    is the name of an array of the examples, bool, True in all of an attacker's.
    """

    def init(shared, client_state, turn):
        return program.init(shared, client_state, turn), jnp.bool_(False)

    def step(shared, carry, batch, turn):
        return program.step(shared, carry[0], batch, turn), batch[mark][0]

    def finish(shared, carry, client_state, turn):
        update, kept, metrics = program.finish(shared, carry[0], client_state, turn)
        metrics.pop("failure", None)  # of the honest update
        bad = attack(trained(update), stream(turn.key, "attack"))
        sent = select(carry[1], bad, trained(update))
        return with_trained(update, sent), kept, metrics

    return ClientProgram(init, step, finish)


def choose(key: Key, num: int, fraction: float) -> jax.Array:
    """Attacked nodes: a random ``floor(fraction num)`` of them, ``[num]`` bool."""
    check.fraction(fraction=fraction)
    count = int(np.floor(fraction * num * (1 + 1e-12)))
    return jax.random.permutation(key, num) < count


def growing(order: Sequence[int], num: int) -> jax.Array:
    """Sets of attacked nodes that grow one by one, ``[len(order) + 1, num]`` bool.

    The first is empty; a run mapped over the rows is a sweep over attack strengths.

    Args:
      order: different nodes, the first to be attacked first.
      num: n.

    Raises:
      ValueError: a node twice or outside 0..n-1.
      TypeError: nodes that are not ints.
    """
    nodes = np.asarray(order) if len(order) else np.zeros(0, int)
    if nodes.dtype.kind not in "iu":
        raise TypeError(f"order must be ints, got dtype {nodes.dtype}.")
    if len(set(nodes.tolist())) < len(nodes) or ((nodes < 0) | (nodes >= num)).any():
        raise ValueError(
            f"order must hold different nodes in 0..{num - 1}, got {list(order)}."
        )
    attacked = np.zeros((len(nodes) + 1, num), bool)
    for i, node in enumerate(nodes, 1):
        attacked[i:, node] = True
    return jnp.asarray(attacked)


def smallest_attack(
    errors: ArrayLike | Sequence[float], rise: float = 0.2
) -> int | None:
    """The smallest number of attacked nodes that raises an error; None if none does.

    Args:
      errors: ``[k + 1]``, the target's validation error with 0, 1, ... attacked nodes,
        finite with 0 and, where not finite, raised.
      rise: by what fraction, > 0; 0.2 is the goal of Jung, Exercise 10.2.
    """
    check.positive(rise=rise)
    errors = np.asarray(errors)
    if errors.ndim != 1 or not errors.size:
        raise ValueError(f"errors must have shape (k + 1,), got {errors.shape}.")
    honest = errors[0]
    if not np.isfinite(honest):
        raise ValueError(f"errors must start with a finite one, got {honest}.")
    raised = (errors > honest) & (errors >= (1 + rise) * honest) | ~np.isfinite(errors)
    return int(raised.argmax()) if raised.any() else None


def _require_floats(message: PyTree) -> None:
    for m in jax.tree.leaves(message):
        if not jnp.issubdtype(m.dtype, jnp.inexact):
            raise TypeError(f"message must be floats to be moved, got {m.dtype}.")
