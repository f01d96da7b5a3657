"""NumPy's functions on traced arrays: names, signatures and dtype rules of ``jax.numpy``.

Outside of a traced function they take and return NumPy arrays. Differences from JAX by design:
an array keeps its dtype, float64 and int64 too; indices out of range are clamped by ``take``.
"""

from __future__ import annotations

from trainkernel.numpy import (
    angles,
    arithmetic,
    creation,
    diagonals,
    dtypes,
    elementwise,
    indexing,
    linalg,
    nearness,
    padding,
    products,
    reductions,
    shapes,
    updates,
)
from trainkernel.numpy.angles import *  # noqa: F403
from trainkernel.numpy.arithmetic import *  # noqa: F403
from trainkernel.numpy.contraction import einsum
from trainkernel.numpy.creation import *  # noqa: F403
from trainkernel.numpy.diagonals import *  # noqa: F403
from trainkernel.numpy.dtypes import *  # noqa: F403
from trainkernel.numpy.elementwise import *  # noqa: F403
from trainkernel.numpy.indexing import *  # noqa: F403
from trainkernel.numpy.nearness import *  # noqa: F403
from trainkernel.numpy.padding import *  # noqa: F403
from trainkernel.numpy.products import *  # noqa: F403
from trainkernel.numpy.reductions import *  # noqa: F403
from trainkernel.numpy.shapes import *  # noqa: F403
from trainkernel.numpy.updates import *  # noqa: F403
from trainkernel.trace import Array as ndarray  # noqa: N813

__all__ = [
    "einsum",
    "linalg",
    "ndarray",
    *angles.__all__,
    *arithmetic.__all__,
    *creation.__all__,
    *diagonals.__all__,
    *dtypes.__all__,
    *elementwise.__all__,
    *indexing.__all__,
    *nearness.__all__,
    *padding.__all__,
    *products.__all__,
    *reductions.__all__,
    *shapes.__all__,
    *updates.__all__,
]
