r"""The tree of clusters: leaves that split, members, and the way down of new clients.

Children are made in pairs, next to each other, as long as there is room; shapes never
change.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_core.clusters.members import Mine, by_cluster, lookup
from fedjax_core.clusters.similarity import similarity
from fedjax_core.map import map_clients
from fedjax_core.reduce import stack
from fedjax_core.types import ClientProgram, Cohort, Key, PyTree, trained


class Tree(NamedTuple):
    """V nodes and N members; the server's tables.

    Attributes:
      parent: ``[V]`` int32, -1 for the root, which is node 0, and for nodes that are
        not in use yet.
      label: ``[N]`` int32, the leaf that each client is in.
      removed: ``[N]`` int32, the round that removed it from training, -1 for none.
    """

    parent: jax.Array
    label: jax.Array
    removed: jax.Array

    @property
    def num_nodes(self) -> int:
        """V."""
        return len(self.parent)

    @property
    def child(self) -> jax.Array:
        """``[V]`` int32, the first child of every node, 0 for a leaf."""
        nodes = jnp.arange(self.num_nodes)
        return (self.parent[None, :] == nodes[:, None]).argmax(1).astype(jnp.int32)

    def leaf(self, client_id: jax.Array) -> jax.Array:
        """The leaves of clients; -1 for padding and who was removed or is not known."""
        return lookup(jnp.where(self.removed < 0, self.label, -1), client_id)

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, from general to specific."""
        way = [int(node)]
        while self.parent[way[-1]] >= 0:
            way.append(int(self.parent[way[-1]]))
        return way[::-1]


def seedling(num_nodes: int, num_clients: int) -> Tree:
    """A root with everybody in it."""
    removed = jnp.full(num_clients, -1, jnp.int32)
    parent = jnp.full(num_nodes, -1, jnp.int32)
    return Tree(parent, jnp.zeros_like(removed), removed)


def complete(tree: Tree, arrived: jax.Array, cohort: Cohort) -> jax.Array:
    """The leaves all of whose members have arrived or have no examples; ``[V]`` bool.

    `arrived` is ``[C]`` bool, by the round's cohort.
    """
    empty = (cohort.num_examples == 0) & (cohort.client_id >= 0)
    leaf = tree.leaf(cohort.client_id)
    there = by_cluster(arrived | empty, leaf, tree.num_nodes)
    return there == by_cluster(tree.removed < 0, tree.label, tree.num_nodes)


def divide(
    tree: Tree, ready: jax.Array, part: jax.Array, cohort: Cohort
) -> tuple[Tree, jax.Array]:
    """Splits leaves; their parts become members of new ones.

    Args:
      tree: the tree.
      ready: ``[V]`` bool, which leaves to split. All their members are in the cohort.
      part: ``[C]`` bool, who goes to the second child.
      cohort: of the round.

    Returns:
      The tree, and ``[V]`` bool, the leaves that did split: the first with room.
    """
    child = (tree.parent >= 0).sum() + 2 * ready.cumsum() - 1
    split = ready & (child + 1 < tree.num_nodes)
    at, who = jnp.where(split, child, tree.num_nodes), jnp.arange(tree.num_nodes)
    parent = tree.parent
    for place in (at, at + 1):
        parent = parent.at[place].set(who.astype(parent.dtype), mode="drop")
    leaf = tree.leaf(cohort.client_id)
    moves = (leaf >= 0) & split[leaf]
    label = tree.label.at[jnp.where(moves, cohort.client_id, len(tree.label))].set(
        (child[leaf] + part).astype(tree.label.dtype), mode="drop"
    )
    return tree._replace(parent=parent, label=label), split


