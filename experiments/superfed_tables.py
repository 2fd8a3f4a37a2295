"""SuPerFed and what it is compared with: the tables of Hahn's chapter II, small.

Tables 2.3 (two classes a client), 2.4 (Dirichlet splits), 2.5 (natural clients), 2.6
(wrong labels), 2.7 (when personal models begin) and figures 2.3 (both regularisers),
2.4 (the loss around the server's model) and 2.5 (all mixtures). Clients hold parts of
MNIST and CIFAR-10, or of scikit-learn's digits, which need no files; there is CIFAR-100
and TinyImageNet for table 2.4 and Shakespeare's roles for 2.5. superfed_tables.md
shows printed numbers beside ours; each part has a page and a table.csv of its own.
Needs files, see --path.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import optax
from flax import linen as nn

from fedjax_core import (
    Algorithm,
    FederatedData,
    LocalWork,
    Model,
    Result,
    check,
    models,
    split_examples,
    study,
)
from fedjax_core.algorithms import (
    apfl,
    ditto,
    fedavg,
    fedper,
    fedprox,
    fedrep,
    lg_fedavg,
    pfedme,
    scaffold,
    superfed,
)
from fedjax_core.data.packed import Dataset
from fedjax_core.data.readers.files import find
from fedjax_core.datasets import (
    characters,
    cifar,
    digits,
    images,
    label_noise,
    mnist,
    partition,
    shakespeare,
)
from fedjax_core.experiments import report
from fedjax_core.experiments.superfed_figures import landscapes, profiles
from fedjax_core.experiments.superfed_printed import (
    BEST,
    NAMES,
    OURS,
    SCHEMES,
    STARTS,
    printed_of,
)
from fedjax_core.local import by_round
from fedjax_core.personal import best_lambda, with_mixtures
from fedjax_core.result import spread
from fedjax_core.study_report import Table, tables, write
from fedjax_core.types import (
    Checked,
    Fraction,
    LossFn,
    NonNegative,
    Positive,
    PositiveInt,
    Share,
)

PARTS = ("table 2.3", "table 2.4", "table 2.5", "table 2.6", "table 2.7")
PARTS += ("figure 2.3", "figure 2.4", "figure 2.5")

LAMBDAS = superfed.LAMBDAS
# What parts are measured by; the first chooses a lambda.
MEASURED: dict[str, tuple[str, ...]] = dict.fromkeys(PARTS, ("accuracy",))
MEASURED |= {"table 2.4": ("top5",), "table 2.5": ("accuracy", "top5")}
MEASURED |= {"table 2.6": ("accuracy", "ece", "mce"), "table 2.7": ("accuracy", "loss")}
CLASSES = {"cifar10": 10, "cifar100": 100, "tinyimagenet": 200}
TINY = (
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip (pixels uint8 [n, 64, 64, 3] as "
    "x_train and x_test, classes as y_train and y_test)"
)

LIMITS = """\
What a setting smaller than the text's can't show: levels, which rest on its networks,
images and populations, and clients of a few examples. Where data are "digits", these
stand for all images. Where they are files, CIFAR-10 stands in table 2.4 for CIFAR-100
and nothing for TinyImageNet, unless "split" names them. In table 2.5 writers of ten
digits stand for FEMNIST's of 62 classes, and Shakespeare is there if "natural" names
its roles. All methods take the same steps; SCAFFOLD's control variates are the mean
gradients that they are with plain SGD, and pFedMe's own step, towards its solver's end,
has no momentum, decay or schedule. SuPerFed's rows use the one lambda that is best for
all clients together on validation data, by accuracy, in table 2.4 by top-5. "best on
test" is the text's convention: the best of eleven in hindsight, on the data it is
reported for; its lead over the others is in part that choice. Orders that the text's
own numbers contradict are not claimed. Means are over clients, deviations "over
clients" are the text's, those after the sign ± are over seeds. Errors of calibration
are over all of a client's test examples; the text's level is that of batches of ten, in
which a perfectly calibrated model has an ECE of 0.29 and an MCE of 0.63, and "per
batch" shows ours so.
"""


def kind_and_rate(noises: str) -> tuple[str, float]:
    """Those of wrong labels, of a text like "pair 0.4".

    Raises:
      ValueError: it is no such text, or its rate is not possible.
    """
    found = re.fullmatch(r"(pair|symmetric) (\d*\.?\d+)", noises)
    if not found:
        raise ValueError(
            f"noises must be 'pair' or 'symmetric' and a rate, as 'pair 0.4', got "
            f"{noises!r}."
        )
    rate = float(found[2])
    # From half on the labels of a pair would be mostly wrong.
    check.fraction(0.5 if found[1] == "pair" else 1, noises=rate)
    return found[1], rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      data: "files", of MNIST and CIFAR-10, or "digits".
      path: folder with mnist_by_writer.npz, cifar10_subset.npz, tinyimagenet.npz and
        shakespeare_roles.jsonl.gz, each in a folder named as it is, without its
        ending, and the folder cifar100, see `datasets.cifar.load_cifar100`.
      num_train: examples that clients share; of natural clients all.
      num_test: examples that they are tested on.
      shrink: by how much images are made smaller, each pixel a mean of some; 1, 2 or 4.
      num_clients: clients, of table 2.3 by turns and of figures; the first elsewhere.
      natural: clients of table 2.5, "writers" of MNIST or "roles" of Shakespeare.
      num_writers: of them.
      num_roles: of them, of 660 in the text.
      roles_lr: their step size.
      split: images of table 2.4, "cifar10", "cifar100" or "tinyimagenet".
      alphas: concentrations of table 2.4.
      noises: of table 2.6, "pair" or "symmetric" and a rate, as "pair 0.4".
      noisy_test: whether labels are wrong in test examples too, as in the text's code.
      cohort_size: clients per round.
      rounds: rounds of every run.
      local_epochs: epochs of a client in a round, at least 2.
      batch_size: examples of a local step.
      client_lr: step size of all that clients train, in the first round.
      momentum: of it.
      weight_decay: of it.
      lr_decay: factor of the step size after every round.
      mu: pull of FedProx and SuPerFed to the received model.
      prox: pull of pFedMe's personal models to the local ones.
      nus: weight of the squared cosine, in MM and in LM.
      warm_ups: share of the rounds before personal models are trained, likewise.
      mus: of figure 2.3.
      more_nus: of figure 2.3.
      model: "mlp" or "paper": TwoNN of MNIST, TwoCNN of CIFAR-10, ResNet-8 of
        CIFAR-100, MobileNet of TinyImageNet, each with the text's own settings, see
        `of_text`. Roles have an LSTM.
      hidden: widths of the mlp and of the LSTM.
      points: of a side of the landscape.
      num_seeds: independent runs of each method; fewer than five decide nothing.
      methods: names of those that are compared.
      parts: what is run.
      out: directory of studies and page; it goes on with what is there.
    """

    data: Literal["files", "digits"] = "files"
    path: Path = Path("data")
    num_train: PositiveInt = 4000
    num_test: PositiveInt = 1000
    # Divides the sides of all images.
    shrink: Annotated[PositiveInt, check.among((1, 2, 4))] = 2
    num_clients: tuple[PositiveInt, ...] = (50,)
    natural: tuple[Literal["writers", "roles"], ...] = ("writers",)
    num_writers: PositiveInt = 60
    num_roles: PositiveInt = 60
    roles_lr: Positive = 0.8
    split: tuple[Annotated[str, check.among(CLASSES)], ...] = ("cifar10",)
    alphas: tuple[Positive, ...] = (1.0, 100.0)
    noises: tuple[Annotated[str, kind_and_rate], ...] = ("pair 0.4",)
    noisy_test: bool = False
    cohort_size: PositiveInt = 5
    rounds: PositiveInt = 60
    local_epochs: PositiveInt = 2
    batch_size: PositiveInt = 10
    client_lr: Positive = 0.01
    momentum: Fraction = 0.9
    weight_decay: NonNegative = 1e-4
    lr_decay: Annotated[Share, check.positive] = 0.99
    mu: NonNegative = 0.01
    prox: Positive = 15.0
    nus: tuple[NonNegative, NonNegative] = (1.0, 2.0)
    warm_ups: tuple[Fraction, Fraction] = (0.4, 0.6)
    mus: tuple[NonNegative, ...] = (0.0, 0.01, 1.0)
    more_nus: tuple[NonNegative, ...] = (0.0, 1.0, 5.0)
    model: Literal["mlp", "paper"] = "mlp"
    hidden: tuple[PositiveInt, ...] = (48, 48)
    points: PositiveInt = 15
    num_seeds: PositiveInt = 5
    methods: tuple[Annotated[str, check.among(NAMES)], ...] = NAMES
    parts: tuple[Annotated[str, check.among(PARTS)], ...] = PARTS
    out: Path = Path("runs/superfed_tables")

    def __post_init__(self):
        super().__post_init__()
        check.in_range(2, 1000, local_epochs=self.local_epochs)  # FedRep has two phases
        check.in_range(1, min(self.num_clients), cohort_size=self.cohort_size)


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(
        data="digits",
        num_train=300,
        num_test=150,
        shrink=1,
        num_clients=(10,),
        alphas=(1.0,),
        rounds=5,
        client_lr=0.05,
        mus=(0.01,),
        more_nus=(0.0, 2.0),
        hidden=(12,),
        points=5,
        num_seeds=2,
        methods=("FedAvg", "APFL", *OURS),
        parts=("table 2.3", "figure 2.4", "figure 2.5"),
    ),
    "paper": Experiment(
        num_train=100_000,
        num_test=10_000,
        shrink=1,
        num_clients=(50, 100, 500),
        natural=("writers", "roles"),
        num_writers=539,
        num_roles=660,
        split=("cifar100", "tinyimagenet"),
        alphas=(1.0, 10.0, 100.0),
        noises=("pair 0.1", "pair 0.4", "symmetric 0.2", "symmetric 0.6"),
        rounds=500,
        local_epochs=10,
        mus=(0.0, 0.01, 0.1, 1.0),
        more_nus=(0.0, 1.0, 2.0, 5.0),
        model="paper",
        hidden=(200, 200),
        points=41,
        num_seeds=3,
    ),
}


