"""The command line: experiments, data sets, and what this machine can do."""

import argparse
import difflib
import importlib
import importlib.metadata
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_core import RunDirError, use_host_devices
from fedjax_core.data.readers.files import DataFileError
from fedjax_core.record import to_json
from fedjax_core.run_dir import last_evaluations

EXPERIMENTS = {
    "quickstart": "FedAvg on handwritten digits, 100 clients, error bars over 5 seeds",
    "book_exercises": "exercises of Jung's book, the right numbers beside ours",
    "cfd_tables": "federated distillation in few bits: Sattler's tables (needs files)",
    "fedaux_tables": "ensembles weighted by private certainties: FedAUX and others",
    "fmi_weather": "tomorrow's weather at 200 stations: alone, over a network, as one",
    "gtvmin_demo": "clustered regression on a network: alone, by GTVMin, by oracle",
    "heart_disease": "four hospitals: alone, together and pooled (needs files)",
    "mnist_by_writer": "MNIST with its writers as clients, new ones too (needs files)",
    "partitions": "one figure: what every partitioner gives to whom",
    "personalization": "personal models on digits, two kinds a client: all methods",
    "server_optimizers": "FedAvg, M, Adam, Yogi, Adagrad, each with its rates chosen",
    "slide_demos": "FedGD by a server, FedAvg, FedGD without a clock: Jung's slides",
    "stragglers": "slow devices: waiting, dropping, buffering, on virtual time",
    "shakespeare": "a character LSTM on the roles of Shakespeare's plays",
}
"""Every experiment: a module here with `Experiment`, `PRESETS` and `main`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    for stream in (sys.stdout, sys.stderr):
        # A sign that the output's encoding lacks must not end a run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    parser = argparse.ArgumentParser(
        prog="fedjax-core", description="Federated-learning simulation in JAX."
    )
    version = f"%(prog)s {importlib.metadata.version('fedjax_core')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="list the experiments")
    run = commands.add_parser(
        "run",
        help="run an experiment",
        description="Run an experiment; 'run NAME --help' lists its options.",
        add_help=False,
    )
    run.add_argument("name", nargs="?", help="see 'fedjax-core list'")
    show = commands.add_parser("show", help="show the settings of an experiment")
    show.add_argument("name", help="see 'fedjax-core list'")
    show.add_argument("--preset", default="default")
    data = commands.add_parser("data", help="list the data sets, or show one")
    data.add_argument("name", nargs="?", help="of a data set")
    data.add_argument("--path", type=Path, help="where its files are")
    data.add_argument("--clients", type=int, default=20, help="if it has none itself")
    data.add_argument("--alpha", type=float, default=0.3, help="and how unlike")
    data.add_argument("--out", type=Path, help="the picture (default: NAME.png)")
    compare = commands.add_parser(
        "compare", help="print the last evaluations of run directories side by side"
    )
    compare.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    commands.add_parser("doctor", help="devices, versions, memory, a speed check")
    args, rest = parser.parse_known_args(argv)
    if rest and args.command != "run":
        parser.error(f"{args.command} does not know {' '.join(rest)}")
    if args.command == "compare":
        return _compare(args.directories)
    if args.command == "list":
        print(listing())
        return 0
    if args.command == "data":
        return _data(args)
    if args.command == "doctor":
        from fedjax_core.experiments import tools

        use_host_devices()
        tools.doctor()
        return 0
    if args.name is None:
        run.print_help()
        print(f"\n{listing()}")
        return 0 if {"-h", "--help"} & set(rest) else 2
    if args.name not in EXPERIMENTS:
        print(f"fedjax-core: {_unknown(args.name)}", file=sys.stderr)
        return 2
    if args.command == "show":
        return _show(args.name, args.preset)
    return _run(args.name, rest)


def listing() -> str:
    """The experiments, one a line."""
    width = max(map(len, EXPERIMENTS))
    lines = [f"  {name:<{width}}  {about}" for name, about in EXPERIMENTS.items()]
    return "\n".join(["experiments:", *lines])


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, EXPERIMENTS, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"no experiment {name!r}.{hint} 'fedjax-core list' shows them all."


def _show(name: str, preset: str) -> int:
    presets = importlib.import_module(f"fedjax_core.experiments.{name}").PRESETS
    if preset not in presets:
        known = ", ".join(presets)
        print(
            f"fedjax-core: no preset {preset!r} of {name}, but {known}.",
            file=sys.stderr,
        )
        return 2
    print(json.dumps(to_json(presets[preset]), indent=2))
    return 0


def _data(args: argparse.Namespace) -> int:
    from fedjax_core.experiments import tools

    if args.name is None:
        tools.list_data()
        return 0
    if args.name not in (known := tools.data_sets()):
        near = difflib.get_close_matches(args.name, known, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(
            f"fedjax-core: no data set {args.name!r}.{hint} 'fedjax-core data' shows "
            f"them all.",
            file=sys.stderr,
        )
        return 2
    out = args.out or Path(f"{args.name}.png")
    try:
        tools.show_data(args.name, args.path, args.clients, args.alpha, out)
    except (DataFileError, OSError, ImportError, ValueError) as error:
        print(f"fedjax-core: {error}", file=sys.stderr)
        return 2
    return 0


def _compare(directories: Sequence[Path]) -> int:
    from rich.console import Console
    from rich.table import Table

    try:
        runs = {path: last_evaluations(path) for path in directories}
    except (RunDirError, OSError) as error:
        print(f"fedjax-core: {error}", file=sys.stderr)
        return 2
    table = Table(caption="mean ± standard deviation over seeds")
    table.add_column("")
    for path in runs:
        table.add_column(str(path), justify="right", overflow="fold")
    names = list(dict.fromkeys(name for values in runs.values() for name in values))
    for name in [n for n in names if n != "seed"]:
        table.add_row(name, *(_spread(values.get(name)) for values in runs.values()))
    Console().print(table)
    return 0


def _spread(values: np.ndarray | None) -> str:
    if values is None:
        return ""
    spread = f" ± {values.std(ddof=1):.4g}" if len(set(values)) > 1 else ""
    return f"{values.mean():.6g}{spread}"


def _run(name: str, argv: Sequence[str]) -> int:
    import tyro

    # How to run comes first, since it decides the defaults of everything else.
    how = argparse.ArgumentParser(prog=f"fedjax-core run {name}", add_help=False)
    module = importlib.import_module(f"fedjax_core.experiments.{name}")
    how.add_argument("--preset", choices=list(module.PRESETS), default="default")
    how.add_argument("--devices", type=int, default=None)
    chosen, rest = how.parse_known_args(argv)
    presets = ", ".join(module.PRESETS)
    experiment = tyro.cli(
        module.Experiment,
        prog=how.prog,
        args=rest,
        default=module.PRESETS[chosen.preset],
        description=(
            f"{module.__doc__}\n\nBesides the options below: --preset NAME sets their "
            f"defaults ({presets}); --devices N splits the CPU into N devices "
            f"(default: its cores)."
        ),
    )
    if chosen.devices is not None and chosen.devices < 1:
        how.error(f"--devices must be >= 1, got {chosen.devices}")
    use_host_devices(chosen.devices)
    try:
        module.main(experiment)
    except (RunDirError, DataFileError, OSError, ImportError) as error:
        print(f"fedjax-core: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        said = (
            str(stop) or "stopped; the same command goes on from the last checkpoint."
        )
        print(f"fedjax-core: {said}", file=sys.stderr)
        return 130  # as shells say it of SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
