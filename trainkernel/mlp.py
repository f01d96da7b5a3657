"""Training steps of multi-layer perceptrons, written out as Programs.

``mlp_step`` is one whole step: forward, backward written by hand, optimizer update, with every
parameter and moment updated in place. They are for benchmarks and tests, which need a step that no
front end made; ``trainkernel.digits_step`` shows how a step is usually written.

Weights are ``[inputs, outputs]``; a layer is ``x @ w + b``. With ``dtype="bfloat16"`` the operands
of every matrix product are bfloat16 (casts of the float32 master weights; activations and their
gradients are stored as bfloat16), while products, bias sums, loss and update are float32. So a
weight gradient is never rounded to bfloat16, which differs from torch autocast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkernel.builder import ProgramBuilder
from trainkernel.errors import ProgramError
from trainkernel.ir import Program, TensorSpec

Array = NDArray[Any]

ACTIVATIONS = ("relu", "tanh")
LOSSES = ("mse", "cross_entropy")
OPTIMIZERS = ("sgd", "adam", "adamw")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class MlpStep:
    """One training step and what its inputs and outputs mean.

    Attributes
    ----------
    program : Program
        Inputs: ``x``, ``target``, ``learning_rate``, for adam and adamw ``step`` (1.0, 2.0, ...),
        then the state. Outputs: ``loss`` (0-d), then the new state in the order of the inputs.
    inplace_outputs : mapping of int to int
        Output index to input index of every state array.
    layers : tuple of int
    batch : int
    activation, loss, optimizer, dtype : str
    input_index, output_index : mapping of str to int
        By name. State is ``w0``, ``b0``, ``w1``, ... and the moments, for example ``m_w0``; an
        output has the name of the state it updates.
    parameters : tuple of str
        Names of the trained arrays, ``w0``, ``b0``, ...
    state : tuple of str
        ``parameters``, then the names of the moments.
    """

    program: Program
    inplace_outputs: Mapping[int, int]
    layers: tuple[int, ...]
    batch: int
    activation: str
    loss: str
    optimizer: str
    dtype: str
    input_index: Mapping[str, int]
    output_index: Mapping[str, int]
    parameters: tuple[str, ...]
    state: tuple[str, ...]

    def initial_state(self, seed: int = 0) -> dict[str, Array]:
        """Parameters as at the start of training, and moments of zero, by name.

        Weights are uniform: He's bound ``sqrt(6 / fan_in)`` for relu, Glorot's bound
        ``sqrt(6 / (fan_in + fan_out))`` for tanh and for the last layer. Biases are zero.
        """
        state = initial_parameters(self.layers, self.activation, seed)
        for name in self.state[len(self.parameters) :]:
            spec = self.program.inputs[self.input_index[name]]
            state[name] = np.zeros(spec.shape, np.float32)
        return state

    def initial_inputs(self, seed: int = 0, *, learning_rate: float = 1e-2) -> list[Any]:
        """A complete list of inputs: random batch, the initial state, ``step`` 1.

        ``x`` is standard normal; ``target`` is standard normal for mse, random one-hot rows for
        cross_entropy.
        """
        generator = np.random.default_rng([seed, 1])
        values: dict[str, Any] = dict(self.initial_state(seed))
        values["x"] = generator.standard_normal((self.batch, self.layers[0])).astype(np.float32)
        if self.loss == "mse":
            values["target"] = generator.standard_normal((self.batch, self.layers[-1])).astype(np.float32)
        else:
            classes = generator.integers(self.layers[-1], size=self.batch)
            values["target"] = np.eye(self.layers[-1], dtype=np.float32)[classes]
        values["learning_rate"] = np.float32(learning_rate)
        values["step"] = np.float32(1)
        return [values[spec.buffer] for spec in self.program.inputs]

    def next_inputs(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """The inputs of the next step: the state that a step returned, and ``step`` plus 1."""
        following = list(inputs)
        for output, position in self.inplace_outputs.items():
            following[position] = outputs[output]
        if "step" in self.input_index:
            following[self.input_index["step"]] = np.float32(inputs[self.input_index["step"]] + 1)
        return following


def initial_parameters(layers: Sequence[int], activation: str = "relu", seed: int = 0) -> dict[str, Array]:
    """Initial ``w0``, ``b0``, ...: He or Glorot uniform weights, zero biases (see ``MlpStep.initial_state``)."""
    generator = np.random.default_rng(seed)
    parameters: dict[str, Array] = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise(layers)):
        hidden = layer < len(layers) - 2
        fan = fan_in if hidden and activation == "relu" else fan_in + fan_out
        bound = math.sqrt(6 / fan)
        parameters[f"w{layer}"] = generator.uniform(-bound, bound, (fan_in, fan_out)).astype(np.float32)
        parameters[f"b{layer}"] = np.zeros(fan_out, np.float32)
    return parameters


def mlp_step(
    layers: tuple[int, ...],
    batch: int,
    *,
    activation: str = "relu",
    loss: str = "mse",
    optimizer: str = "sgd",
    dtype: str = "float32",
    momentum: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float | None = None,
) -> MlpStep:
    """One training step of an MLP as a Program with in-place state.

    Parameters
    ----------
    layers : tuple of int
        Widths: inputs, hidden layers, outputs.
    batch : int
    activation : {"relu", "tanh"}
        After every layer but the last.
    loss : {"mse", "cross_entropy"}
        ``mean((y - target)**2)`` over all elements, or the mean over the batch of the
        cross-entropy of softmax(y) with one-hot (or soft) float32 targets ``[batch, classes]``.
    optimizer : {"sgd", "adam", "adamw"}
        The update rules of torch.optim.
    dtype : {"float32", "bfloat16"}
        Of the operands of the matrix products; state is float32 in both cases.
    momentum : float
        sgd only.
    betas, eps
        adam and adamw only.
    weight_decay : float, optional
        Decoupled for adamw, added to the gradient otherwise. Default 0.01 for adamw, else 0.

    Raises
    ------
    ProgramError
        For a choice that is not in the lists above.
    """
    layers = _check_sizes(layers, batch)
    _check_choice("activation", activation, ACTIVATIONS)
    _check_choice("loss", loss, LOSSES)
    _check_choice("optimizer", optimizer, OPTIMIZERS)
    _check_choice("dtype", dtype, DTYPES)
    if momentum and optimizer != "sgd":
        raise ProgramError(f"momentum is sgd's, got momentum={momentum!r} with optimizer {optimizer!r}; use betas")
    b = ProgramBuilder()
    x = b.input("x", (batch, layers[0]))
    target = b.input("target", (batch, layers[-1]))
    learning_rate = b.scalar("learning_rate")
    step = b.scalar("step") if optimizer != "sgd" else None
    parameters = _declare_parameters(b, layers)
    moments = {"sgd": ("m",) if momentum else (), "adam": ("m", "v"), "adamw": ("m", "v")}[optimizer]
    moment_specs = {
        f"{moment}_{name}": b.input(f"{moment}_{name}", spec.shape)
        for moment in moments
        for name, spec in parameters.items()
    }

    operands = _Operands(b, x, parameters, dtype)
    activations, prediction = _forward(b, operands, parameters, layers, activation, dtype)
    loss_value, grad = _LOSS_RULES[loss](b, prediction, target, dtype)
    grads = _backward(b, operands, activations, grad, layers, activation, dtype)

    decay = weight_decay if weight_decay is not None else (0.01 if optimizer == "adamw" else 0.0)
    if step is None:
        updated = _sgd(b, parameters, moment_specs, grads, learning_rate, momentum, decay)
    else:
        rule = _Adam(betas, eps, decay, decoupled=optimizer == "adamw")
        updated = _adam(b, parameters, moment_specs, grads, learning_rate, step, rule)

    state = (*parameters, *moment_specs)
    program = b.build([loss_value, *(updated[name] for name in state)])
    input_index = {spec.buffer: index for index, spec in enumerate(program.inputs)}
    output_index = {"loss": 0, **{name: 1 + index for index, name in enumerate(state)}}
    return MlpStep(
        program=program,
        inplace_outputs=MappingProxyType({output_index[name]: input_index[name] for name in state}),
        layers=layers,
        batch=batch,
        activation=activation,
        loss=loss,
        optimizer=optimizer,
        dtype=dtype,
        input_index=MappingProxyType(input_index),
        output_index=MappingProxyType(output_index),
        parameters=tuple(parameters),
        state=state,
    )


# ---------------------------------------------------------------------------- checks and inputs


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ProgramError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _check_sizes(layers: Sequence[int], batch: int) -> tuple[int, ...]:
    sizes = (*layers, batch)
    if len(layers) < 2 or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ProgramError(f"layers must be two or more positive ints and batch one, got {layers!r} and {batch!r}")
    return tuple(layers)


def _declare_parameters(b: ProgramBuilder, layers: tuple[int, ...]) -> dict[str, TensorSpec]:
    parameters = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise(layers)):
        parameters[f"w{layer}"] = b.input(f"w{layer}", (fan_in, fan_out))
        parameters[f"b{layer}"] = b.input(f"b{layer}", (fan_out,))
    return parameters


class _Operands:
    """What the matrix products read: the inputs themselves, or one cast of each."""

    def __init__(self, b: ProgramBuilder, x: TensorSpec, parameters: Mapping[str, TensorSpec], dtype: str) -> None:
        weights = [spec for name, spec in parameters.items() if name.startswith("w")]
        if dtype == "float32":
            self.x, self.weights = x, weights
        else:
            self.x = b.op("cast", x, dtype=dtype, name="x_cast")
            self.weights = [b.op("cast", spec, dtype=dtype, name=f"{spec.buffer}_cast") for spec in weights]


# ---------------------------------------------------------------------------- forward and loss


def _forward(
    b: ProgramBuilder,
    operands: _Operands,
    parameters: Mapping[str, TensorSpec],
    layers: tuple[int, ...],
    activation: str,
    dtype: str,
) -> tuple[list[TensorSpec], TensorSpec]:
    """The input of every layer, and the prediction."""
    activations = [operands.x]
    last = len(layers) - 2
    for layer in range(last):
        z = b.op("addmm", parameters[f"b{layer}"], activations[-1], operands.weights[layer], name=f"z{layer}")
        activations.append(b.op(activation, z, dtype=dtype, name=f"h{layer}"))
    prediction = b.op("addmm", parameters[f"b{last}"], activations[-1], operands.weights[last], name="y")
    return activations, prediction


def _mse(b: ProgramBuilder, y: TensorSpec, target: TensorSpec, dtype: str) -> tuple[TensorSpec, TensorSpec]:
    difference = b.op("sub", y, target, name="difference")
    loss = b.op("mean", b.op("mul", difference, difference, name="squared"), name="loss")
    grad = b.op("mul", difference, 2.0 / y.num_elements, dtype=dtype, name="grad_y")
    return loss, grad


def _cross_entropy(b: ProgramBuilder, y: TensorSpec, target: TensorSpec, dtype: str) -> tuple[TensorSpec, TensorSpec]:
    batch = y.shape[0]
    largest, exp_sum = b.multi("softmax_stats", y, shape=(batch, 1), name="softmax_stats", dims=(1,))
    shifted = b.op("sub", y, largest, name="shifted")
    log_p = b.op("sub", shifted, b.op("log", exp_sum, name="log_exp_sum"), name="log_p")
    total = b.op("sum", b.op("mul", target, log_p, name="target_log_p"), name="total")
    loss = b.op("div", total, -float(batch), name="loss")
    p = b.op("exp", log_p, name="p")
    grad = b.op("div", b.op("sub", p, target, name="p_minus_target"), float(batch), dtype=dtype, name="grad_y")
    return loss, grad


_LOSS_RULES = {"mse": _mse, "cross_entropy": _cross_entropy}


# ---------------------------------------------------------------------------- backward


def _backward(
    b: ProgramBuilder,
    operands: _Operands,
    activations: Sequence[TensorSpec],
    grad: TensorSpec,
    layers: tuple[int, ...],
    activation: str,
    dtype: str,
) -> dict[str, TensorSpec]:
    """Gradients of all parameters, float32, by name; ``grad`` is that of the prediction."""
    grads = {}
    for layer in reversed(range(len(layers) - 1)):
        h = activations[layer]
        grads[f"w{layer}"] = b.op("mm", h.T, grad, dtype="float32", name=f"grad_w{layer}")
        grads[f"b{layer}"] = b.op("sum", grad, dtype="float32", name=f"grad_b{layer}", dims=(0,))
        if layer == 0:
            break
        grad_h = b.op("mm", grad, operands.weights[layer].T, dtype="float32", name=f"grad_h{layer - 1}")
        if activation == "relu":
            # h <= 0 exactly where relu's argument is.
            grad = b.op("threshold_backward", grad_h, h, dtype=dtype, name=f"grad_z{layer - 1}", threshold=0)
        else:
            square = b.op("mul", h, h, dtype="float32", name=f"h{layer - 1}_squared")
            slope = b.op("sub", 1.0, square, name=f"slope{layer - 1}")
            grad = b.op("mul", grad_h, slope, dtype=dtype, name=f"grad_z{layer - 1}")
    return grads


# ---------------------------------------------------------------------------- updates


@dataclass(frozen=True)
class _Adam:
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool


def _sgd(
    b: ProgramBuilder,
    parameters: Mapping[str, TensorSpec],
    moments: Mapping[str, TensorSpec],
    grads: Mapping[str, TensorSpec],
    learning_rate: TensorSpec,
    momentum: float,
    weight_decay: float,
) -> dict[str, TensorSpec]:
    updated = {}
    for name, parameter in parameters.items():
        direction = grads[name]
        if weight_decay:
            direction = b.op("add", direction, parameter, name=f"decayed_grad_{name}", alpha=weight_decay)
        if momentum:
            direction = b.op("add", direction, moments[f"m_{name}"], name=f"new_m_{name}", alpha=momentum)
            updated[f"m_{name}"] = direction
        change = b.op("mul", direction, learning_rate, name=f"change_{name}")
        updated[name] = b.op("sub", parameter, change, name=f"new_{name}")
    return updated


def _inverse_bias_correction(b: ProgramBuilder, step: TensorSpec, beta: float, name: str) -> TensorSpec:
    """``1 / (1 - beta**step)`` as a chain of 0-d operations.

    With ``u = -step log(beta)`` it is ``(1 + 1 / tanh(u / 2)) / 2``. ``1 - exp(-u)`` in float32
    would lose three digits at the first steps to the cancellation; tanh keeps them.
    """
    half_angle = b.op("mul", step, -0.5 * math.log(beta), name=f"{name}_angle")
    tanh = b.op("tanh", half_angle, name=f"{name}_tanh")
    cotangent = b.op("div", 1.0, tanh, name=f"{name}_coth")
    return b.op("mul", b.op("add", cotangent, 1.0, name=f"{name}_doubled"), 0.5, name=f"inverse_{name}")


def _adam(
    b: ProgramBuilder,
    parameters: Mapping[str, TensorSpec],
    moments: Mapping[str, TensorSpec],
    grads: Mapping[str, TensorSpec],
    learning_rate: TensorSpec,
    step: TensorSpec,
    rule: _Adam,
) -> dict[str, TensorSpec]:
    """Adam and AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019) in torch.optim's order of operations."""
    beta1, beta2 = rule.betas
    if not (0 < beta1 < 1 and 0 < beta2 < 1):
        raise ProgramError(f"betas must lie between 0 and 1, got {rule.betas!r}")
    correction1 = _inverse_bias_correction(b, step, beta1, "correction1")
    correction2 = _inverse_bias_correction(b, step, beta2, "correction2")
    step_size = b.op("mul", correction1, learning_rate, name="step_size")
    root_scale = b.op("sqrt", correction2, name="root_scale")
    shrink = None
    if rule.decoupled and rule.weight_decay:
        shrink = b.op("sub", 1.0, learning_rate, name="shrink", alpha=rule.weight_decay)
    updated = {}
    for name, parameter in parameters.items():
        grad, m, v = grads[name], moments[f"m_{name}"], moments[f"v_{name}"]
        if rule.weight_decay and not rule.decoupled:
            grad = b.op("add", grad, parameter, name=f"decayed_grad_{name}", alpha=rule.weight_decay)
        new_m = b.op("add", m, b.op("sub", grad, m, name=f"m_gap_{name}"), name=f"new_m_{name}", alpha=1 - beta1)
        old_part = b.op("mul", v, beta2, name=f"v_kept_{name}")
        square = b.op("mul", grad, grad, name=f"grad_squared_{name}")
        new_v = b.op("add", old_part, square, name=f"new_v_{name}", alpha=1 - beta2)
        root = b.op("mul", b.op("sqrt", new_v, name=f"root_{name}"), root_scale, name=f"scaled_root_{name}")
        denominator = b.op("add", root, rule.eps, name=f"denominator_{name}")
        numerator = b.op("mul", new_m, step_size, name=f"numerator_{name}")
        change = b.op("div", numerator, denominator, name=f"change_{name}")
        kept = parameter if shrink is None else b.op("mul", parameter, shrink, name=f"shrunk_{name}")
        updated[name] = b.op("sub", kept, change, name=f"new_{name}")
        updated[f"m_{name}"], updated[f"v_{name}"] = new_m, new_v
    return updated
