"""NumPy's functions on traced arrays: names, signatures and dtype rules of ``jax.numpy``.

Outside of a traced function they take and return NumPy arrays.
"""

from __future__ import annotations

from trainkernel.numpy.arithmetic import *  # noqa: F403
