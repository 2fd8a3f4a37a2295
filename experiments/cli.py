"""The command line: experiments, data sets, and what this machine can do."""

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import importlib.metadata
import io
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from fedjax_core import DataFileError, RunDirError, command, processes, use_host_devices
from fedjax_core.command import Command
from fedjax_core.record import to_json

EXPERIMENTS = {
    "quickstart": "FedAvg on handwritten digits, 100 clients, error bars over 5 seeds",
    "aaggff_tables": "fair mixing of clients: Hahn's tables, regret (needs files)",
    "book_exercises": "exercises of Jung's book, the right numbers beside ours",
    "cfd_tables": "federated distillation in few bits: Sattler's tables (needs files)",
    "cfl_clusters": "clustered learning: label swaps, adversaries, when not to split",
    "fedaux_tables": "ensembles weighted by private certainties: FedAUX and others",
    "fedevg_tables": "images made by a server: FedEvg, FedCGAN, FedCVAE (needs files)",
    "fmi_weather": "tomorrow's weather at 200 stations: alone, over a network, as one",
    "gtvmin_demo": "clustered regression on a network: alone, by GTVMin, by oracle",
    "heart_disease": "four hospitals: alone, together and pooled (needs files)",
    "mnist_by_writer": "MNIST with its writers as clients, new ones too (needs files)",
    "npfl_rl": "clusters of a network learn from each other, as much as pays",
    "pao_fed": "online learning of clients that come rarely and late (needs files)",
    "partitions": "one figure: what every partitioner gives to whom",
    "personalization": "personal models on digits, two kinds a client: all methods",
    "pgfl": "servers on a graph, clusters: figures 5.1-5.6 of Gauthier's thesis",
    "server_optimizers": "FedAvg, M, Adam, Yogi, Adagrad, each with its rates chosen",
    "slide_demos": "FedGD by a server, FedAvg, FedGD without a clock: Jung's slides",
    "sbc_ratios": "sparse binary compression: ratios, delay against sparsity",
    "stc_tables": "STC, FedAvg and signSGD: accuracy against bits, up and down",
    "superfed_tables": "personal models and all between: Hahn's tables (needs files)",
    "stragglers": "slow devices: waiting, dropping, buffering, on virtual time",
    "shakespeare": "a character LSTM on the roles of Shakespeare's plays",
    "zcdp_nfl": "private ADMM over a network: figures 3.1-3.3 of Gauthier's thesis",
}
"""Every experiment: a module here with `Experiment`, `PRESETS` and `main`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    0 is success, 2 anything that can't be done, 130 an interrupt.
    """
    for stream in (sys.stdout, sys.stderr):
        # A sign that the output's encoding lacks must not end a run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.command != "run":
        parser.error(f"{args.command} does not know {' '.join(rest)}")
    return _caught(lambda: args.do(args, rest) or 0)


