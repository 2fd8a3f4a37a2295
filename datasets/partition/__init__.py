"""Splits pooled data sets among clients, in the ways the papers do.

Every example goes to exactly one client, unless an argument says that some are
discarded or everyone's. All splits (train, test, validation if there is one) follow one
map, so that a client is tested on the kind of data it trains on. How many examples of
which class a client gets depends on the seed and the class totals only, not on the
order of the rows.
NumPy's global generator is neither read nor changed.

| function | sizes | labels |
| --- | --- | --- |
| `iid` | equal | as pooled |
| `contiguous` | equal | as the rows come |
| `dirichlet` | vary | Dirichlet over clients, per class |
| `dirichlet_by_client` | equal | Dirichlet over classes, per client |
| `alternating_dirichlet` | equal | the first, rescaled to equal sizes |
| `pathological` | equal | shards of sorted labels, two per client |
| `classes_per_client` | as the classes | an exact number of classes |
| `log_normal` | log-normal | as pooled |
| `balancedness` | geometric | as pooled, or a number of classes |
| `label_swap` | equal | two exchanged per cluster |
| `label_permutation` | equal | permuted per cluster |
| `natural` | as the data | as the data |
| `shared` | as another's, and more | as another's, and a common part |
| `domains` | equal per domain | as each domain |

What they have in common:

Args:
  dataset: pooled arrays [n, ...] per split. The result holds a shuffled copy.
  num_clients: N >= 1.
  seed: int >= 0.
  label: name of the class labels, [n] ints, bools or strings in every split. Where an
    example has several labels, [n, L] as in `medmnist`'s chestmnist, the name and a
    column, ``label=("y", 3)``; those that read no labels need neither. A class may be
    missing from some splits; what train lacks is spread evenly.

Returns:
  The splits of N clients.

Raises:
  ValueError: a number outside its range, no array called `label`, arrays of unequal
    length, or labels not [n].
  TypeError: an int that is none, no `Dataset`, labels of another dtype or of different
    kinds in different splits.

References:
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", dissertation, TU Berlin, 2021: in functions, "Sattler 2021".
"""

from fedjax_core.datasets.partition._classes import classes_per_client, pathological
from fedjax_core.datasets.partition._clusters import (
    Clustered,
    domains,
    label_permutation,
    label_swap,
)
from fedjax_core.datasets.partition._dirichlet import (
    alternating_dirichlet,
    dirichlet,
    dirichlet_by_client,
)
from fedjax_core.datasets.partition._sizes import (
    balancedness,
    contiguous,
    iid,
    log_normal,
    natural,
    shared,
)

__all__ = [
    "Clustered",
    "alternating_dirichlet",
    "balancedness",
    "classes_per_client",
    "contiguous",
    "dirichlet",
    "dirichlet_by_client",
    "domains",
    "iid",
    "label_permutation",
    "label_swap",
    "log_normal",
    "natural",
    "pathological",
    "shared",
]
