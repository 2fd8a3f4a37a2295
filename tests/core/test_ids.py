"""Labels and tokens out of range are an error when data meets a model."""

import numpy as np
import pytest

from fedjax_core import FederatedData, ids, models, simulate
from fedjax_core.algorithms import fedavg
from fedjax_core.data import memmap
from fedjax_core.models.model import Ids


def data_of(**last):
    """Three clients of 2, 0 and 3 examples; `last` is the last one's."""
    first = {k: np.zeros((2, *v.shape[1:]), v.dtype) for k, v in last.items()}
    nobody = {k: v[:0] for k, v in first.items()}
    return FederatedData.from_lists([first] * 3, [first, nobody, last])


LABELS = [(-1, "int32"), (3, "int64"), (255, "uint8")]


@pytest.mark.parametrize(("label", "dtype"), LABELS)
def test_a_label_out_of_range_is_refused_before_the_first_round(label, dtype):
    y = np.array([0, 2, label], dtype)
    data = data_of(x=np.zeros((3, 4), np.float32), y=y)
    model = models.logistic_regression(4, 3)
    algorithm = fedavg.make(fedavg.Config(), model.loss)
    message = f"test y must hold ids 0 to 2, .* got {label} at client '2', example 2"
    with pytest.raises(ValueError, match=message):
        simulate(algorithm, data, model, rounds=1, cohort_size=2, progress=False)


def test_missing_labels_are_allowed_where_the_model_masks_them():
    data = data_of(y=np.array([0, 1, -1]))
    ids.check_ids({"y": Ids(2, missing=-1)}, data)
    with pytest.raises(
        ValueError, match=r"ids 0 to 0 or -1 where missing, .* got 1 at"
    ):
        ids.check_ids({"y": Ids(1, missing=-1)}, data)


def test_tokens_are_looked_at_in_pieces(monkeypatch):
    monkeypatch.setattr(memmap, "BLOCK", 1)
    x = np.array([[1, 2], [3, 19], [20, 0]])
    model = models.char_lstm(20, 2, 3, (4,))
    assert model.ids == {"x": Ids(20), "y": Ids(20, missing=0)}
    with pytest.raises(ValueError, match=r"test x must hold .* got 20 at client '2'"):
        ids.check_ids(model.ids, data_of(x=x, y=np.zeros_like(x)))
    ids.check_ids(model.ids, data_of(x=x % 20, y=np.zeros_like(x)))


def test_labels_of_floats_must_be_numbers():
    ids.check_ids({"y": Ids(2), "z": Ids(1)}, data_of(y=np.array([0.0, 1.0, 1.0])))
    with pytest.raises(ValueError, match="got nan at client"):
        ids.check_ids({"y": Ids(2)}, data_of(y=np.array([0.0, np.nan, 1.0])))
