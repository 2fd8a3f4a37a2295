"""What a method is built from, checked once at the door of its `make`."""

from typing import Any

import optax

from fedjax_core import check
from fedjax_core.reduce import Reduction
from fedjax_core.transform import Transform
from fedjax_core.types import LocalWork

_KINDS = {
    "client_optimizer": optax.GradientTransformation,
    "server_optimizer": optax.GradientTransformation,
    "distil_optimizer": optax.GradientTransformation,
    "transform": Transform,
    "reduce": Reduction,
    "downlink": Transform,
}


def check_parts(kind: type, config: Any, loss_fn: Any, **parts: Any) -> None:
    """Raises TypeError unless a method is given what it is built from.

    Args:
      kind: the method's `Config`.
      config: has to be one, with a `LocalWork` as `work` if it has any.
      loss_fn: has to be a function.
      **parts: optional arguments of `make` by name; None is their default.
    """
    if not isinstance(config, kind):
        raise TypeError(f"config must be a {_of(kind)}, got {_of(type(config))}.")
    if hasattr(config, "work"):
        check.instance(LocalWork, work=config.work)
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn must be a function, as model.loss is, got {_of(type(loss_fn))}."
        )
    for name, part in parts.items():
        if name not in _KINDS:
            raise TypeError(
                f"{name!r} is nothing that a method is built from, which are "
                f"{', '.join(_KINDS)}."
            )
        if part is not None:
            check.instance(_KINDS[name], **{name: part})


def _of(kind: type) -> str:
    """The kind's name with its module's, since every method has a Config."""
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__qualname__}"
