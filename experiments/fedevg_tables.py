"""Synthetic data at the server: tables and pictures of Hahn's chapter IV, reduced.

FedEvg, FedCGAN and FedCVAE end with ten images of each class that nobody held. Tables
4.2 and 4.3 are the accuracy of a classifier trained on these alone, tables 4.4 and 4.5
their Fréchet distance to real images, figures 4.1 to 4.4 the images; a third table says
what they tell of who was in the training data. Clients hold images of MNIST, CIFAR-10,
USPS or MedMNIST, see --path, or with --data digits those of scikit-learn, which need no
files. One page shows printed numbers beside ours.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax

from fedjax_core import (
    Algorithm,
    LocalWork,
    Model,
    Result,
    check,
    models,
    pretrain,
    random,
    server,
    simulate,
    study,
)
from fedjax_core.algorithms import fedcgan, fedcvae, fedevg
from fedjax_core.data.packed import Dataset, FederatedData
from fedjax_core.datasets import cifar, digits, images, medmnist, mnist, partition
from fedjax_core.experiments import report
from fedjax_core.generated import (
    Classifier,
    drawn,
    frechet_distance,
    membership_auroc,
)
from fedjax_core.models import layers, residual
from fedjax_core.result import spread
from fedjax_core.study_report import Table
from fedjax_core.types import Checked, Params, Positive, PositiveInt

NAMES = ("FedCGAN", "FedCVAE", "FedEvg")
MEDICAL = {"pneumonia": "pneumoniamnist", "derma": "dermamnist"}
MEDICAL["organ"] = "organcmnist"
DATA = ("mnist", "cifar10", *MEDICAL, "usps", "digits")
CELLS = ((10, 0.01), (10, 1.0), (100, 0.01), (100, 1.0))  # clients, concentration

# Per cent, each before its deviation over seeds, of 500 rounds and 32 x 32 pixels, or
# 64 x 64 of DermaMNIST and OrganCMNIST: data -> method -> by cell.
ACCURACY = {
    "mnist": {
        "FedCGAN": "44.18 16.09 60.81 9.12 56.39 12.68 68.06 11.78",
        "FedCVAE": "66.93 4.92 64.73 2.53 63.13 3.91 63.80 4.30",
        "FedEvg": "62.95 5.43 70.94 3.20 72.25 3.56 86.49 2.38",
    },
    "cifar10": {
        "FedCGAN": "9.96 1.42 15.95 4.06 14.88 1.78 21.31 2.42",
        "FedCVAE": "13.98 5.46 7.66 2.01 12.86 1.81 12.04 0.57",
        "FedEvg": "17.25 2.21 29.08 3.44 42.68 1.82 58.57 2.05",
    },
    "derma": {
        "FedCGAN": "3.74 20.42 10.15 6.73 11.39 19.20 21.95 15.39",
        "FedCVAE": "23.56 32.48 16.18 12.34 15.84 22.92 22.18 13.04",
        "FedEvg": "32.40 23.58 51.31 10.12 38.89 31.04 63.23 17.54",
    },
    "organ": {
        "FedCGAN": "2.46 5.45 19.24 4.75 4.38 15.02 26.11 11.50",
        "FedCVAE": "8.55 16.86 14.32 9.03 11.12 22.14 15.04 10.98",
        "FedEvg": "37.16 18.51 44.87 10.31 54.58 26.78 77.59 12.26",
    },
}
# Of features of a network that the text does not name.
FRECHET = {
    "mnist": {
        "FedCGAN": "331.48 0.23 300.67 0.59 353.86 1.78 325.66 1.78",
        "FedCVAE": "214.35 0.15 181.30 0.08 199.71 0.94 171.36 2.01",
        "FedEvg": "171.53 0.24 124.72 0.38 175.90 1.42 154.79 1.77",
    },
    "cifar10": {
        "FedCGAN": "388.13 0.67 291.59 1.21 363.78 0.17 326.10 0.78",
        "FedCVAE": "399.27 1.03 396.34 0.59 385.54 0.33 376.58 1.91",
        "FedEvg": "359.18 1.50 286.26 0.10 338.42 0.64 316.49 0.89",
    },
    "derma": {
        "FedCGAN": "372.89 11.12 296.88 15.91 364.40 7.18 326.60 12.64",
        "FedCVAE": "355.76 15.02 309.81 8.89 351.55 21.94 316.43 13.51",
        "FedEvg": "317.52 10.73 319.34 13.11 272.89 11.42 235.84 12.77",
    },
    "organ": {
        "FedCGAN": "389.88 16.77 333.50 12.98 461.91 17.06 386.53 16.21",
        "FedCVAE": "442.12 15.08 379.25 17.64 350.21 16.41 438.63 19.01",
        "FedEvg": "298.27 12.14 303.14 13.01 209.96 12.28 188.01 13.05",
    },
}
LIMITS = """\
What a setting this small can't show: levels. The chapter has 32 or 64 pixels a side,
ResNet-10 and 500 rounds; its epochs of the server's classifier and the network of its
Fréchet distances are not in the text, and those are printed of about a hundred images.
Ours compare all that was made with the whole test part, by features of a small network
that was trained on the training part. DermaMNIST and OrganCMNIST are here only if asked
for with files of one's own; PneumoniaMNIST and USPS have no printed numbers. What
follows a sign ± is the deviation over seeds, of three where it is printed. Claims are
the orders that the chapter prints, cell by cell; that FedEvg is best throughout, as it
says, is a claim of its own, which one of its accuracies and one of its distances
contradict. That accuracy grows from 10 to 100 clients is printed without a reason.
Local steps and step sizes of `smoke` and `default` were chosen on a fifth of the
training images of MNIST and of digits, held out for that, and never on test images. An
epoch of clients this small is a few local steps, after which a classifier that starts
anew has little to say of images: so local steps are a number there, the same for all
methods. The membership attack takes all training images for members, those of clients
that no cohort had as well; FedCGAN and FedCVAE make theirs of the same draws with every
seed.
"""
SCHEDULES = {
    "half": "half a cosine",
    "ddpm": "the schedule of diffusion models, near its first value to the end",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      data: names of "mnist", "cifar10", "usps", "digits" and, of MedMNIST, "pneumonia",
        "derma" and "organ".
      path: folder with mnist_by_writer.npz, cifar10_subset.npz, usps.npz,
        pneumoniamnist.npz, dermamnist.npz and organcmnist.npz, each in a folder named
        as it is, without its ending; from a size of 64 on dermamnist_64.npz and so on,
        in the same folders.
      size: height and width that images are brought to, which 4 divides.
      num_train: training images of all clients together, at most.
      num_test: images that are tested on, at most.
      num_clients: of the settings.
      alphas: concentrations of the settings, small for unlike clients.
      cohort_size: clients of a round, at most.
      methods: names of those that are compared.
      rounds: of every run.
      per_class: images of each class that the server makes.
      model: "small" of two convolutions, or "resnet10" as in the text.
      width: channels of the small networks.
      latent: numbers that generators start from.
      batch_size: of local steps.
      local_steps: of all methods, by client and round; None is an epoch.
      client_lr: of Adam in FedEvg.
      generator_lr: of Adam in the others.
      first_step: of the server's chain.
      last_step: of the server's chain.
      schedule: between them, see `fedjax_core.energies.step_sizes`.
      gradient_within: bound of entries of energies' gradients.
      fit_epochs: of the server's classifier on what was made.
      feature_epochs: of the network of Fréchet distances.
      num_seeds: independent runs; fewer than five decide nothing.
      out: directory of runs and page; it goes on with what is there.
    """

    data: tuple[Annotated[str, check.among(DATA)], ...] = ("mnist", "cifar10")
    path: Path = Path("data")
    size: PositiveInt = 12
    num_train: PositiveInt = 2000
    num_test: PositiveInt = 500
    num_clients: tuple[PositiveInt, ...] = (10, 100)
    alphas: tuple[Positive, ...] = (0.01, 1.0)
    cohort_size: PositiveInt = 10
    methods: tuple[Annotated[str, check.among(NAMES)], ...] = NAMES
    rounds: PositiveInt = 15
    per_class: PositiveInt = 10
    model: Literal["small", "resnet10"] = "small"
    width: PositiveInt = 8
    latent: PositiveInt = 16
    batch_size: PositiveInt = 32
    local_steps: PositiveInt | None = 10
    client_lr: float = 3e-3
    generator_lr: float = 3e-3
    first_step: float = 10.0
    last_step: float = 0.01
    schedule: Literal["ddpm", "half"] = "half"
    gradient_within: Positive = 3.0
    fit_epochs: PositiveInt = 40
    feature_epochs: PositiveInt = 10
    num_seeds: PositiveInt = 5
    out: Path = Path("runs/fedevg_tables")

    @property
    def work(self) -> LocalWork:
        """What a client does in a round, whatever the method."""
        return LocalWork(batch_size=self.batch_size, steps=self.local_steps)


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(
        data=("digits",),
        size=8,
        num_train=300,
        num_test=200,
        num_clients=(10,),
        alphas=(1.0,),
        rounds=5,
        width=4,
        latent=8,
        fit_epochs=10,
        feature_epochs=3,
        num_seeds=2,
    ),
    "paper": Experiment(
        size=32,
        num_train=60_000,
        num_test=10_000,
        rounds=500,
        model="resnet10",
        width=64,
        latent=128,
        batch_size=64,
        local_steps=None,
        client_lr=1e-3,
        generator_lr=2e-4,
        schedule="ddpm",
        num_seeds=3,
    ),
}


