"""Clusters of clients: found in what they send, bounded in theory, trained apart."""

from fedjax_core.clusters.bipartition import bipartition as bipartition
from fedjax_core.clusters.bipartition import separation as separation
from fedjax_core.clusters.lloyd import lloyd as lloyd
from fedjax_core.clusters.members import cluster_means as cluster_means
from fedjax_core.clusters.members import in_cluster as in_cluster
from fedjax_core.clusters.secret import SharedMap as SharedMap
from fedjax_core.clusters.secret import no_map as no_map
from fedjax_core.clusters.secret import permutation as permutation
from fedjax_core.clusters.secret import reflection as reflection
from fedjax_core.clusters.similarity import row_norms as row_norms
from fedjax_core.clusters.similarity import similarity as similarity
from fedjax_core.clusters.tree import Tree as Tree
from fedjax_core.clusters.tree import assign as assign
from fedjax_core.clusters.tree import fall_back as fall_back
