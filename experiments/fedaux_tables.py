"""The tables of FedAUX, reduced: ensembles weighted by certainty on skewed clients.

Clients hold labelled images, the server unlabelled ones of another source. Extractors
are pre-trained on them, clients say once, with differential privacy, how much public
images are like theirs, and methods with and without all that are compared. Without
files everything is made of the digits of scikit-learn, half of them the server's. Each
table is a study with a page of its own; report.md puts them together with printed
numbers, costs and what such a setting can't show. The default needs files, see --data
and --auxiliary; --preset digits does not.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
import optax

from fedjax_core import (
    Algorithm,
    Dataset,
    FederatedData,
    LocalWork,
    Model,
    check,
    models,
    pretrain,
    privacy,
    study,
)
from fedjax_core.algorithms import fedaux, fedavg, fedbe, feddf, fedprox
from fedjax_core.data.padded import pad
from fedjax_core.data.readers import npz
from fedjax_core.data.splits import split_examples, split_public
from fedjax_core.datasets import digits, images, partition
from fedjax_core.distillation import logits_of_model
from fedjax_core.experiments import report
from fedjax_core.personal import split
from fedjax_core.prototypes import as_one
from fedjax_core.scorers import SCORERS, nearest, score
from fedjax_core.types import Checked, Positive, PositiveInt, Share

TABLES = ("7.1", "7.2", "7.3", "7.4", "7.5", "7.7", "7.8", "C.4")

NAMES = ("FedAvg", "FedProx", "FedDF", "FedBE", "FedAvg+P", "FedProx+P", "FedDF+P")
NAMES += ("FedBE+P", "FedAUX")


def _by_alpha(names: Sequence[str], text: str) -> dict[str, dict[str, float]]:
    """Of lines that begin with a concentration: it -> method -> number."""
    lines = [line.split() for line in text.splitlines()]
    return {
        f"alpha {alpha}": dict(zip(names, map(float, numbers), strict=True))
        for alpha, *numbers in lines
    }


# Of ResNet-8, 20 clients and 100 rounds, the best round in %; cohorts of 40 %.
_71 = """\
0.01 23.6 34.0 27.8 25.7 32.1 43.1 39.3 29.8 71.2
100 82.2 82.3 81.4 82.0 89.5 89.1 88.9 89.5 89.0
"""
TABLE_71 = _by_alpha(NAMES, _71)
# 40 clients, by auxiliary data.
DISTILLED = ("FedDF", "FedDF+P", "FedAUX")
TABLE_72 = {
    "stl10": _by_alpha(DISTILLED, "0.01 27.9 43.0 76.8"),
    "svhn": _by_alpha(DISTILLED, "0.01 28.1 29.6 43.7"),
}
# MobileNetV2, 100 clients, one round of 40 epochs.
ONE_SHOT = ("FedAvg", "FedProx", "FedDF", "FedAvg+P", "FedProx+P", "FedDF+P", "FedAUX")
_73 = """\
0.01 10.3 11.6 16.8 24.3 27.2 46.7 64.8
0.04 13.6 14.3 29.5 44.0 43.4 61.1 65.5
0.16 23.6 23.7 37.7 57.6 56.9 67.6 68.2
10.24 30.5 30.5 40.4 69.9 70.0 71.2 71.3
"""
TABLE_73 = _by_alpha(ONE_SHOT, _73)
# Table C.1: ResNet-8 on CIFAR-100, otherwise as table 7.1.
_C1 = """\
0.01 24.1 11.4 18.2 34.1
0.04 36.3 24.4 42.0 47.4
0.16 47.2 45.0 58.0 56.4
0.64 50.7 49.5 60.8 60.7
2.56 52.2 52.5 61.6 62.5
10.24 52.2 51.2 62.0 62.5
"""
TABLE_C1 = _by_alpha(("FedAvg", *DISTILLED), _C1)
# Table C.4: the best points of grids after 50 rounds; no FedBE+P.
TUNED = NAMES[:7] + NAMES[8:]
_C4 = """\
0.01 27.7 41.45 34.81 31.96 39.29 61.22 47.86 75.01
100 82.28 82.32 82.1 82.46 89.24 89.46 89.36 89.41
"""
TABLE_C4 = _by_alpha(TUNED, _C4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      data: npz file of x_train, y_train, x_test and y_test, images uint8 and labels
        from 0 on, that clients hold; None for built-in digits.
      num_classes: of them; printed numbers of 100 are those of table C.1.
      auxiliary: npz files of x or x_train, what the server holds; the second and later
        ones are for table 7.2 alone. Left out, half of the clients' training images.
      size: height and width that images are brought to.
      model: "cnn" of two convolutions, or as in the paper.
      num_train: training images of all clients together, at most.
      num_test: images that models are tested on, at most.
      num_public: images to distil on, at most, of 80 % of the server's.
      num_negatives: of its other images, at most.
      num_clients: clients of all tables.
      alphas: concentrations of the split.
      cohort: share of the clients in a round.
      rounds: of every run but those of one round.
      one_shot_epochs: local and public epochs there.
      num_seeds: independent runs of each method.
      client_lr: of clients' Adam.
      linear_lr: of it where heads alone are trained.
      distil_lr: of the server's.
      mu: of FedProx.
      grid: step sizes and mu that table C.4 tries.
      certainty: how scores are released.
      epsilons: of figure 7.7, 0 for none.
      regularisations: of figure 7.7.
      pretraining: of the extractor.
      batch_size: of local training.
      local_epochs: of every round but that of table 7.3.
      public_batch_size: of distillation.
      public_epochs: of distillation in all other rounds; in the paper 1, of 625 steps.
      methods: names of those that tables compare.
      tables: which to make; "C.4" has grids of every method, as figure C.5 has.
      out: directory of the studies; it goes on with what is there.
    """

    data: Path | None = Path("data/mnist_by_writer/mnist_by_writer.npz")
    auxiliary: tuple[Path, ...] = (
        Path("data/usps/usps.npz"),
        Path("data/femnist_digits_12/femnist_digits_12.npz"),
    )
    num_classes: PositiveInt = 10
    size: PositiveInt = 12
    model: Literal["cnn", "resnet8", "mobilenet_v2"] = "cnn"
    num_train: PositiveInt = 5000
    num_test: PositiveInt = 2500
    num_public: PositiveInt = 1000
    num_negatives: PositiveInt = 1500
    num_clients: PositiveInt = 20
    alphas: tuple[float, ...] = (0.01, 100.0)
    cohort: Share = 0.4
    rounds: PositiveInt = 12
    one_shot_epochs: PositiveInt = 10
    num_seeds: PositiveInt = 5
    client_lr: Positive = 1e-3
    linear_lr: Positive = 1e-2
    distil_lr: Positive = 1e-3
    mu: float = 0.01
    grid: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-5)
    certainty: privacy.CertaintyConfig = dataclasses.field(
        default_factory=lambda: privacy.CertaintyConfig(
            regularisation=0.01, epsilon=1.0
        )
    )
    epsilons: tuple[float, ...] = (0.0, 1.0, 0.1)
    regularisations: tuple[float, ...] = (0.1, 0.01)
    pretraining: pretrain.Config = dataclasses.field(
        default_factory=lambda: pretrain.Config(
            projection=(64, 32), work=LocalWork(batch_size=256, epochs=20)
        )
    )
    batch_size: PositiveInt = 20
    local_epochs: PositiveInt = 1
    public_batch_size: PositiveInt = 32
    public_epochs: PositiveInt = 3
    methods: tuple[Annotated[str, check.among(NAMES)], ...] = NAMES
    tables: tuple[Annotated[str, check.among(TABLES)], ...] = TABLES[:-1]
    out: Path = Path("runs/fedaux_tables")