class Cell(NamedTuple):
    """A method in a setting.

    Attributes:
      method: its name.
      setting: its name.
      result: of all seeds, None where it failed.
      made: ``[S, M, H, W, C]``, what the server ended with.
      frechet: ``[S]``, distances to the test part.
      auroc: ``[S]``, of membership.
      error: why it failed, or nothing.
    """

    method: str
    setting: str
    result: Result | None
    made: np.ndarray = np.zeros((0, 0, 0, 0, 0))
    frechet: np.ndarray = np.zeros(0)
    auroc: np.ndarray = np.zeros(0)
    error: str = ""


def load(experiment: Experiment, name: str) -> tuple[Dataset, int]:
    """Images of one set, a random part of them, and the number of classes."""
    path, classes = experiment.path, 10
    if name == "mnist":
        whole = mnist.load(path / "mnist_by_writer")
    elif name == "cifar10":
        whole = cifar.load_cifar10(path / "cifar10_subset")
    elif name == "usps":
        whole = images.from_npz(path / name / "usps.npz", 10, (16, 16), (None, None))
    elif name in MEDICAL:
        flag = MEDICAL[name]
        whole = medmnist.load(path / flag, flag, 64 if experiment.size >= 64 else 28)
        classes = medmnist.FLAGS[flag].classes
    else:
        whole = images.mapped(digits.load(), lambda x: x.reshape(-1, 8, 8, 1))
    some = images.some(whole, experiment.num_train, experiment.num_test)
    return images.mapped(some, lambda x: images.resized(x, experiment.size)), classes


