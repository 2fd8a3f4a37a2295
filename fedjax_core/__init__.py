"""Federated-learning simulation in JAX: whole rounds compiled over a client axis.

Families are imported by name: ``from fedjax_core import attacks, privacy, robust``,
``from fedjax_core.data import sources``, ``from fedjax_core.networks import graph``.
"""

from fedjax_core import models as models
from fedjax_core.compress.sparsifiers import top_k as top_k
from fedjax_core.data.packed import Dataset as Dataset
from fedjax_core.data.packed import FederatedData as FederatedData
from fedjax_core.data.packed import Packed as Packed
from fedjax_core.data.readers.files import DataFileError as DataFileError
from fedjax_core.data.splits import hold_out_clients as hold_out_clients
from fedjax_core.data.splits import merge as merge
from fedjax_core.data.splits import split_examples as split_examples
from fedjax_core.devices import client_mesh as client_mesh
from fedjax_core.devices import use_host_devices as use_host_devices
from fedjax_core.evaluate import Evaluation as Evaluation
from fedjax_core.evaluate import evaluate as evaluate
from fedjax_core.feed import EmptyCohortError as EmptyCohortError
from fedjax_core.local import Carry as Carry
from fedjax_core.local import local_sgd as local_sgd
from fedjax_core.local import sgd_step as sgd_step
from fedjax_core.map import map_clients as map_clients
from fedjax_core.metrics import Mean as Mean
from fedjax_core.metrics import Sum as Sum
from fedjax_core.models import classifier as classifier
from fedjax_core.models import language_model as language_model
from fedjax_core.models.model import Model as Model
from fedjax_core.participation import Availability as Availability
from fedjax_core.participation import Full as Full
from fedjax_core.participation import Participation as Participation
from fedjax_core.participation import Poisson as Poisson
from fedjax_core.participation import Uniform as Uniform
from fedjax_core.participation import Weighted as Weighted
from fedjax_core.plan import plan_round as plan_round
from fedjax_core.privacy.gaussian import gaussian_mean as gaussian_mean
from fedjax_core.reduce import Reduction as Reduction
from fedjax_core.reduce import mean as mean
from fedjax_core.reduce import monoid as monoid
from fedjax_core.reduce import stack as stack
from fedjax_core.reduce import total as total
from fedjax_core.result import Result as Result
from fedjax_core.robust.rules import geometric_median as geometric_median
from fedjax_core.robust.rules import trimmed_mean as trimmed_mean
from fedjax_core.run_dir import RunDirError as RunDirError
from fedjax_core.simulate import NonFiniteUpdateError as NonFiniteUpdateError
from fedjax_core.simulate import Report as Report
from fedjax_core.simulate import simulate as simulate
from fedjax_core.transform import Transform as Transform
from fedjax_core.transform import chain as chain
from fedjax_core.transform import clip as clip
from fedjax_core.transform import with_transform as with_transform
from fedjax_core.types import Algorithm as Algorithm
from fedjax_core.types import ClientProgram as ClientProgram
from fedjax_core.types import Cohort as Cohort
from fedjax_core.types import Execution as Execution
from fedjax_core.types import LocalWork as LocalWork