_DIGITS = Experiment(
    data=None,
    auxiliary=(),
    size=8,
    local_epochs=5,
    certainty=privacy.CertaintyConfig(regularisation=1e-3, epsilon=None),
)

PRESETS = {
    "default": Experiment(),
    "digits": _DIGITS,
    "smoke": dataclasses.replace(
        _DIGITS,
        num_clients=5,
        rounds=2,
        num_seeds=2,
        num_train=300,
        num_public=200,
        alphas=(0.01,),
        pretraining=pretrain.Config(projection=(16, 8), work=LocalWork(batch_size=256)),
        methods=("FedDF+P", "FedAUX"),
        tables=("7.1", "7.8"),
    ),
    "cifar": Experiment(
        data=Path("data/cifar10_subset/cifar10_subset.npz"),
        auxiliary=(),
        size=16,
        local_epochs=2,
    ),
    "paper": Experiment(
        data=Path("data/cifar10/cifar10.npz"),
        auxiliary=(Path("data/stl10/stl10.npz"), Path("data/svhn/svhn.npz")),
        size=32,
        model="resnet8",
        num_train=50_000,
        num_test=10_000,
        num_public=80_000,
        num_negatives=20_000,
        certainty=privacy.CertaintyConfig(mechanism="classical"),
        regularisations=(1.0, 0.1, 0.01),
        rounds=100,
        one_shot_epochs=40,
        num_seeds=3,
        batch_size=32,
        local_epochs=1,
        public_batch_size=128,
        public_epochs=1,
        distil_lr=5e-5,
        epsilons=(0.0, 0.5, 0.1, 0.04),
        pretraining=pretrain.Config(),
    ),
}


