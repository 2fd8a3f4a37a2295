"""The TensorBoard callback writes events for every seed."""

import numpy as np

from fedjax_core.simulate import Report
from fedjax_core.tensorboard import TensorBoard


def test_every_seed_has_its_events(tmp_path) -> None:
    writer = TensorBoard(tmp_path)
    train = {"train_loss": np.array([[1.0, 0.5], [2.0, 1.5]])}
    writer(Report(2, (3, 5), train, {"test_accuracy": np.array([0.25, 0.75])}, None))
    writer.close()
    for seed in (3, 5):
        (events,) = (tmp_path / f"seed_{seed}").iterdir()
        text = events.read_bytes()
        assert b"train/train_loss" in text
        assert b"evaluation/test_accuracy" in text
