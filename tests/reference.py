"""Federated algorithms in NumPy, float64, one client and one step at a time.

Nothing here is shared with the package. The only thing read off it is the order in
which a plan visits examples. At the end stands the same loss for the package.
"""

from collections.abc import Mapping

import jax
import numpy as np

Tree = dict[str, np.ndarray]


def visits(cohort) -> dict[int, list[np.ndarray]]:
    """Which examples each client of a plan sees: client id -> one array per step."""
    queue, out = cohort.queue, {}
    slots, rows = np.asarray(queue.slot), np.asarray(queue.rows)
    starts, ids = np.asarray(queue.row_start), np.asarray(cohort.client_id)
    steps = np.asarray(cohort.num_steps)
    for d in range(slots.shape[0]):
        for m in range(int(queue.blocks[d])):
            for slot, start in zip(slots[d, m], starts[d, m], strict=True):
                if slot < len(ids):
                    mine = rows[d, start : start + steps[slot]]
                    assert int(ids[slot]) not in out, "scheduled twice"
                    out[int(ids[slot])] = [row[row >= 0] for row in mine]
    return out


def softmax_gradient(params: Tree, x: np.ndarray, y: np.ndarray) -> tuple[float, Tree]:
    """Mean cross-entropy of softmax(x w + b) and its gradient."""
    logits = x @ params["w"] + params["b"]
    logits = logits - logits.max(1, keepdims=True)
    p = np.exp(logits)
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    error = (p - np.eye(p.shape[1])[y]) / len(y)
    return float(loss), {"w": x.T @ error, "b": error.sum(0)}


def local_sgd(
    params: Tree,
    x: np.ndarray,
    y: np.ndarray,
    batches: list[np.ndarray],
    lr: float,
    correction: Tree | None = None,
    proximal: float = 0.0,
    momentum: float = 0.0,
) -> tuple[Tree, list[float]]:
    """SGD through `batches` of indices.

    `correction` is added to every gradient, and so is `proximal` times the way from the
    start.
    """
    start, params, losses = params, dict(params), []
    velocity = {name: np.zeros_like(p) for name, p in params.items()}
    for batch in batches:
        loss, grad = softmax_gradient(params, x[batch], y[batch])
        losses.append(loss)
        for name in params:
            extra = proximal * (params[name] - start[name])
            extra = extra if correction is None else extra + correction[name]
            velocity[name] = momentum * velocity[name] + grad[name] + extra
            params[name] = params[name] - lr * velocity[name]
    return params, losses


def fedavg_delta(
    params: Tree,
    x: np.ndarray,
    y: np.ndarray,
    orders: dict[int, list[np.ndarray]],
    weights: Mapping[int, float],
    client_lr: float,
) -> tuple[Tree, dict[int, float]]:
    """The weighted mean of the clients' moves, and each one's mean loss over steps."""
    total = {name: np.zeros_like(p) for name, p in params.items()}
    mass, loss = 0.0, {}
    for i, batches in orders.items():
        local, losses = local_sgd(params, x, y, batches, client_lr)
        loss[i] = float(np.mean(losses))
        mass += weights[i]
        for name in total:
            total[name] += weights[i] * (local[name] - params[name])
    return {name: t / mass for name, t in total.items()}, loss


def fedavg_round(
    params: Tree,
    x: np.ndarray,
    y: np.ndarray,
    orders: dict[int, list[np.ndarray]],
    weights: Mapping[int, float],
    client_lr: float,
    server_lr: float,
) -> Tree:
    """McMahan et al. (2017), Algorithm 1, with a server step size."""
    delta, _ = fedavg_delta(params, x, y, orders, weights, client_lr)
    return {name: p + server_lr * delta[name] for name, p in params.items()}


def scaffold_round(
    params: Tree,
    control: Tree,
    controls: list[Tree],
    x: np.ndarray,
    y: np.ndarray,
    orders: dict[int, list[np.ndarray]],
    client_lr: float,
    server_lr: float,
) -> tuple[Tree, Tree, list[Tree]]:
    """Karimireddy et al. (2020), Algorithm 1, option II for the control variates.

    Args:
      params: x of the paper.
      control: c.
      controls: the c_i of all N clients.
      x: examples of the population.
      y: their labels.
      orders: the cohort S and its batches.
      client_lr: eta_l.
      server_lr: eta_g.

    Returns:
      The new x, c and c_i.
    """
    controls, moves, changes = list(controls), [], []
    for i, batches in orders.items():
        correction = {name: control[name] - controls[i][name] for name in params}
        local, _ = local_sgd(params, x, y, batches, client_lr, correction)
        new = {
            name: controls[i][name]
            - control[name]
            + (params[name] - local[name]) / (len(batches) * client_lr)
            for name in params
        }
        moves.append({name: local[name] - params[name] for name in params})
        changes.append({name: new[name] - controls[i][name] for name in params})
        controls[i] = new
    cohort, population = len(orders), len(controls)
    params = {
        name: p + server_lr / cohort * np.sum([m[name] for m in moves], axis=0)
        for name, p in params.items()
    }
    control = {
        name: c + np.sum([m[name] for m in changes], axis=0) / population
        for name, c in control.items()
    }
    return params, control, controls


def softmax_problem(
    sizes: list[int] | np.ndarray, *, features: int = 3, classes: int = 3, seed: int = 0
) -> tuple[dict[str, np.ndarray], np.ndarray, Tree]:
    """Random examples ``{"x", "y"}``, client offsets and parameters, all float32."""
    rng = np.random.default_rng(seed)
    n = int(np.sum(sizes))
    examples = {
        "x": rng.normal(size=(n, features)).astype(np.float32),
        "y": rng.integers(0, classes, n).astype(np.int32),
    }
    params = {
        "w": rng.normal(size=(features, classes)).astype(np.float32),
        "b": rng.normal(size=classes).astype(np.float32),
    }
    return examples, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), params


def softmax_loss(params, batch, key):
    """`softmax_gradient`'s loss for the package: one value per example."""
    del key
    logits = batch["x"] @ params["w"] + params["b"][None]
    return -jax.nn.log_softmax(logits)[jax.numpy.arange(len(logits)), batch["y"]]
