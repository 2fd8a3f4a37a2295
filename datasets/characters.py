r"""Text as integer ids of characters: the vocabulary and the pieces of FedJAX.

Ids of the Shakespeare task: 0 padding, 1 the start of a snippet (bos), 2 its end (eos),
3 to 88 the 86 characters of `VOCABULARY`, 89 any other byte. A snippet is what one
record of the source holds: a line or speech of a role, a message, a comment.

References:
  TensorFlow Federated, "Federated Learning for Text Generation" (the vocabulary).

  Ro et al., "FedJAX: Federated learning simulation with JAX", arXiv:2108.02117,
  `fedjax.datasets.shakespeare` (ids and pieces).
"""

from collections.abc import Iterable

import numpy as np

from fedjax_core import check

VOCABULARY = (
    "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\n"
    "aeimquyAEIMQUY]!%)-159\r"
)
"""The 86 characters that have an id of their own, in the order of their ids."""

PAD, BOS, EOS = 0, 1, 2
FIRST = 3
"""The id of `VOCABULARY[0]`."""

OUT_OF_VOCABULARY = FIRST + len(VOCABULARY)
NUM_IDS = OUT_OF_VOCABULARY + 1
"""90: ids are 0 to 89."""

_ID_OF_BYTE = np.full(256, OUT_OF_VOCABULARY, np.int32)
_ID_OF_BYTE[list(VOCABULARY.encode())] = FIRST + np.arange(len(VOCABULARY))


def encode(snippet: str | bytes) -> np.ndarray:
    """The ids of a snippet's bytes, [num_bytes] int32; a str counts as UTF-8.

    So one character beyond ASCII is as many ids `OUT_OF_VOCABULARY` as it has bytes.
    """
    if isinstance(snippet, str):
        snippet = snippet.encode(errors="surrogatepass")
    return _ID_OF_BYTE[np.frombuffer(snippet, np.uint8)]


def decode(ids: np.ndarray) -> str:
    """The text that ids, ints in [0, 89] of any shape, stand for in row-major order.

    Padding, bos and eos vanish; an id out of vocabulary shows as the replacement
    character, U+FFFD. ValueError for an id outside this range.
    """
    ids = np.asarray(ids)
    if ids.size and not 0 <= ids.min() <= ids.max() < NUM_IDS:
        found = f"{ids.min()} to {ids.max()}"
        raise ValueError(f"ids must be in [0, {NUM_IDS - 1}], got {found}.")
    symbols = np.array(["", "", "", *VOCABULARY, "\N{REPLACEMENT CHARACTER}"])
    return "".join(symbols[ids.ravel()])


def pairs(snippets: Iterable[str | bytes], length: int = 80) -> dict[str, np.ndarray]:
    """The snippets of one client as pieces with the next id at every position.

    The snippets, each between bos and eos, are joined to one sequence of m ids. Inputs
    are its first m - 1 ids and targets its last m - 1, both cut into pieces of `length`
    >= 1 whose last is filled up with padding. So every id but the first is a target
    once. With length 3, "ABCD" and "E" give ::

      x: [bos A B] [C D eos]   [bos E pad]
      y: [A   B C] [D eos bos] [E eos pad]

    An empty snippet is bos and eos.

    Returns:
      ``{"x": [n, length] int32, "y": [n, length] int32}``, n = ceil((m - 1) / length),
      or 0 without snippets. Targets that are `PAD` are not to be scored.
    """
    check.positive_int(length=length)
    if isinstance(snippets, str | bytes):
        raise TypeError("snippets must be an iterable of texts, got a single text.")
    parts: list[np.ndarray] = []
    for snippet in snippets:
        parts += [np.array([BOS]), encode(snippet), np.array([EOS])]
    joined = np.concatenate(parts) if parts else np.array([BOS])
    m = len(joined) - 1
    n = -(-m // length)
    x, y = np.full((2, n * length), PAD, np.int32)
    x[:m], y[:m] = joined[:-1], joined[1:]
    return {"x": x.reshape(n, length), "y": y.reshape(n, length)}