def prune(
    tree: Tree, ready: jax.Array, part: jax.Array, broken: jax.Array, cohort: Cohort
) -> tuple[Tree, jax.Array]:
    """Removes the smaller part of leaves, of equal ones the second.

    Args:
      tree: the tree.
      ready: ``[V]`` bool, from which leaves.
      part: ``[C]`` bool, who is in the second part.
      broken: ``[C]`` bool, who is in no part and removed as well.
      cohort: of the round.

    Returns:
      The tree and `ready`.
    """
    leaf = tree.leaf(cohort.client_id)
    counted = cohort.client_mask & (leaf >= 0) & ~broken
    second = 2 * by_cluster(part & counted, leaf, tree.num_nodes)
    second = second > by_cluster(counted, leaf, tree.num_nodes)  # is the larger one
    goes = broken | counted & ready[leaf] & (part != second[leaf])
    at = jnp.where(goes, cohort.client_id, len(tree.label))
    removed = tree.removed.at[at].set(cohort.round, mode="drop")
    return tree._replace(removed=removed), ready


def fall_back(
    client_metrics: Mapping[str, np.ndarray], metric: str = "accuracy"
) -> tuple[np.ndarray, np.ndarray]:
    """Clients that do worse in their cluster than with the model above keep that one.

    By a metric, larger being better, of `client_metrics` ``[..., N]`` of a `Result` of
    CFL evaluated on validation, which decides, and test examples. Sattler, TU Berlin
    2021, section 6.3.

    Returns:
      Who falls back, ``[..., N]`` bool, and the metric on test examples with the model
      that each client ends up with.
    """

    def of(split, model):
        return np.asarray(client_metrics[f"{split}_{model}_{metric}"])

    worse = of("validation", "cluster") < of("validation", "parent")
    return worse, np.where(worse, of("test", "parent"), of("test", "cluster"))


def assign(
    program: ClientProgram, shared: PyTree, tree: Tree, cohort: Cohort, key: Key
) -> jax.Array:
    r"""Leads new clients down the tree to a leaf, ``[C]`` int32.

    At a node a client computes its update u from the node's model and goes to the child
    with the most similar client, :math:`\arg\max_b \max_{u' \in b} \cos(u, u')` over
    the updates u' of clients that are below. These compute them again, from the model
    that was cut: nothing but models is kept. Whoever sends what a client of the tree
    sends ends up in its leaf. A level costs a round of everybody.

    Args:
      program: receives ``(shared, Mine)``, as by `in_cluster`.
      shared: what it needs besides, models ``[V, ...]`` among it.
      tree: with N clients.
      cohort: those clients, and new ones: all with numbers from N on.
      key: of the clients' draws.

    Returns:
      The leaf of every client of the cohort; -1 for padding and for clients without a
      finite update.

    References:
      Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from
      Distributed Data", TU Berlin 2021, Algorithm 13; it prints the children as 0 and
      1 and their edges as 1 and 2.
    """
    child, leaf = tree.child, tree.leaf(cohort.client_id)
    known = leaf >= 0

    def below_second(node):
        def up(_, at):
            above = tree.parent[at]
            return jnp.where((above == node) | (above < 0), at, above)

        at = lax.fori_loop(0, tree.num_nodes, up, jnp.maximum(leaf, 0))
        return at == child[node] + 1

    def level(carry):
        node, _ = carry
        results = map_clients(
            program, shared, cohort, key, reduce=stack(),
            each=Mine(node, cohort.client_id),
        )  # fmt: skip
        S, side = similarity(trained(results.update)), below_second(node)
        beside = (known & results.valid)[None] & (node[:, None] == node[None])
        first, second = (
            jnp.where(beside & (side == b)[None], S, -2).max(1) for b in (0, 1)
        )
        goes = jnp.where(known, side, first <= second)
        return jnp.where(child[node] > 0, child[node] + goes, node), results.valid

    def unfinished(carry):
        return (child[carry[0]] > 0).any()

    start = jnp.zeros_like(leaf), cohort.client_mask
    node, valid = lax.while_loop(unfinished, level, start)
    return jnp.where(valid, node, -1)
