"""Times rounds of FedAvg on W1, W2 or W3.

python benchmarks/rounds.py --workload W2
python benchmarks/rounds.py --workload W2 --through simulate
"""

import argparse
import time

import workload_data

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--workload", choices=list(workload_data.COHORT), default="W2")
parser.add_argument("--through", choices=["engine", "simulate"], default="engine")
parser.add_argument("--rounds", type=int, default=12)
parser.add_argument("--devices", type=int, default=2, help="host devices on CPU")
parser.add_argument("--block", type=int, default=1, help="clients per block")


def engine(args: argparse.Namespace) -> tuple[list[float], dict]:
    """Plans and runs every round by hand: the least that a round can cost."""
    import dataclasses

    import jax
    import workloads

    from fedjax_core import plan
    from fedjax_core.devices import ship, ship_cohort
    from fedjax_core.rounds import compiler_options

    data, algorithm = workloads.data(args.workload), workloads.algorithm(args.workload)
    how = workloads.execution_from(args)
    params = workloads.model(args.workload).init(jax.random.key(0))
    usual = plan.usual_capacity(
        data.train.sizes, algorithm.work, how, workload_data.COHORT[args.workload]
    )
    examples = ship(dict(data.train.examples), how.mesh)
    state = ship(algorithm.init(params, data.num_clients), how.mesh)
    run = jax.jit(
        algorithm.round, donate_argnums=0, compiler_options=compiler_options()
    )
    seconds, steps, planning = [], [], []
    loss = 0.0
    for t, ids in enumerate(workload_data.cohorts(args.workload, args.rounds)):
        clock = time.perf_counter()
        draft = plan.Draft(
            ids, data.train.offsets, algorithm.work, seed=0, round=t, execution=how
        )
        cohort = draft.build(plan.fit([draft], usual), num_clients=data.num_clients)
        planning.append(time.perf_counter() - clock)
        cohort = dataclasses.replace(ship_cohort(cohort, how.mesh), examples=examples)
        state, metrics = run(state, cohort, jax.random.key(t))
        loss = float(metrics["train_loss"])
        seconds.append(time.perf_counter() - clock)
        steps.append(int(draft.steps.sum()))
    return seconds, {
        "compilations": run._cache_size(),  # type: ignore[attr-defined]
        "steps_per_round": sorted(steps)[len(steps) // 2],
        "planning_s": round(sorted(planning)[len(planning) // 2], 4),
        "train_loss": loss,
    }


def through_simulate(args: argparse.Namespace) -> tuple[list[float], dict]:
    """The same rounds as a user runs them: metrics, callbacks, planning ahead."""
    import workloads

    from fedjax_core import simulate

    seconds, clock = [], time.perf_counter()

    def tick(report):
        nonlocal clock
        now = time.perf_counter()
        seconds.append(now - clock)
        clock = now

    result = simulate(
        workloads.algorithm(args.workload),
        workloads.data(args.workload),
        workloads.model(args.workload),
        rounds=args.rounds,
        participation=workloads.FixedCohorts(
            workload_data.cohorts(args.workload, args.rounds)
        ),
        eval_every=1,
        callbacks=[tick],
        execution=workloads.execution_from(args),
    )
    loss = float(result.train["train_loss"][0, -1])
    return seconds, {"compilations": result.compilations, "train_loss": loss}


if __name__ == "__main__":
    args = parser.parse_args()
    from fedjax_core import use_host_devices

    use_host_devices(args.devices)
    seconds, extra = (engine if args.through == "engine" else through_simulate)(args)
    workload_data.report(
        "fedjax_core",
        args.workload,
        seconds,
        through=args.through,
        devices=args.devices,
        block=args.block,
        **extra,
    )
