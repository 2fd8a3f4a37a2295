"""Text becomes the ids and pieces that FedJAX makes of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_core.datasets import characters
from fedjax_core.datasets.characters import BOS, EOS, FIRST, OUT_OF_VOCABULARY, PAD

texts = st.text(st.sampled_from(characters.VOCABULARY), max_size=20)


def test_ids_are_those_of_fedjax():
    assert len(set(characters.VOCABULARY)) == len(characters.VOCABULARY) == 86
    assert (PAD, BOS, EOS, FIRST) == (0, 1, 2, 3)
    assert (OUT_OF_VOCABULARY, characters.NUM_IDS) == (89, 90)
    ids = characters.encode("dhl~\r")
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, [3, 4, 5, 89, 88])
    np.testing.assert_array_equal(characters.encode(b"dhl~\r"), ids)


def test_a_str_counts_as_utf8_whatever_it_holds():
    np.testing.assert_array_equal(characters.encode("é"), [89, 89])
    np.testing.assert_array_equal(characters.encode("\ud800"), [89, 89, 89])
    assert characters.encode("").shape == (0,)


def test_the_example_of_fedjax():
    a, b, c, d, e = characters.encode("ABCDE")
    got = characters.pairs(["ABCD", b"E"], length=3)
    assert got["x"].dtype == got["y"].dtype == np.int32
    np.testing.assert_array_equal(got["x"], [[BOS, a, b], [c, d, EOS], [BOS, e, PAD]])
    np.testing.assert_array_equal(got["y"], [[a, b, c], [d, EOS, BOS], [e, EOS, PAD]])


@given(st.lists(texts, max_size=5), st.integers(1, 9))
def test_every_id_but_the_first_is_a_target_once(snippets, length):
    got = characters.pairs(snippets, length)
    joined = [i for s in snippets for i in (BOS, *characters.encode(s), EOS)]
    count = max(0, len(joined) - 1)
    for name, expected in (("x", joined[:-1]), ("y", joined[1:])):
        assert got[name].shape == (-(-count // length), length)
        flat = got[name].ravel()
        np.testing.assert_array_equal(flat[:count], expected)
        assert not flat[count:].any()


@given(texts)
def test_decoding_gives_the_text_back(text):
    assert characters.decode(characters.pairs([text], 7)["y"]) == text
    assert characters.decode(characters.encode(text + "~")) == text + "\ufffd"


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="length must be >= 1, got 0"):
        characters.pairs(["a"], 0)
    with pytest.raises(TypeError, match="snippets must be an iterable of texts"):
        characters.pairs("a text")
    with pytest.raises(ValueError, match=r"ids must be in \[0, 89\], got 1 to 90"):
        characters.decode(np.array([1, 90]))
