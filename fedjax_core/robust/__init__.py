"""Aggregation that tolerates arbitrary values."""

from fedjax_core.robust.median import subgradient_residual as subgradient_residual
from fedjax_core.robust.median import weiszfeld as weiszfeld
from fedjax_core.robust.rules import Rule as Rule
from fedjax_core.robust.rules import average as average
from fedjax_core.robust.rules import clip_extremes as clip_extremes
from fedjax_core.robust.rules import clipped_mean as clipped_mean
from fedjax_core.robust.rules import coordinate_median as coordinate_median
from fedjax_core.robust.rules import geometric_median as geometric_median
from fedjax_core.robust.rules import krum as krum
from fedjax_core.robust.rules import suspects_among as suspects_among
from fedjax_core.robust.rules import trim_extremes as trim_extremes
from fedjax_core.robust.rules import trimmed_mean as trimmed_mean
