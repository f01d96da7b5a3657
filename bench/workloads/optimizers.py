"""SGD, Adam and AdamW, written once for trainkernel and JAX.

``lib`` is either library: the modules ``jax`` and ``trainkernel`` have the names used here. The
rules and the defaults are those of torch and optax, so that no peer needs more than itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainkernel import tree

BETA1, BETA2, EPS, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 0.01
NAMES = ("sgd", "adam", "adamw")


def init(name: str, params: Any) -> Any:
    """The state of an optimizer as NumPy arrays: nothing for SGD, else two moments and the number of steps."""
    if name == "sgd":
        return ()
    return {
        "count": np.zeros((), np.int32),
        "m": tree.map(np.zeros_like, params),
        "v": tree.map(np.zeros_like, params),
    }


def update(lib: Any, name: str, rate: float, params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
    """New parameters and state."""
    if name == "sgd":
        return lib.tree.map(lambda p, g: p - rate * g, params, grads), state
    count = state["count"] + 1
    m = lib.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state["m"], grads)
    v = lib.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, state["v"], grads)
    steps = count.astype(lib.numpy.float32)
    unbias_m, unbias_v = 1 - BETA1**steps, 1 - BETA2**steps
    kept = 1 - rate * WEIGHT_DECAY if name == "adamw" else 1.0

    def moved(p: Any, m: Any, v: Any) -> Any:
        return kept * p - rate * (m / unbias_m) / (lib.numpy.sqrt(v / unbias_v) + EPS)

    return lib.tree.map(moved, params, m, v), {"count": count, "m": m, "v": v}
