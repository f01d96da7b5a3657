"""The demo's training step, written as a user would write it.

A classifier of 8x8 digits (64-128-64-10, relu, softmax cross-entropy) and AdamW. The function
``train_step`` is forward, backward and update; ``jit`` makes one kernel of it that updates
parameters and moments in place.

With bfloat16 products the parameters stay float32 (master weights). Each product, of the backward
pass too, rounds its operands to bfloat16 and gives its float32 sums, so that no gradient of a
weight is ever rounded to bfloat16.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

import trainkernel as tk
from trainkernel import losses, nn
from trainkernel import numpy as tnp
from trainkernel.errors import OptionError

LAYERS = (64, 128, 64, 10)
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 1e-2
DTYPES = ("float32", "bfloat16")

Params = list[dict[str, Any]]

optimizer = tk.optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def initial_params(seed: int = 0) -> Params:
    """Weights uniform within He's bound ``sqrt(6 / inputs)``, and biases of zero, float32."""
    generator = np.random.default_rng(seed)
    params = []
    for inputs, outputs in pairwise(LAYERS):
        bound = (6 / inputs) ** 0.5
        w = generator.uniform(-bound, bound, (inputs, outputs)).astype(np.float32)
        params.append({"w": w, "b": np.zeros(outputs, np.float32)})
    return params


@tk.custom_vjp
def bfloat16_product(x: Any, w: Any) -> Any:
    """``x @ w`` of operands rounded to bfloat16, in float32."""
    return tnp.matmul(_bfloat16(x), _bfloat16(w), preferred_element_type="float32")


def _bfloat16(x: Any) -> Any:
    return tnp.asarray(x, "bfloat16")


def _product_and_operands(x: Any, w: Any) -> tuple[Any, Any]:
    return bfloat16_product(x, w), (x, w)


def _product_backward(operands: Any, grad: Any) -> tuple[Any, Any]:
    x, w = operands
    return bfloat16_product(grad, w.T), bfloat16_product(x.T, grad)


bfloat16_product.defvjp(_product_and_operands, _product_backward)


def predict(params: Params, images: Any, dtype: str = "float32") -> Any:
    """Scores ``float32[n, 10]`` of images ``float32[n, 64]``."""
    product = bfloat16_product if dtype == "bfloat16" else tnp.matmul
    x = images
    for layer in params[:-1]:
        x = nn.relu(product(x, layer["w"]) + layer["b"])
    return product(x, params[-1]["w"]) + params[-1]["b"]


def loss(params: Params, images: Any, labels: Any, dtype: str = "float32") -> Any:
    """The mean cross-entropy with labels ``int32[n]``."""
    scores = predict(params, images, dtype)
    return tnp.mean(losses.softmax_cross_entropy_with_integer_labels(scores, labels))


def train_step(params: Params, state: Any, images: Any, labels: Any, *, dtype: str) -> tuple[Any, Params, Any]:
    """``(loss, params, state)`` after one step of AdamW."""
    value, grads = tk.value_and_grad(loss)(params, images, labels, dtype)
    updates, state = optimizer.update(grads, state, params)
    return value, tk.optim.apply_updates(params, updates), state


def compiled_step(dtype: str = "float32", **options: Any) -> Any:
    """``train_step`` as one kernel that updates ``params`` and ``state`` in place.

    Parameters
    ----------
    dtype : {"float32", "bfloat16"}
        Of the operands of the products.
    **options
        Those of ``jit``: ``device``, ``arch``, ...

    Raises
    ------
    OptionError
        For another dtype.
    """
    if dtype not in DTYPES:
        raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return tk.jit(partial(train_step, dtype=dtype), donate_argnames=("params", "state"), **options)
