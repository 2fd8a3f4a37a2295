"""Every method names what it can't be built from."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from typing import Any, Unpack

import optax
import pytest
from tests.algorithms.generators import SOFTMAX, linear_gan, linear_vae

from fedjax_core import algorithms, clip, gaussian_mean, models
from fedjax_core.distillation import Parts as OfLabels
from fedjax_core.parts import _KINDS
from fedjax_core.personal import Parts

MODEL = models.logistic_regression(2, 3)
METHODS = {
    found.name: importlib.import_module(f"fedjax_core.algorithms.{found.name}")
    for found in pkgutil.iter_modules(algorithms.__path__)
    if not found.ispkg
}
REQUIRED = {
    "fedper": {"personal": ("b",)},
    "fedrep": {"personal": ("b",)},
    "lg_fedavg": {"shared": ("b",)},
    "one_shot_clustering": {"num_clusters": 2},
}


# Built from networks of their own, in the place of a loss.
NETWORKS: dict[str, tuple[Any, ...]] = {
    "fedcgan": (linear_gan(), SOFTMAX),
    "fedcvae": (linear_vae(), SOFTMAX),
    "fedevg": (SOFTMAX,),
}
OF_A_LOSS = [name for name in METHODS if name not in NETWORKS]


def make_of(name):
    make = METHODS[name].make
    return functools.partial(make, init=MODEL.init) if name == "superfed" else make


def config_of(name):
    return METHODS[name].Config(**REQUIRED.get(name, {}))


@dataclasses.dataclass(frozen=True)
class Config:
    """Of no method."""


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_another_kind_are_named(name):
    make, config, networks = METHODS[name].make, config_of(name), NETWORKS[name]
    make(config, *networks)
    with pytest.raises(TypeError, match=f"config must be a {name}.Config, got test_pa"):
        make(Config(), *networks)
    with pytest.raises(TypeError, match="work must be a LocalWork, got int"):
        make(dataclasses.replace(config, work=5), *networks)
    for i in range(len(networks)):
        wrong = [*networks[:i], MODEL.loss, *networks[i + 1 :]]
        with pytest.raises(TypeError, match=r"(classifier|networks) must be an? C"):
            make(config, *wrong)


@pytest.mark.parametrize("name", OF_A_LOSS)
def test_a_method_names_what_it_can_not_be_built_from(name):
    make, config = make_of(name), config_of(name)
    refused = [
        ((Config(), MODEL.loss), {}, f"config must be a {name}.Config, got test_parts"),
        ((MODEL.loss, config), {}, f"config must be a {name}.Config, got .*function"),
        ((type(config), MODEL.loss), {}, f"config must be a {name}.Config, got .*type"),
        (
            (config, MODEL),
            {},
            "loss_fn must be a function, as model.loss is, got .*Model",
        ),
    ]
    arguments = inspect.signature(make).parameters
    known = set(arguments)
    if "parts" in arguments and arguments["parts"].annotation == Unpack[Parts]:
        known |= Parts.__annotations__.keys()
        with pytest.raises(TypeError, match="'server_lr' is nothing"):
            make(config, MODEL.loss, server_lr=2.0)
        with pytest.raises(TypeError, match="downlink"):
            make(config, MODEL.loss, downlink=clip(1.0))
    if "parts" in arguments and arguments["parts"].annotation == Unpack[OfLabels]:
        known |= OfLabels.__annotations__.keys()
    if name == "fedopt":  # it hands on what FedAvg takes
        known |= inspect.signature(METHODS["fedavg"].make).parameters.keys()
        known -= {"server_optimizer"}
    parts = _KINDS.keys() & known
    for part in parts:
        for wrong in (3, 0, optax.adam, clip, gaussian_mean, "mean"):
            message = f"{part} must be a {_KINDS[part].__name__}, got "
            refused.append(((config, MODEL.loss), {part: wrong}, message))
    for args, kwargs, message in refused:
        with pytest.raises(TypeError, match=message):
            make(*args, **kwargs)
    make(config, MODEL.loss, **dict.fromkeys(parts))


@pytest.mark.parametrize("name", [name for name in OF_A_LOSS if name != "fedsgd"])
def test_work_is_local_work(name):
    with pytest.raises(TypeError, match="work must be a LocalWork, got int"):
        make_of(name)(dataclasses.replace(config_of(name), work=5), MODEL.loss)
