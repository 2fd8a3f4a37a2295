"""Eight host devices, strict promotion, and the function fixtures tests share."""

import sys
from pathlib import Path

import jax
import pytest

# The installed package, before the checkout comes first on the path for `tests` and
# `docs`: in a checkout without symbolic links sub-packages are missing.
from fedjax_core import use_host_devices

sys.path.insert(0, str(Path(__file__).parents[1]))

# Before anything touches jax. Tests of one device pass an Execution without mesh.
use_host_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
    """Computes in double precision."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=["eager", "jit"])
def run(request):
    """The function as it is, or compiled: both must give the same numbers."""
    return jax.jit if request.param == "jit" else lambda f: f