@functools.cache
def pooled(experiment: Experiment, name: str) -> Dataset:
    """Random examples of a data set, which stay the same whatever the seed of a run."""
    if experiment.data == "digits":
        whole = images.mapped(digits.load(), lambda x: x.reshape(-1, 8, 8, 1))
    elif name == "mnist":
        whole = mnist.load(experiment.path / "mnist_by_writer")
    elif name == "cifar100":
        whole = cifar.load_cifar100(experiment.path / name)
    elif name == "tinyimagenet":
        file = find(experiment.path / name, [f"{name}.npz"], TINY)
        whole = images.from_npz(file, CLASSES[name], (64, 64, 3), (None, None))
    else:
        whole = cifar.load_cifar10(experiment.path / "cifar10_subset", complete=False)
    some = images.some(whole, experiment.num_train, experiment.num_test)
    return images.mapped(some, lambda x: _shape(experiment, x))


def _shape(experiment: Experiment, x: np.ndarray) -> np.ndarray:
    """Images made smaller, as vectors but for a network of convolutions."""
    n, height, across, channels = x.shape
    # Photographs by two more: a dense layer has a weight for every pixel.
    k = experiment.shrink * (2 if channels == 3 and experiment.shrink > 1 else 1)
    x = x.reshape(n, height // k, k, across // k, k, channels).mean((2, 4))
    if experiment.model == "paper" and channels == 3:
        return x
    return x.reshape(n, -1)


def network(experiment: Experiment, name: str, dim: int) -> nn.Module:
    """For examples of so many dimensions: images are vectors for an mlp."""
    classes = CLASSES.get(name, 10)
    if name == "roles":
        return models.CharLSTM(characters.NUM_IDS, 8, experiment.hidden, True)
    if dim == 1:
        return models.MLP(classes, experiment.hidden)
    if name == "cifar100":
        return models.ResNet(classes, (1, 1, 1, 1), "group")
    if name == "tinyimagenet":
        return models.MobileNetV2(classes, "group")
    return models.CNN(classes, ((32,), (64,)), (512,), (5, 5), "SAME")


def problem(
    experiment: Experiment, part: str, setting: str, data: FederatedData
) -> study.Setting:
    """With a fifth of the clients' examples to choose a lambda on."""
    e, name = of_text(experiment, part, setting), setting.partition(",")[0]
    if "validation" not in data.splits:
        data = split_examples(data, 0, 0.2)
    x, calibration = data.train.examples["x"], part == "table 2.6"
    task = models.classes(
        characters.PAD if name == "roles" else None,
        top=5, calibration=calibration, per_batch=calibration,
    )  # fmt: skip
    module = network(e, name, x.ndim - 1)
    example = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    return study.Setting(
        data=data,
        model=models.from_linen(module, example, task),
        rounds=e.rounds,
        options={"cohort_size": e.cohort_size},
    )


def populations(experiment: Experiment) -> dict[str, dict[str, study.Setting]]:
    """The clients of every part that is run, by setting."""
    e = experiment
    names = ("digits",) if e.data == "digits" else ("mnist", "cifar10")
    sources = names if e.data == "digits" else e.split

    def shards(names: Sequence[str], counts: Sequence[int]) -> Iterator[Any]:
        for name, k in itertools.product(names, counts):
            yield f"{name}, {k} clients", partition.pathological(pooled(e, name), k)

    parts: dict[str, Iterable[tuple[str, FederatedData]]] = {
        "table 2.3": shards(names, e.num_clients),
        "table 2.4": (
            (f"{name}, alpha {a:g}", _dirichlet(e, "table 2.4", name, a))
            for name, a in itertools.product(sources, e.alphas)
        ),
        "table 2.5": ((name, _natural(e, name)) for name in e.natural),
        "table 2.6": (
            (f"{name}, {kind} {rate:g}", _noisy(e, name, kind, rate))
            for name in (names if e.model == "paper" else names[:1])
            for kind, rate in map(kind_and_rate, e.noises)
        ),
        "table 2.7": shards(names[-1:], e.num_clients[:1]),
        "figure 2.3": shards(names[-1:], e.num_clients[:1]),
    }
    wanted = {*e.parts}
    if {"figure 2.4", "figure 2.5"} & wanted:
        wanted.add("table 2.3")
    return {
        part: {setting: problem(e, part, setting, data) for setting, data in clients}
        for part, clients in parts.items()
        if part in wanted
    }


def _dirichlet(
    experiment: Experiment, part: str, name: str, alpha: float
) -> FederatedData:
    # The pool is the experiment's, so that there is one of all alphas.
    count = of_text(experiment, part, name).num_clients[0]
    data = partition.dirichlet(pooled(experiment, name), count, alpha, min_size=10)
    return data.subset(np.flatnonzero(data.test.sizes > 0)) if data.test else data


# What the text, of nu and warm-ups its code, has by part, by data set or by both other
# than the preset "paper".
OF_TEXT: dict[str, dict[str, Any]] = {
    "table 2.3, 50 clients": {"warm_ups": (0.6, 0.8)},
    "table 2.3, 500 clients": {"warm_ups": (0.2, 0.4)},
    "table 2.4": {"num_clients": (100,), "local_epochs": 5, "batch_size": 20},
    "table 2.4, tinyimagenet": {"num_clients": (200,), "client_lr": 0.02},
    "table 2.4, tinyimagenet, alpha 1": {"warm_ups": (0.35, 0.45)},
    "table 2.4, tinyimagenet, alpha 10": {"warm_ups": (0.45, 0.5)},
    "table 2.4, tinyimagenet, alpha 100": {"warm_ups": (0.55, 0.55)},
    "table 2.5, writers": {"nus": (2.0, 3.0), "warm_ups": (0.25, 0.45), "prox": 5.0},
    "table 2.5, roles": {
        "nus": (1.5, 2.0), "warm_ups": (0.45, 0.35), "prox": 0.1, "batch_size": 50,
    },
    "table 2.6": {"num_clients": (100,)},
    "table 2.7": {"rounds": 200, "nus": (2.0, 2.0)},
    "figure 2.3": {"rounds": 100, "warm_ups": (0.4, 0.4)},
}  # fmt: skip


def of_text(experiment: Experiment, part: str, setting: str) -> Experiment:
    """An experiment with the text's own settings of a part, and of a setting in it.

    With the networks of the text: of fields that are as in the preset "paper", so that
    others stay as they were given. Roles have theirs with all networks, and half the
    epochs, at a rate of their own.
    """
    e, (name, _, rest) = experiment, setting.partition(", ")
    own: dict[str, Any] = {}
    for end in ("", f", {rest}", f", {name}", f", {setting}"):
        own |= OF_TEXT.get(part + end, {})
    if name == "roles":
        own |= {"client_lr": e.roles_lr, "local_epochs": max(2, e.local_epochs // 2)}
        own |= {"hidden": (256, 256)} if e.model == "paper" else {}
    elif e.model == "paper":
        preset = vars(PRESETS["paper"])
        own = {k: v for k, v in own.items() if getattr(e, k) == preset[k]}
    else:
        return e
    return dataclasses.replace(e, **own)


def _natural(experiment: Experiment, name: str) -> FederatedData:
    e = experiment
    if name == "roles":
        file = e.path / "shakespeare_roles" / "shakespeare_roles.jsonl.gz"
        return _some(shakespeare.load(file, min_speeches=2), e.num_roles)
    if e.data == "digits":
        return partition.iid(pooled(e, "digits"), e.num_clients[0])
    data = mnist.load_by_writer(e.path / "mnist_by_writer")
    return _some(data, e.num_writers).map(lambda b: {**b, "x": _shape(e, b["x"])})


def _some(data: FederatedData, count: int) -> FederatedData:
    """So many random clients, or all."""
    order = np.random.default_rng(0).permutation(data.num_clients)
    return data.subset(np.sort(order[:count]))


def _noisy(experiment: Experiment, name: str, kind: str, rate: float) -> FederatedData:
    """Wrong labels in train, and so in validation: nobody knows which are right."""
    data = split_examples(_dirichlet(experiment, "table 2.6", name, 10.0), 0, 0.2)
    noisy, _ = getattr(label_noise, kind)(data, rate, 10, noisy_test=True)
    test = noisy.test if experiment.noisy_test else data.test
    return dataclasses.replace(noisy, test=test)


def _mixed_apfl(config: Any, loss_fn: LossFn, **options: Any) -> Algorithm:
    """APFL with its own part at all mixtures, its personal model among them."""
    made = apfl.make(config, loss_fn, **options)
    return with_mixtures(made, (*LAMBDAS, config.alpha), lambda own: own["v"])


@functools.cache
def _optimizer(experiment: Experiment) -> optax.GradientTransformation:
    """The text's, for all methods."""
    e = experiment
    return optax.chain(
        optax.add_decayed_weights(e.weight_decay),
        optax.sgd(e.client_lr, e.momentum or None),
        by_round(lambda t: e.lr_decay**t),
    )


def methods(experiment: Experiment, model: Model) -> dict[str, study.Method]:
    """Those of the experiment, all with the same work and optimiser."""
    e, own = experiment, "personal_accuracy"
    layers = sorted(jax.eval_shape(model.init, jax.random.key(0)))
    # The last dense layer, and all but what sees the example first.
    head = tuple([name for name in layers if name.startswith("Dense")][-1:])
    if not head:
        raise ValueError(
            f"FedPer and FedRep need a network with a dense layer, got {layers}."
        )
    first = min(layers, key=lambda name: (name.startswith(("Dense", "LSTM")), name))
    upper = tuple(name for name in layers if name != first)
    work = LocalWork(batch_size=e.batch_size, epochs=e.local_epochs)

    def of(module: Any, metric: str | None = None, **config: Any) -> study.Method:
        make = _mixed_apfl if module is apfl else module.make
        make = functools.partial(make, client_optimizer=_optimizer(e))
        config = module.Config(work=work, **config)
        return study.Method(make=make, config=config, metric=metric)

    of_head = e.local_epochs - e.local_epochs // 2
    found = {
        "FedAvg": of(fedavg),
        "FedProx": of(fedprox, mu=e.mu),
        "SCAFFOLD": of(scaffold),
        "LG-FedAvg": of(lg_fedavg, own, shared=upper),
        "FedPer": of(fedper, own, personal=head),
        "APFL": of(apfl, "personal_0.25_accuracy", alpha=0.25),
        "pFedMe": of(pfedme, own, client_lr=e.client_lr, prox=e.prox),
        "Ditto": of(ditto, own, prox=1.0),
        "FedRep": of(fedrep, own, personal=head, head=of_head),
    } | {mine: ours(e, model, name) for mine, name in zip(OURS, SCHEMES, strict=True)}
    return {name: found[name] for name in NAMES if name in e.methods}


@functools.cache
def _superfed(experiment: Experiment, init: Any) -> Callable[..., Algorithm]:
    """One function for all rows, so that those of other numbers share a program."""
    return functools.partial(
        superfed.make, init=init, client_optimizer=_optimizer(experiment)
    )


def ours(
    experiment: Experiment, model: Model, name: str, **change: Any
) -> study.Method:
    """SuPerFed, "MM" or "LM"."""
    e, which = experiment, SCHEMES.index(name)
    config = superfed.Config(
        mixing=("model", "layer")[which],
        mu=e.mu,
        nu=e.nus[which],
        warm_up=int(e.warm_ups[which] * e.rounds),
        work=LocalWork(batch_size=e.batch_size, epochs=e.local_epochs),
    )
    return study.Method(
        make=_superfed(e, model.init),
        config=dataclasses.replace(config, **change),
        metric="personal_0.5_accuracy",
    )


def rows_of(experiment: Experiment, part: str, model: Model) -> dict[str, study.Method]:
    """What a part compares; figures 2.4 and 2.5 look at table 2.3's."""
    e, mine = experiment, functools.partial(ours, experiment, model)
    if part == "table 2.7":
        return {
            f"{name} from {start:g}": mine(name, warm_up=int(start * e.rounds))
            for name, start in itertools.product(SCHEMES, STARTS)
        }
    if part == "figure 2.3":
        return {
            grid_point(name, mu, nu): mine(name, mu=mu, nu=nu)
            for name, mu, nu in itertools.product(SCHEMES, e.mus, e.more_nus)
        }
    return methods(e, model)


def grid_point(name: str, mu: float, nu: float) -> str:
    """A row of figure 2.3."""
    return f"{name}, mu {mu:g}, nu {nu:g}"


def make_studies(
    experiment: Experiment, found: Mapping[str, Mapping[str, study.Setting]]
) -> dict[tuple[str, str], study.Study]:
    """A study for each setting of each part; models differ by data set."""
    return {
        (part, setting): study.Study(
            methods=rows_of(of_text(experiment, part, setting), part, this.model),
            settings={setting: this},
            seeds=range(experiment.num_seeds),
            eval_splits=("validation", "test"),
        )
        for part, by_setting in found.items()
        for setting, this in by_setting.items()
    }


METRICS = ("accuracy", "top5", "loss", "ece", "mce", "ece_per_batch", "mce_per_batch")

Found = Mapping[tuple[str, str], Result]
"""(method, setting) -> result, of the model that stands in tables."""


def chosen(row: study.Row, metric: str) -> dict[str, list[str]]:
    """Which model stands in tables, by seed, as "personal_0.3_"; SuPerFed's twice.

    The shared lambda is that of the best mean of `metric`, on validation data and, as
    the text has it, on test data.
    """
    if row.result is None or row.error:
        return {}
    if row.metric != "test_personal_0.5_accuracy":
        model = row.metric.removeprefix("test_").removesuffix("accuracy")
        return {row.method: [model] * len(row.result.seeds)}
    return {
        row.method + end: _names(best_lambda(row.result, LAMBDAS, metric, split))
        for end, split in (("", "validation"), (BEST, "test"))
    }


def _names(lambdas: np.ndarray) -> list[str]:
    return [f"personal_{lam:g}_" for lam in lambdas]


def results_of(outcome: study.Outcome, metric: str) -> dict[tuple[str, str], Result]:
    """All that finished, as "test_accuracy" and so on, of the model in tables."""
    return {
        (method, row.setting): under(row.result, each)
        for row in outcome.rows
        if row.result is not None
        for method, each in chosen(row, metric).items()
    }


def under(result: Result, each: Sequence[str]) -> Result:
    """Means over clients under one of their models, each seed's own."""

    def of(values: Mapping[str, np.ndarray], end: str) -> dict[str, np.ndarray]:
        return {
            f"test_{name}": np.stack(
                [values[f"test_{m}{name}{end}"][s] for s, m in enumerate(each)]
            )
            for name in METRICS
            if all(f"test_{m}{name}{end}" in values for m in each)
        }

    return dataclasses.replace(
        result,
        evaluations=of(result.evaluations, "_client_mean"),
        client_metrics=of(result.client_metrics, ""),
    )


def table(
    experiment: Experiment, part: str, metric: str, found: Found
) -> study.Outcome:
    """A part of the text as a study's outcome, with its numbers and orderings."""
    sign = 1 if metric in ("accuracy", "top5") else -1
    printed = {
        cell: known[0] for cell in found if (known := printed_of(part, *cell, metric))
    }
    worth = {cell: sign * number for cell, number in printed.items()}
    claims = [
        (a, b, setting)
        for setting in dict.fromkeys(setting for _, setting in found)
        for a, b in orders(experiment, part, [m for m, s in found if s == setting])
        # Not where the text's own numbers are equal or the other way round.
        if worth.get((a, setting), np.inf) > worth.get((b, setting), -np.inf)
    ]
    where = experiment.out / (part if metric == MEASURED[part][0] else metric)
    where.mkdir(parents=True, exist_ok=True)
    return report.outcome_of(
        dataclasses.replace(experiment, out=where),
        found,
        metric=metric,
        higher_is_better=sign > 0,
        printed=printed,
        claims=claims,
    )


def orders(
    experiment: Experiment, part: str, there: Sequence[str]
) -> list[tuple[str, str]]:
    """What the text says to be better than what, of methods that are there."""
    if part == "table 2.7":
        pairs = [
            (f"{name} from 0.4", f"{name} from {end}")
            for name, end in itertools.product(SCHEMES, ("0", "0.8"))
        ]
    elif part == "figure 2.3":
        mus, nus = sorted(experiment.mus), sorted(experiment.more_nus)
        mu, nu = mus[:2][-1], nus[:2][-1]  # the second, if there is one
        pairs = [  # a moderate nu helps, a large mu hurts
            (grid_point(name, mu, nu), grid_point(name, *other))
            for name in SCHEMES
            for other in ((mu, nus[0]), (mus[-1], nu))
        ]
    else:
        pairs = itertools.product(OURS, (name for name in NAMES if name not in OURS))
    return [p for p in pairs if p[0] != p[1] and {*p} <= {*there}]


def details(part: str, metric: str, outcome: study.Outcome, found: Found) -> Table:
    """Deviations over clients beside the text's, losses, and what lambda was taken."""
    each = {k: v for row in outcome.rows for k, v in chosen(row, metric).items()}
    more = ("ece_per_batch", "mce_per_batch") if part == "table 2.6" else ()
    names = (metric,) if more else MEASURED[part]  # those that have printed ones
    rows = []
    for (method, setting), result in found.items():
        cells = [method]
        for name in names:
            of_clients = np.nanstd(result.client_metrics[f"test_{name}"], 1).mean()
            printed = [f"{x:.4f}" for x in printed_of(part, method, setting, name)[1:]]
            cells += [f"{of_clients:.4f}", *(printed or [""])]
        cells += [spread(_last(result, name), ".3f") for name in ("loss", *more)]
        rows.append((*cells, " ".join(re.findall(r"[\d.]+", " ".join(each[method])))))
    pairs = [f"{name} over clients{end}" for name in names for end in ("", ", printed")]
    header = ("method", *pairs, "loss", *more, "lambda, by seed")
    return Table(f"{part}, {outcome.rows[0].setting}: {metric}", header, rows)


def _last(result: Result, name: str) -> np.ndarray:
    return result.series(f"test_{name}")[1][:, -1]


def inside(outcome: study.Outcome) -> Table:
    """Figure 2.3: mixtures beat both ends, each chosen on validation data."""
    rows = []
    for row in outcome.rows:
        config = row.config
        if row.result is None or row.error or not (config.mu > 0 and config.nu > 0):
            continue
        accuracy = [
            _last(under(row.result, _names(best_lambda(row.result, which))), "accuracy")
            for which in (LAMBDAS[1:-1], (LAMBDAS[0], LAMBDAS[-1]))
        ]
        what = f"{row.method}: between > both ends"
        rows.append((what, row.setting, accuracy[0] - accuracy[1]))
    return report.claims_table("Claims of figure 2.3", rows)


def over_alpha(found: Found, name: str) -> Table:
    """Table 2.4: what falls as clients become alike, and that SuPerFed hardly does."""
    settings = [s for _, s in found if s.split(",")[0] == name]
    first, last = settings[0], settings[-1]
    falls = {
        method: _last(found[method, first], "top5") - _last(found[method, last], "top5")
        for method, setting in found
        if setting == first and (method, last) in found
    }
    partial = [m for m in ("LG-FedAvg", "FedPer", "FedRep", "APFL") if m in falls]
    where = f"{first} to {last}"
    rows = [(f"{m} falls", where, falls[m]) for m in partial]
    rows += [
        (f"{mine} falls less than {m}", where, falls[m] - falls[mine])
        for mine, m in itertools.product(OURS, partial)
        if mine in falls
    ]
    return report.claims_table(f"Claims of table 2.4, {name}", rows)


def described(experiment: Experiment, settings: Mapping[str, Sequence[str]]) -> str:
    """What was run, and what options a setting has of its own."""
    e = experiment
    labels = "are wrong too, as in its code" if e.noisy_test else "are clean, as in it"
    lines = [
        f"Run here: {e.rounds} rounds of {e.local_epochs} epochs in batches of "
        f"{e.batch_size}, networks {e.model!r}, SGD with momentum {e.momentum:g}, a "
        f"weight decay of {e.weight_decay:g} and a rate that starts at {e.client_lr:g} "
        f"and is multiplied by {e.lr_decay:g} after a round; the text has 0.9, 0.0001 "
        f"and 0.99. Labels of test examples {labels}. Options of a setting's own:\n"
    ]
    for part, by_setting in settings.items():
        for setting in by_setting:
            own = vars(of_text(e, part, setting)).items()
            new = [f"{k} {value}" for k, value in own if value != getattr(e, k)]
            lines.append(f"* {part}, {setting}: {', '.join(new) or 'none'}")
    return "\n".join(lines)


def main(experiment: Experiment) -> None:
    """Runs the studies, prints their tables and writes one page of all."""
    e, clients = experiment, populations(experiment)
    about = f"{LIMITS}\n{described(e, {part: [*by] for part, by in clients.items()})}"
    page = report.Page("SuPerFed: chapter II, reduced", about, e.out)
    studies = make_studies(e, clients)
    for part, by_setting in clients.items():
        found: dict[tuple[str, str], Result] = {}
        metric, more = MEASURED[part][0], []
        for setting, this in by_setting.items():
            outcome = study.run(studies[part, setting], e.out / part / setting)
            here = results_of(outcome, metric)
            found |= here
            more.append(details(part, metric, outcome, here))
            if part == "table 2.3" and "figure 2.4" in e.parts:
                more += landscapes(e, outcome, this, page.console)
            if part == "table 2.3" and "figure 2.5" in e.parts:
                more += profiles(e, outcome, page.console)
            if part == "figure 2.3":
                more.append(inside(outcome))
            more += [x for x in tables(outcome) if x.title in ("Failed", "Unfinished")]
        if part == "table 2.4" and found:
            names = dict.fromkeys(setting.split(",")[0] for setting in by_setting)
            more += [over_alpha(found, name) for name in names]
        page.parts.append(f"# {part.capitalize()}\n")
        for name in MEASURED[part] if found else ():
            whole = table(e, part, name, found)
            page.add(*tables(whole))
            where = f"page of {part}, {name}: {write(whole)}"
            page.console.print(where, highlight=False)
        page.add(*more)
    page.write("superfed_tables")