class Small(nn.Module):
    """Two convolutions that stride by 2, Swish, and a last layer of spectral norm 1."""

    num_classes: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images [B, H, W, C] to logits [B, num_classes]."""
        for channels in (self.width, 2 * self.width):
            x = nn.swish(layers.Conv(channels, padding="SAME", stride=2)(x))
        return residual.SpectralDense(self.num_classes)(x.reshape(len(x), -1))


def network(experiment: Experiment, num_classes: int) -> nn.Module:
    """The classifier of clients and of the server."""
    if experiment.model == "resnet10":
        return models.resnet10(num_classes, channels=experiment.width)
    return Small(num_classes, experiment.width)


class Method(NamedTuple):
    """What is simulated of a method, and the images behind its parameters."""

    algorithm: Algorithm
    init: Callable[[jax.Array], Params]
    images: Callable[[Params], jax.Array]


def methods(
    experiment: Experiment, image: tuple[int, ...], num_classes: int, local: Classifier
) -> dict[str, Method]:
    """The experiment's methods by name."""
    e = experiment
    fit: dict[str, Any] = {
        "num_classes": num_classes,
        "fit_work": LocalWork(batch_size=10, epochs=e.fit_epochs),
        "work": e.work,
    }
    drawing = fit | {"client_lr": e.generator_lr, "per_class": e.per_class}
    shape = (e.per_class * num_classes, *image)
    ours = fedevg.Config(
        client_lr=e.client_lr,
        rounds=e.rounds,
        first_step=e.first_step,
        last_step=e.last_step,
        schedule=e.schedule,
        within=(0.0, 1.0),
        gradient_within=(-e.gradient_within, e.gradient_within),
        **fit,
    )
    gan = models.conditional_gan(image, num_classes, latent=e.latent, width=e.width)
    vae = models.conditional_vae(image, num_classes, latent=e.latent, width=e.width)

    def of(module: Any, pair: Any, generate: Any) -> Method:
        config = module.Config(**drawing)
        images_of = drawn(config, generate, e.latent)
        return Method(module.make(config, pair, local), pair.init, images_of)

    made = {
        "FedCGAN": of(fedcgan, gan, gan.generate),
        "FedCVAE": of(fedcvae, vae, vae.decode),
        "FedEvg": Method(
            fedevg.make(ours, local),
            lambda key: jax.random.normal(key, shape),
            lambda params: params,
        ),
    }
    return {name: made[name] for name in e.methods}


