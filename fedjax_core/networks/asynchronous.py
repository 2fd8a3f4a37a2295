r"""Asynchronous execution: nodes act when they are ready, on copies that may be old.

Event t has a set of active nodes, and node i knows :math:`w_j` as it was at the
:math:`t_{ij} \le t`-th event:

.. math::

  w_i^{t+1} = \begin{cases} F_i(w_1^{t_{i1}}, \dots, w_n^{t_{in}}) & i \text{ active} \\
  w_i^t & \text{otherwise.} \end{cases}

A node's own parameters are always current. t counts events, not time. `Schedule` says
who acts and how old the copies are; `run` executes any `operators.Operator` that way.
Arguments out of the ranges given raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 5.8, Eq. (128)-(134).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float, is_known, keep_rows, wide_if_known
from fedjax_core.networks.graph import Graph, check_ints, check_rows, degree
from fedjax_core.networks.iterate import iterate
from fedjax_core.networks.operators import (
    Channel,
    Operator,
    collect,
    finish,
    split,
)
from fedjax_core.types import Key, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Who acts at which event, and how old the copies are that it reads: a pytree.

    Attributes:
      active: ``[T, n]`` bool.
      delay: ``[T, 2E]`` ints, t - t_ij for every directed edge of the graph, in its
        order: 0 is the sender's current row, 1 the one before the last event.
      max_delay: the most that `delay` holds, or more; so many past messages are kept.

    Raises:
      ValueError: other shapes, a delay that is negative, more than `max_delay`, or
        older than the run itself; names event and edge. No event at all.
      TypeError: another dtype, or a `max_delay` that is no int.
    """

    active: ArrayLike
    delay: ArrayLike
    max_delay: int = dataclasses.field(metadata={"static": True})

    def __post_init__(self):
        for name in ("active", "delay"):
            if isinstance(value := getattr(self, name), (list, tuple)):
                object.__setattr__(self, name, np.asarray(value))
        if not all(isinstance(x, (np.ndarray, jax.Array)) for x in self._arrays) or any(
            isinstance(x, Tracer) for x in self._arrays
        ):
            return  # a pytree of something else, on its way through a transformation
        check.non_negative_int(max_delay=self.max_delay)
        active, delay = np.asarray(self.active), np.asarray(self.delay)
        if active.dtype != bool:
            raise TypeError(f"active must be bool, got dtype {active.dtype}.")
        check_ints(delay=delay)
        if active.ndim < 2 or delay.shape[:-1] != active.shape[:-1]:
            raise ValueError(
                "active and delay must have shapes (T, n) and (T, 2E), got "
                f"{active.shape} and {delay.shape}."
            )
        if not active.shape[-2]:
            raise ValueError(
                f"active must have at least one event, got shape {active.shape}."
            )
        event = np.arange(active.shape[-2])[:, None]
        for wrong, rule in (
            (delay < 0, "must be >= 0"),
            (delay > event, "must not reach back before event 0"),
            (delay > self.max_delay, f"must be at most max_delay={self.max_delay}"),
        ):
            if wrong.any():
                *_, t, e = at = tuple(np.argwhere(wrong)[0])
                raise ValueError(
                    f"delay {rule}, got {delay[at]} at event {t} on directed edge {e}."
                )

    @property
    def _arrays(self) -> tuple[Any, Any]:
        return self.active, self.delay

    @property
    def num_events(self) -> int:
        """T."""
        return jnp.shape(self.active)[-2]


def run(
    operator: Operator,
    schedule: Schedule,
    W: PyTree,
    *,
    key: Key | None = None,
    record: Callable[[PyTree], Any] | None = None,
    channel: Channel | None = None,
) -> tuple[PyTree, Any]:
    """Executes every event of a schedule; all active and no delay is a synchronous run.

    It equals `operators.run`, with the same channel and key, then up to rounding.

    What nodes sent at the last ``max_delay + 1`` events is kept in a ring
    ``[max_delay + 1, n, ...]``. A node emits at every event, active or not.

    Args:
      operator: a method on a graph, without a `select` of its own. `project` must act
        on every node for itself.
      schedule: one schedule; map over several with `jax.vmap`.
      W: where to start, leaves ``[n, ...]``.
      key: for methods that draw.
      record: ``(W) -> pytree``, kept after every event.
      channel: what happens to messages on their way, as for `operators.step`. It gets
        those that are read at event t, old ones too.

    Returns:
      The last `W` and the history, ``[T, ...]``.

    Raises:
      ValueError: no graph, an operator with a `select`, a schedule for another number
        of nodes or edges, or a leaf of W that has not one row per node where
        `Operator.keep` asks for it.
    """
    (W, _), history = iterate(
        step(operator, schedule, channel),
        start(operator, schedule, W, key),
        schedule.num_events,
        key=key,
        record=None if record is None else lambda state: record(state[0]),
    )
    return W, history