def _caught(work: Callable[[], int]) -> int:
    try:
        return work()
    except (RunDirError, DataFileError, OSError, ImportError) as error:
        return _refused(error)
    except KeyboardInterrupt:
        return 130  # as shells say it of SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedjax-core", description="Federated-learning simulation in JAX."
    )
    version = f"%(prog)s {importlib.metadata.version('fedjax_core')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, do: Any, about: str, **options: Any) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=about, **options)
        made.set_defaults(do=do)
        return made

    def of_runs(do: Callable[[ModuleType, Any], None]) -> Any:
        return lambda args, _: do(_module("runs"), args)

    add("list", lambda *_: print(listing()), "list the experiments")
    run = add(
        "run",
        _run,
        "run an experiment",
        description="Run an experiment; 'run NAME --help' lists its options.",
        add_help=False,
    )
    run.add_argument("name", nargs="?", help="see 'fedjax-core list'")
    run.set_defaults(help=run.format_help())
    show = add("show", _show, "show the settings of an experiment")
    show.add_argument("name", help="see 'fedjax-core list'")
    show.add_argument("--preset", default="default")
    resume = add("resume", _resume, "go on with what 'run' left in a directory")
    resume.add_argument("directory", type=Path, metavar="DIR")
    _add_processes(resume)
    several: dict[str, Any] = {"nargs": "+", "type": Path, "metavar": "DIR"}
    report = add(
        "report",
        of_runs(lambda runs, a: runs.report(a.directories, a.metric, a.out)),
        "write the page of studies or runs again, from what is there",
    )
    report.add_argument("directories", **several)
    report.add_argument("--metric", help="of runs (default: test_accuracy)")
    report.add_argument("--out", type=Path, help="folder for the page of several runs")
    plot = add(
        "plot",
        of_runs(lambda runs, a: runs.draw(a.directories, a.metric, a.over, a.out)),
        "draw curves of runs into one picture",
    )
    plot.add_argument("directories", **several)
    usual = "may be repeated (default: test_accuracy, test_loss)"
    plot.add_argument("--metric", action="append", default=[], help=usual)
    over = ("rounds", "bytes", "virtual_seconds")
    plot.add_argument("--over", choices=over, default="rounds")
    plot.add_argument("--out", type=Path, default=Path("plot.png"), help="plot.png")
    compare = add(
        "compare",
        of_runs(lambda runs, args: runs.compare(args.directories)),
        "print the last evaluations of runs side by side",
    )
    compare.add_argument("directories", **several)
    data = add("data", _data, "list the data sets, or show one")
    data.add_argument("name", nargs="?", help="of a data set")
    data.add_argument("--path", type=Path, help="where its files are")
    data.add_argument("--clients", type=int, default=20, help="if it has none itself")
    data.add_argument("--alpha", type=float, default=0.3, help="and how unlike")
    data.add_argument("--out", type=Path, help="the picture (default: NAME.png)")
    add("doctor", lambda *_: _doctor(), "devices, versions, memory, a speed check")
    return parser


def _add_processes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--distributed", action="store_true", help="on several hosts")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0")
    parser.add_argument("--process-id", type=int, metavar="I")
    parser.add_argument("--num-processes", type=int, metavar="N")


def _refused(error: Exception | str) -> int:
    print(f"fedjax-core: {error}", file=sys.stderr)
    return 2


def listing() -> str:
    """The experiments, one a line."""
    width = max(map(len, EXPERIMENTS))
    lines = [f"  {name:<{width}}  {about}" for name, about in EXPERIMENTS.items()]
    return "\n".join(["experiments:", *lines])


def _unknown(kind: str, name: str, known: Sequence[str], command: str) -> int:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return _refused(
        f"no {kind} {name!r}.{hint} 'fedjax-core {command}' shows them all."
    )


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"fedjax_core.experiments.{name}")


def _show(args: argparse.Namespace, rest: Sequence[str]) -> int:
    if args.name not in EXPERIMENTS:
        return _unknown("experiment", args.name, list(EXPERIMENTS), "list")
    presets = _module(args.name).PRESETS
    if args.preset not in presets:
        known = ", ".join(presets)
        return _refused(f"no preset {args.preset!r} of {args.name}, but {known}.")
    print(json.dumps(to_json(presets[args.preset]), indent=2))
    return 0


def _data(args: argparse.Namespace, rest: Sequence[str]) -> int | None:
    tools = _module("tools")
    if args.name is None:
        return tools.list_data()
    if args.name not in (known := tools.data_sets()):
        return _unknown("data set", args.name, list(known), "data")
    out = args.out or Path(f"{args.name}.png")
    try:
        return tools.show_data(args.name, args.path, args.clients, args.alpha, out)
    except ValueError as error:
        return _refused(error)


def _doctor() -> None:
    use_host_devices()
    _module("tools").doctor()


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    import tyro

    name = args.name
    if name is None:
        print(f"{args.help}\n{listing()}")
        return 0 if {"-h", "--help"} & set(argv) else 2
    if name not in EXPERIMENTS:
        return _unknown("experiment", name, list(EXPERIMENTS), "list")
    # How to run comes first, since it decides the defaults of everything else.
    how = argparse.ArgumentParser(prog=f"fedjax-core run {name}", add_help=False)
    module = _module(name)
    how.add_argument("--preset", choices=list(module.PRESETS), default="default")
    how.add_argument("--devices", type=int, default=None)
    _add_processes(how)
    chosen, rest = how.parse_known_args(argv)
    presets = ", ".join(module.PRESETS)
    description = (
        f"{module.__doc__}\n\nBesides the options below: --preset NAME sets their "
        f"defaults ({presets}); --devices N splits the CPU into N devices (default: "
        f"its cores); --distributed joins processes on several hosts, found by Slurm, "
        f"Open MPI or a TPU pod, or else by --coordinator HOST:PORT --process-id I "
        f"--num-processes N."
    )
    try:
        experiment = tyro.cli(
            module.Experiment,
            prog=how.prog,
            args=rest,
            default=module.PRESETS[chosen.preset],
            description=description,
        )
    except ValueError as error:  # older versions of tyro pass it on
        how.error(str(error))
    if chosen.devices is not None and chosen.devices < 1:
        how.error(f"--devices must be >= 1, got {chosen.devices}")
    typed = shlex.join(["fedjax-core", "run", name, *argv])
    made = Command(typed, name, chosen.preset, chosen.devices, _options(experiment))
    return _start(chosen, module, experiment, made)


