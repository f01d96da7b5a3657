"""The random bits of the reference against the published vectors of Philox 4x32-10."""

from __future__ import annotations

import numpy as np
import pytest

from trainkernel import reference
from trainkernel.builder import ProgramBuilder
from trainkernel.ops.indexed import philox

# From the known-answer tests of Random123 (kat_vectors).
VECTORS = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


def words(text: str) -> list[np.ndarray]:
    return [np.array([int(word, 16)], np.uint64) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_words(counter: str, key: str, expected: str) -> None:
    assert [int(word[0]) for word in philox(words(counter), words(key))] == [int(word, 16) for word in expected.split()]


def test_elements_are_words_of_successive_blocks() -> None:
    """Element i is word i % 4 of the block with the counter (i // 4, counter, stream)."""
    b = ProgramBuilder()
    key, counter = b.input("key", (2,), "uint32"), b.input("counter", (), "uint32")
    program = b.build([b.op("random_bits", key, counter, shape=(2, 3), stream=5)])
    (bits,) = reference.run(program, [np.array([7, 9], np.uint32), np.array(11, np.uint32)])
    blocks = [philox(words(f"{block:x} 0 b 5"), words("7 9")) for block in range(2)]
    expected = [int(word[0]) for block in blocks for word in block][:6]
    assert bits.shape == (2, 3) and bits.dtype == np.uint32
    assert bits.ravel().tolist() == expected