def start(
    operator: Operator, schedule: Schedule, W: PyTree, key: Key | None = None
) -> tuple[PyTree, PyTree]:
    """The state of `step` before event 0: W, and room for past messages.

    Arguments and errors are those of `run`.
    """
    W = jax.tree.map(jnp.asarray, W)
    if operator.graph is not None and operator.keep is keep_rows:
        check_rows(operator.graph, W)
    first = jax.eval_shape(operator.emit, W, jnp.int32(0), key)
    depth = schedule.max_delay + 1
    return W, jax.tree.map(lambda m: jnp.zeros((depth, *m.shape), m.dtype), first)


def step(
    operator: Operator, schedule: Schedule, channel: Channel | None = None
) -> Callable[..., tuple[PyTree, PyTree]]:
    """One event, ``((W, messages), t, key) -> (W, messages)``, see `start`.

    Arguments and errors are those of `run`.
    """
    graph = operator.graph
    if graph is None:
        raise ValueError("operator must have a graph to run asynchronously.")
    if operator.select is not None:
        raise ValueError("operator must not select nodes itself: the schedule does.")
    check_schedule(schedule, graph)
    active, delay = jnp.asarray(schedule.active), jnp.asarray(schedule.delay)
    depth = schedule.max_delay + 1
    num_rows = len(graph.source) if operator.by_edge else graph.num_nodes
    sender = jnp.arange(num_rows) if operator.by_edge else graph.source

    def event(state, t, event_key):
        W, ring = state
        _, emit_key, channel_key, update_key = split(event_key, 4)
        sent = operator.emit(W, t, emit_key)
        ring = jax.tree.map(lambda r, m: r.at[t % depth].set(m), ring, sent)
        row = (t - delay[t]) % depth * num_rows + sender
        messages = jax.tree.map(
            lambda r: r.reshape(depth * num_rows, *r.shape[2:])[row], ring
        )
        if channel is not None:
            messages = channel(messages, t, channel_key)
        received = collect(operator, messages)
        return finish(operator, W, received, t, update_key, active[t]), ring

    return event


def check_schedule(schedule: Schedule, graph: Graph) -> None:
    """Raises ValueError unless a schedule has a column per node and directed edge."""
    got = jnp.shape(schedule.active)[-1], jnp.shape(schedule.delay)[-1]
    expected = graph.num_nodes, 2 * graph.num_edges
    if got != expected:
        raise ValueError(
            f"schedule must be for {expected[0]} nodes and {expected[1]} directed "
            f"edges, got {got[0]} and {got[1]}."
        )


def check_partially_asynchronous(schedule: Schedule, bound: int) -> None:
    """Refuses a schedule that is not partially asynchronous with the given bound.

    Every delay must be at most `bound`, and every window of `bound` events in the
    record, {t, ..., t + bound - 1}, must have every node active; a record shorter than
    that counts as one window. (The book prints the window as {t, t + 1, t + B - 1}.)

    Raises:
      ValueError: names the event and the node or directed edge.
      TypeError: `bound` is no int.
    """
    check.positive_int(bound=bound)
    active, delay = np.asarray(schedule.active), np.asarray(schedule.delay)
    if (delay > bound).any():
        t, e = np.argwhere(delay > bound)[0]
        raise ValueError(
            f"delay must be at most bound={bound}, got {delay[t, e]} at event {t} on "
            f"directed edge {e}."
        )
    acts = np.cumsum(np.r_[np.zeros((1, active.shape[1]), int), active], 0)
    window = min(bound, len(active))
    idle = acts[window:] == acts[: len(acts) - window]
    if idle.any():
        t, i = np.argwhere(idle)[0]
        raise ValueError(
            f"active must have every node in every window of bound={bound} events, "
            f"has node {i} in none of {t}..{t + window - 1}."
        )