def _resume(args: argparse.Namespace, rest: Sequence[str]) -> int:
    import tyro

    out = args.directory
    made = command.read(out)
    if not made.experiment:
        return _refused(f"{out} was made by {made.command!r}; that goes on with it.")
    if made.experiment not in EXPERIMENTS:
        return _refused(
            f"{out} was made by the experiment {made.experiment!r}, which is not here."
        )
    module = _module(made.experiment)
    try:
        experiment = tyro.cli(
            module.Experiment,
            args=[*made.options, "--out", str(out)],
            default=module.PRESETS.get(made.preset, module.PRESETS["default"]),
            console_outputs=False,
        )
    except (SystemExit, ValueError):
        return _refused(
            f"{out / command.FILE} has settings that {made.experiment} does not take: "
            f"{shlex.join(made.options)}."
        )
    done = "is finished" if made.finished else "goes on"
    print(f"{out} {done}: {made.command}", file=sys.stderr)
    return _start(args, module, experiment, made._replace(finished=False))


def _options(config: Any, prefix: str = "") -> tuple[str, ...]:
    """All settings of an experiment as they could be typed, but where it writes to."""
    options = []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            options += _options(value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            options.append(f"--{prefix}{'' if value else 'no-'}{name}")
        elif prefix or name != "out":
            values = value if isinstance(value, tuple) else (value,)
            # Elsewhere a relative path would be another one.
            texts = [str(v.absolute() if isinstance(v, Path) else v) for v in values]
            options += [f"--{prefix}{name}", *texts]
    return tuple(options)


def _start(
    how: argparse.Namespace, module: ModuleType, experiment: Any, made: Command
) -> int:
    """Runs an experiment, together with other processes if there are any."""
    names = ("coordinator", "process_id", "num_processes")
    where = {name: getattr(how, name) for name in names}
    if how.distributed or any(value is not None for value in where.values()):
        return processes.run_together(
            lambda: _caught(lambda: _main(module, experiment, made)),
            devices=made.devices,
            **where,
        )
    use_host_devices(made.devices)
    return _main(module, experiment, made)


def _main(module: ModuleType, experiment: Any, made: Command) -> int:
    """Runs an experiment, records what made it, and returns the exit status."""
    out = getattr(experiment, "out", None)
    recorded = command.recorded(out, made) if out else contextlib.nullcontext()
    try:
        with recorded, _compiled_once():
            module.main(experiment)
    except KeyboardInterrupt as stop:
        print(f"fedjax-core: {str(stop) or 'stopped.'}", file=sys.stderr)
        if out:
            again = shlex.join(["fedjax-core", "resume", str(out)])
            print(f"fedjax-core: to go on from what is saved: {again}", file=sys.stderr)
        return 130
    return 0


@contextlib.contextmanager
def _compiled_once() -> Iterator[None]:
    """Keeps programs while a command runs, for methods and settings that share them.

    Not beyond it: another machine could not run them. Who wants that says so by
    ``JAX_COMPILATION_CACHE_DIR``, which stays as it is. Nor with several processes:
    they may have to compile together, and only the first would know a program.
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir or jax.process_count() > 1:
        yield
        return
    least = "jax_persistent_cache_min_compile_time_secs"
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        contextlib.ExitStack() as cleanup,
    ):
        for name, value in (("jax_compilation_cache_dir", folder), (least, 0.0)):
            cleanup.callback(config.update, name, getattr(config, name))
            config.update(name, value)
        compilation_cache.reset_cache()  # or it stays with what it found at first
        cleanup.callback(compilation_cache.reset_cache)
        yield


if __name__ == "__main__":
    sys.exit(main())