class Problem(NamedTuple):
    """What an experiment works on, once extractors are there."""

    negatives: np.ndarray
    public: np.ndarray
    model: Model
    head: str
    extractor: Any
    populations: dict[str, FederatedData]  # by concentration, with public and scores
    released: privacy.Certainty  # by the first of them

    def features(self, x: np.ndarray) -> np.ndarray:
        """Of the extractor."""
        return pretrain.features(self.model, self.head, self.extractor, x)

    def certainty(
        self, config: privacy.CertaintyConfig, data: FederatedData
    ) -> privacy.Certainty:
        """What clients release; their noise is the same but for its scale."""
        known = self.negatives, self.public
        return fedaux.prepare(config, self.features, data, *known, jax.random.key(1))


def load(experiment: Experiment, which: int = 0) -> tuple[Dataset, np.ndarray]:
    """The clients' pooled images, and the server's of one source."""
    for path in filter(None, (experiment.data, *experiment.auxiliary)):
        if not path.is_file():
            raise FileNotFoundError(
                f"no file {path}; --data and --auxiliary say where images are, "
                f"--preset digits needs none."
            )
    if experiment.data is None:
        pool = images.mapped(digits.load(), lambda x: x.reshape(-1, 8, 8, 1))
    else:
        shape = npz.read(experiment.data)["x_train"].shape[1:]
        pool = images.from_npz(
            experiment.data, experiment.num_classes, shape, (None, None)
        )
    pool = images.mapped(pool, lambda x: images.resized(x, experiment.size))
    own, tested = (
        np.random.default_rng(seed).permutation(len(split["y"]))
        for seed, split in enumerate((pool.train, pool.test))
    )
    if experiment.auxiliary:
        arrays = npz.read(experiment.auxiliary[which])
        extra = images.to_float(arrays["x" if "x" in arrays else "x_train"])
        extra = images.resized(extra, experiment.size)
    else:
        own, rest = np.array_split(own, 2)
        extra = pool.train["x"][rest]
    own, tested = own[: experiment.num_train], tested[: experiment.num_test]
    train = {k: v[own] for k, v in pool.train.items()}
    return Dataset(train, {k: v[tested] for k, v in pool.test.items()}), extra