def check_totally_asynchronous(schedule: Schedule, graph: Graph) -> None:
    """Refuses a record that speaks against total asynchrony.

    Nodes must act again and again, and old copies must give way to newer ones. No
    finite record can prove that; this one must show every node active in its second
    half, and every directed edge read there newer than event 0 by its active receiver.

    Raises:
      ValueError: names the node or the directed edge; or a schedule for another graph.
    """
    check_schedule(schedule, graph)
    active, delay = np.asarray(schedule.active), np.asarray(schedule.delay)
    half = len(active) // 2
    idle = ~active[half:].any(0)
    if idle.any():
        i = np.flatnonzero(idle)[0]
        ever = "from event 0" if not active[:, i].any() else f"from event {half}"
        raise ValueError(f"active must go on for every node, stops {ever} at node {i}.")
    read = active[half:, np.asarray(graph.target)]
    newest = delay[half:] < np.arange(half, len(active))[:, None]
    stuck = ~(read & newest).any(0)
    if half and stuck.any():
        raise ValueError(
            "delay must let go of every old copy, stays with event 0 on directed edge "
            f"{np.flatnonzero(stuck)[0]}."
        )


def synchronous(graph: Graph, num_events: int) -> Schedule:
    """All nodes, every event, without delay."""
    check.positive_int(num_events=num_events)
    return Schedule(
        np.ones((num_events, graph.num_nodes), bool),
        np.zeros((num_events, 2 * graph.num_edges), np.int32),
        0,
    )


def partially_asynchronous(
    graph: Graph,
    num_events: int,
    bound: int,
    key: Key,
    *,
    activity: float = 0.5,
    all_start: bool = False,
) -> Schedule:
    """A random schedule that is partially asynchronous with `bound`.

    A node acts with probability `activity`, and always after ``bound - 1`` idle events;
    delays are uniform on 0..min(bound, t).

    Args:
      graph: who hears whom.
      num_events: T.
      bound: Bd >= 1.
      key: decides everything.
      activity: in [0, 1].
      all_start: every node acts at event 0.
    """
    check.positive_int(num_events=num_events, bound=bound)
    check.in_range(0, 1, activity=activity)
    active_key, delay_key = jax.random.split(key)
    shape = num_events, graph.num_nodes
    active = np.array(jax.random.bernoulli(active_key, activity, shape))
    active[0] |= all_start
    idle = np.zeros(graph.num_nodes, int)
    for acts in active:  # a view, written to
        acts |= idle >= bound - 1
        idle = np.where(acts, 0, idle + 1)
    most = np.minimum(bound, np.arange(num_events))[:, None]
    delay = jax.random.randint(
        delay_key, (num_events, 2 * graph.num_edges), 0, most + 1
    )
    return Schedule(active, np.asarray(delay), bound)


def growing_delays(
    graph: Graph,
    num_events: int,
    key: Key,
    *,
    growth: Callable[[np.ndarray], np.ndarray] = np.sqrt,
    activity: float = 0.5,
) -> Schedule:
    """A totally asynchronous schedule: delays grow without a bound, activity is random.

    Args:
      graph: who hears whom.
      num_events: T.
      key: decides who acts.
      growth: ``[T]`` floats t -> delays, rounded down and kept in 0..t. The copy that
        is read must grow new for ever, as with t - sqrt(t).
      activity: probability that a node acts, > 0.
    """
    check.positive_int(num_events=num_events)
    check.positive(activity=activity)
    check.in_range(0, 1, activity=activity)
    events = np.arange(num_events)
    grown = np.floor(growth(events.astype(float)))
    delay = np.clip(grown, 0, events).astype(np.int32)
    active = jax.random.bernoulli(key, activity, (num_events, graph.num_nodes))
    columns = np.tile(delay[:, None], (1, 2 * graph.num_edges))
    return Schedule(np.asarray(active), columns, int(delay.max()))


def lossy_links(graph: Graph, num_events: int, loss: float, key: Key) -> Schedule:
    """All nodes act, but messages get lost, and then the receiver keeps its old copy.

    Args:
      graph: who hears whom.
      num_events: T.
      loss: probability that a message is lost, in [0, 1). Everybody knows event 0.
      key: decides which.
    """
    check.positive_int(num_events=num_events)
    check.fraction(loss=loss)
    shape = num_events, 2 * graph.num_edges
    lost = np.array(jax.random.bernoulli(key, loss, shape))
    lost[0] = False
    event = np.broadcast_to(np.arange(num_events)[:, None], shape)
    newest = np.maximum.accumulate(np.where(lost, 0, event), 0)
    delay = (event - newest).astype(np.int32)
    active = np.ones((num_events, graph.num_nodes), bool)
    return Schedule(active, delay, int(delay.max(initial=0)))


