"""Compression of updates. Arguments out of the ranges given raise ValueError."""

from fedjax_core.compress.quantisers import bit_plan as bit_plan
from fedjax_core.compress.quantisers import majority_vote as majority_vote
from fedjax_core.compress.quantisers import qsgd as qsgd
from fedjax_core.compress.quantisers import quantise as quantise
from fedjax_core.compress.quantisers import quantise_update as quantise_update
from fedjax_core.compress.quantisers import sign as sign
from fedjax_core.compress.quantisers import sketch as sketch
from fedjax_core.compress.quantisers import terngrad as terngrad
from fedjax_core.compress.residual import with_residual as with_residual
from fedjax_core.compress.sparsifiers import sbc as sbc
from fedjax_core.compress.sparsifiers import stc as stc
from fedjax_core.compress.sparsifiers import threshold as threshold
from fedjax_core.compress.sparsifiers import top_k as top_k
