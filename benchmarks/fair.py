"""The server's decision on mixing coefficients, alone and compiled.

    python benchmarks/fair.py --clients 10000 --cohort 100

AAggFF-D decides for all devices from a cohort's losses, AAggFF-S for a few silos by a
quadratic program. Prints milliseconds a decision, as JSON.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp

from fedjax_core.algorithms import aaggff_d, aaggff_s
from fedjax_core.fair import Told

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--clients", type=int, default=10_000, help="devices")
parser.add_argument("--cohort", type=int, default=100, help="devices in a round")
parser.add_argument("--silos", type=int, default=20)
parser.add_argument("--rounds", type=int, default=1000)


def milliseconds(decider, clients: int, cohort: int, rounds: int) -> float:
    """Of one decision, in a loop of so many."""

    def decide(t, carry):
        state, total = carry
        key = jax.random.fold_in(jax.random.key(0), t)
        ids = (jnp.arange(cohort) * 97 + t) % clients
        loss = jax.random.exponential(key, (cohort,))
        told = Told(loss, jnp.ones(cohort, bool), ids, jnp.ones(cohort, int))
        state, weights = decider.update(state, told)
        return state, total + weights.max()

    run = jax.jit(lambda carry: jax.lax.fori_loop(0, rounds, decide, carry))
    carry = decider.init(clients), jnp.float32(0)
    jax.block_until_ready(run(carry))
    clock = time.perf_counter()
    jax.block_until_ready(run(carry))
    return 1e3 * (time.perf_counter() - clock) / rounds


def main() -> None:
    args = parser.parse_args()
    devices = milliseconds(aaggff_d.decider(), args.clients, args.cohort, args.rounds)
    silos = milliseconds(aaggff_s.decider(), args.silos, args.silos, args.rounds)
    print(json.dumps(vars(args) | {"aaggff_d_ms": devices, "aaggff_s_ms": silos}))


if __name__ == "__main__":
    main()
