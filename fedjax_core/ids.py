"""Where data meets a model: labels and tokens out of range are an error at once."""

from collections.abc import Mapping

import numpy as np

from fedjax_core.data.memmap import row_blocks
from fedjax_core.data.packed import FederatedData
from fedjax_core.models.model import Ids


def check_ids(ids: Mapping[str, Ids], data: FederatedData) -> None:
    """Raises ValueError where an array of any split holds what its `Ids` don't allow.

    Names split, array, value, client and the first example that has it. Arrays that a
    split does not have are passed over.
    """
    for split, packed in data.splits.items():
        for name in ids.keys() & packed.examples.keys():
            num, missing = ids[name]
            array = packed.examples[name]
            start = 0
            for piece in row_blocks(array):
                # Not a number is no id either.
                wrong = ~((piece >= 0) & (piece < num))
                if piece.dtype.kind == "f":
                    wrong |= piece != np.floor(piece)
                if missing is not None:
                    wrong &= piece != missing
                if not wrong.any():
                    start += len(piece)
                    continue
                place = tuple(np.argwhere(wrong)[0])
                row = start + place[0]
                client = np.searchsorted(packed.offsets, row, side="right") - 1
                also = "" if missing is None else f" or {missing} where missing"
                raise ValueError(
                    f"{split} {name} must hold ids 0 to {num - 1}{also}, as the model "
                    f"has {num} of them, got {piece[place]} at client "
                    f"{data.client_ids[client]!r}, example "
                    f"{row - packed.offsets[client]}."
                )
