"""Data that ships with the package: the 1,797 handwritten digits of the demo."""

from __future__ import annotations

from importlib.resources import files
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray


def load_digits() -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Images ``float32[1797, 64]`` scaled to 0..1 and labels ``uint8[1797]``.

    8x8 counts of ink from 0 to 16, row by row. Source and licence: ``ATTRIBUTION.md`` beside this
    file.
    """
    content = files(__name__).joinpath("digits.npz").read_bytes()
    with np.load(BytesIO(content), allow_pickle=False) as archive:
        images, labels = archive["images"], archive["labels"]
    return (images / np.float32(16)).astype(np.float32), labels
