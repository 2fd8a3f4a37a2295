"""Splits pooled data sets among clients, in the ways the papers do.

Every example goes to exactly one client, unless an argument says that some are
discarded. All splits (train, test, validation if there is one) follow one map, so that
a client is tested on the kind of data it trains on. How many examples of which class a
client gets depends on the seed and the class totals only, not on the order of the rows.
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
| `domains` | equal per domain | as each domain |
"""

from fedjax_core.datasets.partition._alternating_dirichlet import alternating_dirichlet
from fedjax_core.datasets.partition._balancedness import balancedness
from fedjax_core.datasets.partition._classes_per_client import classes_per_client
from fedjax_core.datasets.partition._clusters import Clustered
from fedjax_core.datasets.partition._contiguous import contiguous
from fedjax_core.datasets.partition._dirichlet import dirichlet
from fedjax_core.datasets.partition._dirichlet_by_client import dirichlet_by_client
from fedjax_core.datasets.partition._domains import domains
from fedjax_core.datasets.partition._iid import iid
from fedjax_core.datasets.partition._label_permutation import label_permutation
from fedjax_core.datasets.partition._label_swap import label_swap
from fedjax_core.datasets.partition._log_normal import log_normal
from fedjax_core.datasets.partition._natural import natural
from fedjax_core.datasets.partition._pathological import pathological

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
]