def pretrained(experiment: Experiment, which: int = 0, width: int = 16) -> Problem:
    """Trains an extractor on all images of the server and scores those to distil on.

    Of the source `which`; the small network has `width` channels.
    """
    pool, extra = load(experiment, which)
    image, classes = extra.shape[1:], experiment.num_classes
    if experiment.model == "cnn":
        module = models.CNN(classes, ((width,), (2 * width,)), (64,), padding="SAME")
        model, head = models.classifier(module, image), "Dense_1"
    else:
        named = {"resnet8": models.resnet8, "mobilenet_v2": models.mobilenet_v2}
        model, head = named[experiment.model](classes, image=image), "Dense_0"
    # Photographs may be mirrored, digits not.
    views = pretrain.Views(shift=max(1, image[0] // 8), flip=image[2] == 3)
    extractor, _ = pretrain.contrastive(
        experiment.pretraining, model, head, extra, jax.random.key(0), views
    )
    fraction = 1 - min(0.8, experiment.num_public / len(extra))
    negatives, public = (part["x"] for part in split_public({"x": extra}, fraction))
    parts = negatives[: experiment.num_negatives], public, model, head, extractor
    problem = Problem(*parts, {}, None)  # type: ignore[arg-type]
    releases = []
    for alpha in experiment.alphas:
        data = partition.alternating_dirichlet(pool, experiment.num_clients, alpha)
        releases.append(problem.certainty(experiment.certainty, data))
        shared = {"x": public, "scores": releases[-1].scores}
        data = dataclasses.replace(data, public=shared)
        problem.populations[f"alpha {alpha:g}"] = data
    return problem._replace(released=releases[0])


def methods(
    experiment: Experiment,
    problem: Problem,
    names: Sequence[str] = NAMES,
    *,
    model: Model | None = None,
    epochs: int | None = None,
) -> dict[str, study.Method]:
    """Methods by name.

    With "+P" behind its name a method starts from the extractor, as FedAUX does; a
    model of its own (linear, on features) has none.
    """
    e = experiment
    work = LocalWork(batch_size=e.batch_size, epochs=epochs or e.local_epochs)
    lr = e.client_lr if model is None else e.linear_lr
    common: dict[str, Any] = {"client_lr": lr, "work": work}
    public = LocalWork(batch_size=e.public_batch_size, epochs=epochs or e.public_epochs)
    taught = common | {"distil_lr": e.distil_lr, "public_work": public}
    kinds: dict[str, tuple[Any, Any]] = {
        "FedAvg": (fedavg, fedavg.Config(**common)),
        "FedProx": (fedprox, fedprox.Config(mu=e.mu, **common)),
        "FedDF": (feddf, feddf.Config(**taught)),
        "FedBE": (fedbe, fedbe.Config(**taught)),
        "FedAUX": (fedaux, fedaux.Config(**taught)),
    }
    logits = logits_of_model(model or problem.model)

    def of(name: str) -> study.Method:
        module, config = kinds[name.removesuffix("+P")]
        says = {} if module in (fedavg, fedprox) else {"logits": logits}
        given = model is None and (name.endswith("+P") or name == "FedAUX")

        def make(config: Any, loss_fn: Any) -> Algorithm:
            adam = optax.adam(config.client_lr)
            algorithm = module.make(config, loss_fn, client_optimizer=adam, **says)
            if not given:
                return algorithm
            return pretrain.starting_from(algorithm, problem.extractor, (problem.head,))

        return study.Method(make=make, config=config)

    return {name: of(name) for name in names}


def _study(
    experiment: Experiment,
    problem: Problem,
    methods: dict[str, study.Method],
    claims: Sequence[tuple[str, str]],
    printed: Mapping[str, Mapping[str, float]] | None = None,
    *,
    populations: dict[str, FederatedData] | None = None,
    model: Model | None = None,
    rounds: int | None = None,
    cohort: float | None = None,
) -> study.Study:
    """Methods on populations; `claims` of each, and `printed` per cent by setting."""
    share, settings = cohort or experiment.cohort, {}
    rounds = rounds or experiment.rounds
    for name, data in (populations or problem.populations).items():
        options = {
            "cohort_size": max(1, round(share * data.num_clients)),
            "eval_every": 1,
            "checkpoint_every": max(1, rounds // 4),
        }
        settings[name] = study.Setting(
            data=data, model=model or problem.model, rounds=rounds, options=options
        )
    return study.Study(
        methods=methods,
        settings=settings,
        seeds=range(experiment.num_seeds),
        show_best=True,
        printed={
            (method, name): value / 100
            for name in settings
            for method, value in (printed or {}).get(name, {}).items()
        },
        claims=[(*claim, name) for name in settings for claim in claims],
    )


def _most_skewed(problem: Problem) -> dict[str, FederatedData]:
    return dict(list(problem.populations.items())[:1])


def table_71(experiment: Experiment, problem: Problem) -> study.Study:
    """All methods, by concentration."""
    pairs = [("FedAvg+P", "FedAvg"), ("FedDF+P", "FedDF"), ("FedAUX", "FedDF+P")]
    pairs.append(("FedAUX", "FedBE+P"))
    printed = TABLE_71 if experiment.num_classes == 10 else TABLE_C1
    compared = methods(experiment, problem)
    whole = _study(experiment, problem, compared, pairs, printed)
    return whole.only(experiment.methods)


def table_c4(experiment: Experiment, problem: Problem) -> study.Study:
    """Step sizes and mu of every method, chosen on a tenth of the clients' examples."""
    tuned = {}
    for name, method in methods(experiment, problem, TUNED).items():
        has = {field.name for field in dataclasses.fields(method.config)}
        names = [key for key in ("client_lr", "distil_lr", "mu") if key in has]
        grid = dict.fromkeys(names, experiment.grid)
        tuned[name] = dataclasses.replace(method, grid=grid)
    return _study(
        experiment,
        problem,
        tuned,
        [("FedAUX", "FedDF+P"), ("FedAUX", "FedProx+P")],
        TABLE_C4,
        populations={
            k: split_examples(x, 0, 0.1) for k, x in problem.populations.items()
        },
        rounds=min(50, experiment.rounds),
    ).only(experiment.methods)


def table_73(experiment: Experiment, problem: Problem) -> study.Study:
    """One round of all clients and many epochs, by concentration."""
    one = methods(experiment, problem, ONE_SHOT, epochs=experiment.one_shot_epochs)
    pairs = [("FedDF+P", "FedDF"), ("FedDF", "FedAvg"), ("FedAUX", "FedDF+P")]
    whole = _study(experiment, problem, one, pairs, TABLE_73, rounds=1, cohort=1.0)
    return whole.only(experiment.methods)


def table_72(experiment: Experiment, problem: Problem, source: str) -> study.Study:
    """FedDF and FedAUX where the server holds something else than in table 7.1."""
    return _study(
        experiment,
        problem,
        methods(experiment, problem, DISTILLED),
        [("FedDF+P", "FedDF"), ("FedAUX", "FedDF+P")],
        TABLE_72.get(source),
        populations=_most_skewed(problem),
    ).only(experiment.methods)


def _by_scores(
    experiment: Experiment, problem: Problem, tables: Iterable[str], make: Any = None
) -> dict[str, study.Method]:
    """FedAUX, or as `make` has it, by the name of its table of scores."""
    (ours,) = methods(experiment, problem, ["FedAUX"]).values()
    change = functools.partial(dataclasses.replace, ours.config)
    return {
        table: study.Method(make=make or ours.make, config=change(scores=table))
        for table in tables
    }


def _of_scores(
    experiment: Experiment,
    problem: Problem,
    score_all: Callable[[FederatedData], dict[str, np.ndarray]],
    claims: Sequence[tuple[str, str]],
) -> study.Study:
    """FedAUX with several tables of scores, by name, on the most skewed clients."""
    ((name, data),) = _most_skewed(problem).items()
    tables = score_all(data)
    data = dataclasses.replace(data, public={**data.public, **tables})
    rows, few = _by_scores(experiment, problem, tables), min(10, experiment.rounds)
    population = {name: data}
    return _study(experiment, problem, rows, claims, populations=population, rounds=few)


def figure_74(experiment: Experiment, problem: Problem) -> study.Study:
    """Certainties without noise beside other scorers, with lambda of the paper too.

    Its code minimises a sum: lambda of the mean is N times smaller.
    """

    def score_all(data: FederatedData) -> dict[str, np.ndarray]:
        own, mask = pad(pretrain.on_features(problem.features, data).train)
        known = [problem.features(x) for x in (problem.negatives, problem.public)]
        free = dataclasses.replace(experiment.certainty, epsilon=None)
        total = data.train.sizes.mean() + len(problem.negatives)
        code = dataclasses.replace(free, regularisation=0.1 / total)
        return {
            "logistic": problem.certainty(free, data).scores,
            "logistic, lambda 0.1 over N": problem.certainty(code, data).scores,
        } | {name: score(name, own["x"], mask, known[0], known[1]) for name in SCORERS}

    ours = ("logistic", "logistic, lambda 0.1 over N")
    claims = [(name, other) for name in ours for other in SCORERS]
    return _of_scores(experiment, problem, score_all, claims)


def figure_77(experiment: Experiment, problem: Problem) -> study.Study:
    """Certainties by regularisation and privacy."""
    names = {
        (lam, epsilon): f"lambda {lam:g}{f', epsilon {epsilon:g}' if epsilon else ''}"
        for lam in experiment.regularisations
        for epsilon in experiment.epsilons
    }

    def score_all(data: FederatedData) -> dict[str, np.ndarray]:
        release = functools.partial(dataclasses.replace, experiment.certainty)
        return {
            name: problem.certainty(
                release(regularisation=lam, epsilon=epsilon or None), data
            ).scores
            for (lam, epsilon), name in names.items()
        }

    claims = [
        (names[lam, 0], name)
        for (lam, epsilon), name in names.items()
        if epsilon and (lam, 0) in names
    ]
    return _of_scores(experiment, problem, score_all, claims)


def figure_78(experiment: Experiment, problem: Problem) -> study.Study:
    """Linear evaluation: heads alone are trained, on features."""
    populations = {
        name: pretrain.on_features(problem.features, data)
        for name, data in problem.populations.items()
    }
    width = problem.features(problem.public[:1]).shape[1]
    model = models.logistic_regression(width, experiment.num_classes)
    return _study(
        experiment,
        problem,
        methods(experiment, problem, ["FedAvg+P", "FedDF+P", "FedAUX"], model=model),
        [("FedAUX", "FedDF+P"), ("FedDF+P", "FedAvg+P")],
        populations=populations,
        model=model,
    ).only(experiment.methods)


def figure_75(experiment: Experiment, problem: Problem) -> study.Study:
    """Two prototypes of half of the clients each, equal scores and certainties."""
    other = pretrained(experiment, width=8)
    both, of = [problem, other], np.arange(experiment.num_clients) % 2
    ((name, data),) = _most_skewed(problem).items()
    tables = np.stack([one.released.scores for one in both])
    public = {
        "x": problem.public,
        "prototype": of.astype(np.int32),
        "FedAUX": tables[of, np.arange(len(of))],
        "FedDF+P": np.ones_like(tables[0]),
    }
    heads = tuple(f"{i}/{one.head}" for i, one in enumerate(both))

    def make(config: Any, loss_fn: Any) -> Algorithm:
        del loss_fn
        algorithm = fedaux.make_mixed(
            config,
            [one.model.loss for one in both],
            logits=[logits_of_model(one.model) for one in both],
            client_optimizer=optax.adam(config.client_lr),
        )
        extractors = tuple(one.extractor for one in both)
        return pretrain.starting_from(algorithm, extractors, heads)

    pair = ("FedAUX", "FedDF+P")
    return _study(
        experiment,
        problem,
        _by_scores(experiment, problem, pair, make),
        [pair],
        populations={f"{name}, mixed": dataclasses.replace(data, public=public)},
        model=as_one([one.model for one in both]),
    )


def notes(experiment: Experiment, problem: Problem) -> list[str]:
    """What the numbers rest on, and what they can't show."""
    (data,), released = _most_skewed(problem).values(), problem.released
    width = released.weights.shape[1]
    smallest = int(data.train.sizes.min()) + len(problem.negatives)
    down, up = fedaux.preparation_bytes(
        split(problem.extractor, (problem.head,))[0], width, len(problem.negatives)
    )
    config, tested = experiment.certainty, data.splits["test"].num_examples
    said = [
        "Printed numbers are of the best round, as is the difference to ours; claims "
        "are tested on the last one. They are of larger networks, images and "
        "populations: orderings are compared, not levels.",
        f"Run here: {experiment.rounds} rounds, table 7.3 with "
        f"{experiment.one_shot_epochs} epochs; the paper has 100 and 40. Seeds share "
        f"{tested} test images, by which an accuracy has a standard error of up to "
        f"{0.5 / tested**0.5:.1%}: that is not in the deviations over seeds.",
        f"Preparation: a client receives {down / 1e6:.4g} MB once, the extractor and "
        f"{len(problem.negatives)} features, and sends {up} bytes.",
        f"Clients have {data.train.sizes.mean():.0f} examples each in the mean and N "
        f"is {smallest} or more, 22,500 in the paper, to which noise is inverse.",
    ]
    noise = (
        "Scores are released without noise: with so few examples that of the paper's "
        "epsilon of 0.1 would hide everything."
    )
    if config.epsilon is not None:
        most = (2 * np.log(2) / config.regularisation) ** 0.5
        noise = (
            f"Scores are released with ({config.epsilon:g}, {config.delta:g})-DP for "
            f"an example of a client, by the {config.mechanism} mechanism: the noise "
            f"has a norm of about {released.sigma.max() * width**0.5:.2g}, weights "
            f"without it of at most {most:.3g}."
        )
    return [
        *said,
        noise,
        "The paper's scores at its own lambda and epsilon lose less to noise than its "
        "equations allow (its code minimises a sum, so that lambda is N times smaller "
        "there); figure 7.7 can't be expected to come out.",
    ]


def audit(problem: Problem) -> Any:
    """What the best scored public images tell of a client's own."""
    (data,), released = _most_skewed(problem).values(), problem.released
    mapped = pretrain.on_features(problem.features, data)
    client = int(data.train.sizes.argmax())
    own, h = data.train.client(client)["x"], mapped.train.client(client)["x"]
    best = np.argsort(-released.scores[client])[:5]
    like = nearest(mapped.public["x"][best], h, min(4, len(h)))
    figure, axes = report.panels(5, 5, len(best), 1 + like.shape[1])
    for row, q, rows in zip(axes, best, like, strict=True):
        for cell, image in zip(row, [problem.public[q], *own[rows]], strict=True):
            cell.imshow(image.squeeze(), cmap="gray")
            cell.set_axis_off()
    axes[0, 0].set_title("public", size=9)
    axes[0, 1].set_title("most like it of client " + str(client), size=9, loc="left")
    return figure


MAKERS = {"7.1": table_71, "7.3": table_73, "7.4": figure_74, "7.5": figure_75}
MAKERS |= {"7.7": figure_77, "7.8": figure_78, "C.4": table_c4}


def make_studies(experiment: Experiment, problem: Problem) -> dict[str, study.Study]:
    """The experiment's tables by name."""
    made = {}
    for table in experiment.tables:
        if table != "7.2":
            made[table] = MAKERS[table](experiment, problem)
            continue
        for which, path in enumerate(experiment.auxiliary[1:], 1):
            other = pretrained(experiment, which)
            made[f"7.2 {path.stem}"] = table_72(experiment, other, path.stem)
    return made


def main(experiment: Experiment) -> None:
    """Runs the studies, prints their tables and writes them together."""
    problem, out = pretrained(experiment), experiment.out
    page = report.Page("FedAUX, reduced", notes(experiment, problem), out)
    for name, this in make_studies(experiment, problem).items():
        page.show(name, study.run(this, out / name))
    page.draw("audit", audit(problem))
    page.write("report")
