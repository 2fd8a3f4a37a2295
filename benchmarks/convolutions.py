"""Times a 3 x 3 convolution with its gradients, as patches and in Winograd's form.

taskset -c 0 python benchmarks/convolutions.py
"""

import json
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_core.models import layers, winograd
from fedjax_core.rounds import compiler_options

TURNS, REPEATS = 5, 7
# Images, side without padding, channels in and out.
SHAPES = [
    *((20, 28, 1, 32), (20, 26, 32, 64)),  # EMNIST CNN
    *((20, 34, 3, 16), (20, 34, 16, 16), (20, 34, 32, 32)),  # CIFAR-10, ResNet-8
    *((20, 18, 64, 64), (20, 18, 128, 128), (20, 10, 256, 256), (20, 6, 512, 512)),
    *((20, 34, 16, 64), (20, 34, 32, 128), (20, 34, 8, 128)),  # from few to many
    *((4, 10, 16, 16), (4, 6, 64, 64), (32, 9, 32, 32), (32, 7, 32, 32)),  # small
]


def many(conv, shape):
    """A compiled loop of convolutions and gradients, none of which can be left out."""
    batch, side, channels, features = shape
    rng = np.random.default_rng(0)
    x, kernel, dy = (
        jnp.asarray(rng.normal(size=s), jnp.float32)
        for s in (
            (batch, side, side, channels),
            (3, 3, channels, features),
            (batch, side - 2, side - 2, features),
        )
    )

    @partial(jax.jit, compiler_options=compiler_options())
    def loop(x, kernel, dy):
        def once(_, total):
            a, b, c = lax.optimization_barrier((x, kernel, (dy, total)))
            y, pull = jax.vjp(conv, a, b)
            return total + sum(z.sum() for z in (y, *pull(c[0])))

        return lax.fori_loop(0, TURNS, once, jnp.float32(0))

    return lambda: loop(x, kernel, dy).block_until_ready()


for shape in SHAPES:
    forms = {
        "patches": many(lambda x, k: layers.conv(x, k, lowering="patches"), shape),
        "winograd": many(winograd.conv, shape),
    }
    seconds = {name: [] for name in forms}
    for _ in range(REPEATS + 1):
        for name, run in forms.items():
            clock = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - clock)
    ms = {
        f"{k}_ms": round(1e3 * np.median(v[1:]) / TURNS, 3) for k, v in seconds.items()
    }
    x, kernel = (jnp.empty(s) for s in ((*shape[:2], *shape[1:3]), (3, 3, *shape[2:])))
    chosen = winograd.pays(x, kernel)
    print(json.dumps({"shape": shape, **ms, "winograd is chosen": chosen}))
