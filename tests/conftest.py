"""Eight host devices, strict promotion, and the function fixtures tests share."""

import gc
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

# Compiling is most of what tests do. What several tests, workers or processes that they
# start compile is compiled once; jax reads this when it is imported.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Programs need not say where their operations were written.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import jax
import pytest

# The installed package, before the checkout comes first on the path for `tests` and
# `docs`: in a checkout without symbolic links sub-packages are missing.
from fedjax_core import use_host_devices

sys.path.insert(0, str(Path(__file__).parents[1]))

# These take half off compiling. XLA ends a process that gives it a flag it does not
# know, so only versions that have them get them.
# `.ci/run` runs an experiment without.
if "XLA_FLAGS" not in os.environ and version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] = (
        "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
        " --xla_cpu_parallel_codegen_split_count=1"
    )

# Tracing makes so many objects that the default looks through all of them, of every
# library, again and again: a tenth of the time.
gc.set_threshold(100_000, 20, 100)


# Files that are long, first: no worker is left alone with one at the end.
LONG = ("notebooks", "experiments", "how_to", "test_contract", "test_simulate")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONG))


def pytest_collection_finish(session):
    gc.freeze()


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