def features_of(
    experiment: Experiment, pool: Dataset, num_classes: int
) -> tuple[Callable[[np.ndarray], np.ndarray], float]:
    """Features of a small network trained on the training part, and its accuracy."""
    module = models.CNN(num_classes, ((16,), (32,)), (64,), padding="SAME")
    model = models.classifier(module, pool.train["x"].shape[1:])
    key, head = random.seed_key(0), "Dense_1"
    work = LocalWork(batch_size=20, epochs=experiment.feature_epochs)

    @jax.jit
    def fit(train):
        adam = optax.adam(1e-3)
        return server.fit(model.loss, adam, model.init(key), train, key, work)

    params, _ = fit(dict(pool.train))
    right = jax.jit(model.metrics)(params, dict(pool.test))["accuracy"]
    features = functools.partial(pretrain.features, model, head, params)
    return features, float(np.mean(right))


def run(
    experiment: Experiment,
    setting: str,
    data: FederatedData,
    pool: Dataset,
    features: Callable[[np.ndarray], np.ndarray],
    num_classes: int,
) -> list[Cell]:
    """All methods in one setting; one that fails is a cell that says why."""
    image = pool.train["x"].shape[1:]
    module, real = network(experiment, num_classes), features(pool.test["x"])
    local, cells = models.as_classifier(module, image), []
    judged = models.classifier(module, image)

    def measured(name: str, method: Method) -> Cell:
        model = Model(
            method.init,
            # A loss of whatever the method starts from: only its memory is asked for.
            lambda params, batch, key: judged.loss(judged.init(key), batch, key),
            judged.metrics,
            judged.ids,
        )
        result = simulate(
            method.algorithm,
            data,
            model,
            rounds=experiment.rounds,
            cohort_size=min(experiment.cohort_size, data.num_clients),
            seeds=range(1, 1 + experiment.num_seeds),  # 0 chose the local steps
            eval_every=experiment.rounds,
            progress=False,
            run_dir=experiment.out / "runs" / setting / name,
            resume=True,
        )
        made = np.asarray(jax.jit(jax.vmap(method.images))(result.params))
        made = np.clip(made, 0, 1)
        frechet = [frechet_distance(features(x), real) for x in made]
        auroc = [membership_auroc(x, pool.train["x"], pool.test["x"]) for x in made]
        return Cell(name, setting, result, made, np.array(frechet), np.array(auroc))

    for name, method in methods(experiment, image, num_classes, local).items():
        try:
            cells.append(measured(name, method))
        except Exception as error:
            why = str(error) or type(error).__name__
            cells.append(Cell(name, setting, None, error=why))
    return cells


def outcome(experiment: Experiment, cells: Sequence[Cell], which: str) -> study.Outcome:
    """A table, of "accuracy" or "frechet": printed numbers and their orders."""
    higher, metric = which == "accuracy", f"test_{which}"
    printed, rows = {}, []
    for cell in cells:
        result, where = cell.result, (cell.method, cell.setting)
        if result is not None and not higher:
            last = np.full((len(cell.frechet), len(result.evaluated)), np.nan)
            last[:, -1] = cell.frechet
            evaluations = result.evaluations | {metric: last}
            result = dataclasses.replace(result, evaluations=evaluations)
        rows.append(study.Row(*where, None, metric, result, cell.error))
        known = printed_of(cell.setting, which)
        if cell.method in known:
            printed[where] = known[cell.method]
    claims = [
        (better, worse, setting)
        for (better, setting), (worse, there) in itertools.permutations(printed, 2)
        if setting == there
        and (printed[better, setting] > printed[worse, setting]) == higher
    ]
    design = study.Design(
        seeds=range(1, 1 + experiment.num_seeds),
        metric=which,
        higher_is_better=higher,
        printed=printed,
        claims=claims,
    )
    out = experiment.out / which
    out.mkdir(parents=True, exist_ok=True)
    return study.Outcome(design, out, rows, {})


def best(found: study.Outcome) -> Table:
    """Whether FedEvg is better than the best of the others, seed by seed."""
    sign, which = (1 if found.study.higher_is_better else -1), found.study.metric
    claims = []
    for setting in dict.fromkeys(row.setting for row in found.rows):
        rows = [row for row in found.rows if row.setting == setting]
        values = {row.method: sign * row.values for row in rows}
        known = printed_of(setting, which)
        first = max(known, key=lambda name: sign * known[name][0], default="")
        printed = f", printed: {first}" if first else ""
        ours = values.pop("FedEvg", np.zeros(0))
        others, gap = list(values.values()), np.zeros(0)
        if others and all(len(v) == len(ours) for v in others):
            gap = ours - np.max(others, axis=0)
        claims.append((f"FedEvg is best by {which}{printed}", setting, gap))
    return report.claims_table(f"The best by {which}", claims)


