"""Arrays of users become JAX's, or are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.arrays import as_float, as_mask


@pytest.mark.parametrize(
    "value",
    [np.array(["1"]), np.array([None]), np.array(["2020-01-01"], "datetime64[D]")],
    ids=["text", "objects", "dates"],
)
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError):
        as_float(value)


def test_masked_arrays_are_refused():
    with pytest.raises(ValueError, match="masked"):
        as_float(np.ma.array([1.0, 2.0], mask=[False, True]))
    with pytest.raises(ValueError, match="masked"):
        as_mask("mask", np.ma.array([True, False], mask=[False, True]), (2,))


def test_a_buffer_of_numpy_is_copied():
    buffer, mask = np.ones(64, np.float32), np.ones(64, bool)
    x, m = as_float(buffer), as_mask("mask", mask, (64,))
    buffer[:], mask[:] = 0, False
    assert x.sum() == m.sum() == 64


def test_ints_and_known_values_in_jit():
    assert as_float(np.array([2**40]))[0] == 2.0**40  # beyond int32
    assert as_float(np.arange(3)).dtype == jnp.result_type(float)
    assert as_float(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    assert as_float(np.arange(2, dtype=jnp.bfloat16)).dtype == jnp.bfloat16
    # What is known stays so: float() fails on a traced value.
    assert jax.jit(lambda x: x + np.asarray(as_float(np.full(1, 2)))[0])(1.0) == 3
