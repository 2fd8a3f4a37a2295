"""Federated-learning simulation in JAX: whole rounds compiled over a client axis.

Families are imported by name: ``from fedjax_core import attacks, privacy, robust``,
``from fedjax_core.data import sources``, ``from fedjax_core.networks import graph``.
"""

from fedjax_core import models
from fedjax_core.compress.sparsifiers import top_k
from fedjax_core.data.packed import Dataset, FederatedData, Packed
from fedjax_core.data.readers.files import DataFileError
from fedjax_core.data.splits import hold_out_clients, merge, split_examples
from fedjax_core.devices import client_mesh, use_host_devices
from fedjax_core.driver import NonFiniteUpdateError, Report
from fedjax_core.evaluate import Evaluation, evaluate
from fedjax_core.history import read_result
from fedjax_core.local import Carry, local_sgd, sgd_step
from fedjax_core.map import map_clients
from fedjax_core.metrics import Mean, Sum
from fedjax_core.models import Model, classifier, language_model
from fedjax_core.participation import (
    Availability,
    Failing,
    Full,
    Participation,
    Poisson,
    Uniform,
    Weighted,
)
from fedjax_core.plan import plan_round
from fedjax_core.privacy.gaussian import gaussian_mean
from fedjax_core.reduce import Reduction, mean, monoid, stack, total
from fedjax_core.result import Result
from fedjax_core.robust.rules import geometric_median, trimmed_mean
from fedjax_core.run_dir import RunDirError
from fedjax_core.simulate import simulate
from fedjax_core.transform import Transform, chain, clip, with_transform
from fedjax_core.types import Algorithm, ClientProgram, Cohort, Execution, LocalWork

__all__ = [
    "Algorithm",
    "Availability",
    "Carry",
    "ClientProgram",
    "Cohort",
    "DataFileError",
    "Dataset",
    "Evaluation",
    "Execution",
    "Failing",
    "FederatedData",
    "Full",
    "LocalWork",
    "Mean",
    "Model",
    "NonFiniteUpdateError",
    "Packed",
    "Participation",
    "Poisson",
    "Reduction",
    "Report",
    "Result",
    "RunDirError",
    "Sum",
    "Transform",
    "Uniform",
    "Weighted",
    "chain",
    "classifier",
    "client_mesh",
    "clip",
    "evaluate",
    "gaussian_mean",
    "geometric_median",
    "hold_out_clients",
    "language_model",
    "local_sgd",
    "map_clients",
    "mean",
    "merge",
    "models",
    "monoid",
    "plan_round",
    "read_result",
    "sgd_step",
    "simulate",
    "split_examples",
    "stack",
    "top_k",
    "total",
    "trimmed_mean",
    "use_host_devices",
    "with_transform",
]