def printed_of(setting: str, which: str) -> Mapping[str, tuple[float, ...]]:
    """Printed means and deviations of a setting by method; none where none are."""
    source, scale = (ACCURACY, 100) if which == "accuracy" else (FRECHET, 1)
    for data, (k, cell) in itertools.product(source, enumerate(CELLS)):
        if setting == name_of(data, *cell):
            return {
                name: tuple(float(x) / scale for x in text.split()[2 * k :][:2])
                for name, text in source[data].items()
            }
    return {}


def name_of(data: str, clients: int, alpha: float) -> str:
    """Of a setting."""
    return f"{data}, {clients} clients, alpha {alpha:g}"


def membership(cells: Sequence[Cell]) -> Table:
    """What is given away, by setting and method."""
    rows = [
        (f"{cell.method}, {cell.setting}", spread(cell.auroc, ".3f") or "failed")
        for cell in cells
    ]
    title = "Membership attack by the distance to the nearest image; 0.5 tells nothing"
    return Table(title, ("method, setting", "area under the ROC curve"), rows)


def draw(cells: Sequence[Cell], num_classes: int) -> Any:
    """A picture of one setting: a row of images of each class, method by method."""
    figure, axes = report.panels(3.2 * len(cells), 3.4, 1, len(cells), squeeze=False)
    for place, cell in zip(axes[0], cells, strict=True):
        x = cell.made[0]
        tiles = x.reshape(num_classes, -1, *x.shape[1:]).transpose(0, 2, 1, 3, 4)
        height, width = num_classes * x.shape[1], tiles.shape[2] * x.shape[2]
        picture = tiles.reshape(height, width, x.shape[3])
        place.imshow(picture.squeeze(), cmap="gray", vmin=0, vmax=1)
        place.set_title(cell.method, size=9)
        place.set_axis_off()
    return figure


def described(experiment: Experiment) -> str:
    """What was run, in a sentence."""
    e = experiment
    steps = "an epoch" if e.local_steps is None else f"{e.local_steps} local steps"
    return (
        f"Run here: {e.rounds} rounds of {steps}, {e.num_seeds} seeds, clients and "
        f"server with the network {e.model!r}. The step sizes of FedEvg's server fall "
        f"from {e.first_step:g} to {e.last_step:g} by {SCHEDULES[e.schedule]}; images "
        f"are clipped to [0, 1], entries of gradients to {e.gradient_within:g}. "
        "The local steps of small presets were chosen on another seed, by training "
        "images that were held out."
    )


def main(experiment: Experiment) -> None:
    """Runs everything, prints the tables and writes one page of all."""
    about = f"{LIMITS}\n{described(experiment)}"
    page = report.Page("Synthetic data, reduced", about, experiment.out)
    everything, drawn_of = [], {}
    for name in experiment.data:
        pool, num_classes = load(experiment, name)
        features, accuracy = features_of(experiment, pool, num_classes)
        page.parts.append(
            f"* {name}: {len(pool.train['y'])} training images of "
            f"{experiment.size} x {experiment.size} pixels; the network of features is "
            f"right on {accuracy:.1%} of {len(pool.test['y'])} test images."
        )
        for size in itertools.product(experiment.num_clients, experiment.alphas):
            setting = name_of(name, *size)
            page.console.print(f"{setting} ...", highlight=False)
            data = partition.dirichlet_by_client(pool, *size)
            cells = run(experiment, setting, data, pool, features, num_classes)
            everything += cells
            if ended := [cell for cell in cells if cell.result is not None]:
                drawn_of[setting] = draw(ended, num_classes)
    page.parts.append("")
    for which, title in (
        ("accuracy", "Tables 4.2 and 4.3: accuracy of a classifier of these images"),
        ("frechet", "Tables 4.4 and 4.5: Fréchet distance to the test part"),
    ):
        found = outcome(experiment, everything, which)
        page.show(title, found, [best(found)])
    page.add(membership(everything))
    page.parts.append("# Figures 4.1 to 4.4: the images of one seed\n")
    for setting, figure in drawn_of.items():
        page.draw(f"figures/{setting}", figure)
    page.write("fedevg_tables")