def contraction_bound(
    kappa: ArrayLike, bound: int, t: ArrayLike, *, printed: bool = False
) -> jax.Array:
    r"""How much of max_i ||w_i - w^_i|| is left before event t, at most.

    For operators that contract towards their fixed point in the block-maximum norm, on
    partially asynchronous schedules: :math:`\kappa^{\max(0, t - B + 1) / (2B)}`. The
    book prints :math:`\kappa^{t / (2B + 1)}` (Eq. (134)), which holds for
    :math:`t \ge (B - 1)(2B + 1)`, and for all t only if every node acts at event 0.

    Args:
      kappa: contraction factor in [0, 1).
      bound: B >= 1.
      t: events done, any shape.
      printed: the book's rate.

    Returns:
      Floats of the widest type in use, rounded up: never below the exact value, and 0
      for kappa = 0 only.
    """
    check.positive_int(bound=bound)
    if is_known(kappa) and not (0 <= np.min(kappa) <= np.max(kappa) < 1):
        raise ValueError(f"kappa must be in [0, 1), got {kappa}.")
    result = jnp.finfo(jnp.result_type(float))
    with wide_if_known(kappa, t) as dtype:
        dtype = jnp.promote_types(dtype, result.dtype)
        k, t = jnp.asarray(kappa, dtype), jnp.asarray(t, dtype)
        late = t / (2 * bound + 1)
        power = late if printed else jnp.maximum(0, t - bound + 1) / (2 * bound)
        # The rounding of a power, and of the exponent.
        size = 1 + power * jnp.abs(jnp.log(jnp.where(k > 0, k, 1)))
        up = 1 + 4 * jnp.finfo(dtype).eps * size + result.eps * (dtype != result.dtype)
        exact = (k == 0) | (power == 0)
        limit = jnp.where(exact, k**power, jnp.maximum(k**power * up, result.tiny))
        return jnp.minimum(limit, 1).astype(result.dtype)


def fedrelax_contraction(
    graph: Graph, convexity: ArrayLike, alpha: ArrayLike
) -> jax.Array:
    """The largest 1 / (1 + sc_i/(2 alpha deg_i)): FedRelax in the block-maximum norm.

    f_i - sc_i/2 ||w||^2 is convex, `convexity` is sc_i >= 0, ``[n]``, see
    `quadratic_convexity`. alpha = 0 gives 0, and sc_i = 0 at a node with neighbours 1,
    no contraction. (The book prints Eq. (133) with i free; it is the largest over the
    nodes.)

    Raises:
      ValueError: another number of convexities than nodes, or alpha or a known one
        that is negative or not finite.
    """
    check.non_negative(alpha=alpha)
    check_rows(graph, convexity, "convexity")
    check.each_non_negative("node", convexity=convexity)
    pull = 2 * alpha * degree(graph)
    convexity = jnp.asarray(convexity, pull.dtype)
    total = pull + convexity
    return jnp.where(pull > 0, pull / jnp.where(total > 0, total, 1), 0).max()


def fedgd_contraction(Q: ArrayLike, eta: ArrayLike) -> jax.Array:
    """FedGD's factor in the block-maximum norm, 1 - 2 eta min_i l1(Q_i).

    Q is ``[n, d, d]``, eta at most `fedgd_rate_bound`; beyond it this is no factor.
    """
    return jnp.asarray(1 - eta * quadratic_convexity(Q).min())


def fedgd_rate_bound(graph: Graph, Q: ArrayLike, alpha: ArrayLike) -> jax.Array:
    """1 / (2 max_i (ld(Q_i) + alpha deg_i)), up to which `fedgd_contraction` holds."""
    largest = jnp.linalg.eigvalsh(as_float(Q))[:, -1]
    return 1 / (2 * (largest + alpha * degree(graph).astype(largest.dtype)).max())


def quadratic_convexity(Q: ArrayLike) -> jax.Array:
    """The strong convexity 2 l1(Q_i) of w'Q_i w + q_i'w, never negative; ``[n]``."""
    return 2 * jnp.maximum(jnp.linalg.eigvalsh(as_float(Q))[:, 0], 0)
