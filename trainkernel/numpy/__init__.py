"""NumPy's functions on traced arrays: names, signatures and dtype rules of ``jax.numpy``.

Outside of a traced function they take and return NumPy arrays. Differences from JAX by design:
an array keeps its dtype, float64 and int64 too; indices out of range are clamped by ``take``.
"""

from __future__ import annotations

from trainkernel.numpy import (
    angles,
    arithmetic,
    convolutions,
    covariance,
    creation,
    diagonals,
    differences,
    dtypes,
    elementwise,
    indexing,
    intervals,
    linalg,
    mapping,
    nans,
    nearness,
    padding,
    pieces,
    polynomials,
    products,
    quantiles,
    reductions,
    sets,
    shapes,
    sorting,
    updates,
)
from trainkernel.numpy.angles import *  # noqa: F403
from trainkernel.numpy.arithmetic import *  # noqa: F403
from trainkernel.numpy.contraction import einsum
from trainkernel.numpy.convolutions import *  # noqa: F403
from trainkernel.numpy.covariance import *  # noqa: F403
from trainkernel.numpy.creation import *  # noqa: F403
from trainkernel.numpy.diagonals import *  # noqa: F403
from trainkernel.numpy.differences import *  # noqa: F403
from trainkernel.numpy.dtypes import *  # noqa: F403
from trainkernel.numpy.elementwise import *  # noqa: F403
from trainkernel.numpy.indexing import *  # noqa: F403
from trainkernel.numpy.intervals import *  # noqa: F403
from trainkernel.numpy.mapping import *  # noqa: F403
from trainkernel.numpy.nans import *  # noqa: F403
from trainkernel.numpy.nearness import *  # noqa: F403
from trainkernel.numpy.padding import *  # noqa: F403
from trainkernel.numpy.pieces import *  # noqa: F403
from trainkernel.numpy.polynomials import *  # noqa: F403
from trainkernel.numpy.products import *  # noqa: F403
from trainkernel.numpy.quantiles import *  # noqa: F403
from trainkernel.numpy.reductions import *  # noqa: F403
from trainkernel.numpy.sets import *  # noqa: F403
from trainkernel.numpy.shapes import *  # noqa: F403
from trainkernel.numpy.sorting import *  # noqa: F403
from trainkernel.numpy.updates import *  # noqa: F403
from trainkernel.trace import Array as ndarray  # noqa: N813

__all__ = [
    "einsum",
    "linalg",
    "ndarray",
    *angles.__all__,
    *arithmetic.__all__,
    *convolutions.__all__,
    *covariance.__all__,
    *creation.__all__,
    *diagonals.__all__,
    *differences.__all__,
    *dtypes.__all__,
    *elementwise.__all__,
    *indexing.__all__,
    *intervals.__all__,
    *mapping.__all__,
    *nans.__all__,
    *nearness.__all__,
    *padding.__all__,
    *pieces.__all__,
    *polynomials.__all__,
    *products.__all__,
    *quantiles.__all__,
    *reductions.__all__,
    *sets.__all__,
    *shapes.__all__,
    *sorting.__all__,
    *updates.__all__,
]
