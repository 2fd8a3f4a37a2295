"""Compression of updates."""

from fedjax_core.compress.quantisers import bit_plan as bit_plan
from fedjax_core.compress.quantisers import quantise as quantise
from fedjax_core.compress.quantisers import quantise_update as quantise_update
from fedjax_core.compress.sparsifiers import top_k as top_k
