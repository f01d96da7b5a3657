"""The MLP steps against a float64 implementation of their own, finite differences, and torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trainkernel import ProgramError, reference
from trainkernel.mlp import ACTIVATIONS, DTYPES, LOSSES, OPTIMIZERS, MlpStep, mlp_step

LAYERS = (5, 7, 6, 3)
BATCH = 4
Parameters = list[np.ndarray[Any, Any]]


def relu(z: Any) -> Any:
    return np.maximum(z, 0)


def forward(parameters: Parameters, x: Any, activation: str) -> list[Any]:
    """Inputs of every layer, then the prediction."""
    values = [x]
    function: Callable[[Any], Any] = relu if activation == "relu" else np.tanh
    for layer in range(len(parameters) // 2):
        z = values[-1] @ parameters[2 * layer] + parameters[2 * layer + 1]
        values.append(z if layer == len(parameters) // 2 - 1 else function(z))
    return values


def loss_of(parameters: Parameters, x: Any, target: Any, activation: str, loss: str) -> Any:
    y = forward(parameters, x, activation)[-1]
    if loss == "mse":
        return np.square(y - target).sum() / y.size
    probabilities = np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
    return -(target * np.log(probabilities)).sum() / len(y)


def grads_of(parameters: Parameters, x: Any, target: Any, activation: str, loss: str) -> Parameters:
    values = forward(parameters, x, activation)
    y = values[-1]
    if loss == "mse":
        delta = 2 * (y - target) / y.size
    else:
        delta = (np.exp(y) / np.exp(y).sum(axis=1, keepdims=True) - target) / len(y)
    grads: Parameters = [np.zeros(0)] * len(parameters)
    for layer in reversed(range(len(parameters) // 2)):
        h = values[layer]
        grads[2 * layer] = np.einsum("bi,bo->io", h, delta)
        grads[2 * layer + 1] = np.einsum("bo->o", delta)
        delta = np.einsum("bo,io->bi", delta, parameters[2 * layer])
        delta = delta * ((h > 0) if activation == "relu" else 1 - np.square(h))
    return grads


class Training:
    """A float64 training run in the order of the papers, not of the Program."""

    def __init__(self, step: MlpStep, parameters: Parameters, **options: Any) -> None:
        self.model, self.options = step, options
        self.parameters = [np.array(value, np.float64) for value in parameters]
        self.m = [np.zeros_like(value) for value in self.parameters]
        self.v = [np.zeros_like(value) for value in self.parameters]
        self.t = 0

    def step(self, x: Any, target: Any, learning_rate: float) -> float:
        model, options = self.model, self.options
        inputs = (np.float64(x), np.float64(target), model.activation, model.loss)
        loss = loss_of(self.parameters, *inputs)
        grads = grads_of(self.parameters, *inputs)
        self.t += 1
        decay = options.get("weight_decay", 0.01 if model.optimizer == "adamw" else 0.0)
        for i, (theta, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            if model.optimizer == "adamw":
                theta = (1 - learning_rate * decay) * theta
            else:
                grad = grad + decay * theta
            if model.optimizer == "sgd":
                self.m[i] = options.get("momentum", 0.0) * self.m[i] + grad
                self.parameters[i] = theta - learning_rate * self.m[i]
                continue
            beta1, beta2 = options.get("betas", (0.9, 0.999))
            self.m[i] = beta1 * self.m[i] + (1 - beta1) * grad
            self.v[i] = beta2 * self.v[i] + (1 - beta2) * grad**2
            m_hat = self.m[i] / (1 - beta1**self.t)
            v_hat = self.v[i] / (1 - beta2**self.t)
            self.parameters[i] = theta - learning_rate * m_hat / (np.sqrt(v_hat) + options.get("eps", 1e-8))
        return float(loss)


def run_steps(step: MlpStep, inputs: list[Any], num_steps: int) -> tuple[list[float], list[Any]]:
    losses = []
    for _ in range(num_steps):
        outputs = reference.run(step.program, inputs)
        losses.append(float(outputs[step.output_index["loss"]]))
        inputs = step.next_inputs(inputs, outputs)
    return losses, inputs


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{}, {"momentum": 0.9, "weight_decay": 0.1}],
    "adam": [{}, {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-4}],
    "adamw": [{}, {"weight_decay": 0.2}],
}
CASES = [
    (*case, options) for case in itertools.product(ACTIVATIONS, LOSSES, OPTIMIZERS) for options in OPTIONS[case[2]]
]


@pytest.mark.parametrize(("activation", "loss", "optimizer", "options"), CASES)
def test_float32_steps_follow_the_float64_implementation(
    activation: str, loss: str, optimizer: str, options: dict[str, Any]
) -> None:
    step = mlp_step(LAYERS, BATCH, activation=activation, loss=loss, optimizer=optimizer, **options)
    inputs = step.initial_inputs(3, learning_rate=0.01)
    training = Training(step, [inputs[step.input_index[name]] for name in step.parameters], **options)
    x, target = inputs[step.input_index["x"]], inputs[step.input_index["target"]]
    expected = [training.step(x, target, 0.01) for _ in range(5)]
    losses, final = run_steps(step, inputs, 5)
    np.testing.assert_allclose(losses, expected, rtol=3e-5)
    for name, value in zip(step.parameters, training.parameters, strict=True):
        np.testing.assert_allclose(final[step.input_index[name]], value, rtol=2e-5, atol=2e-6)
    for kind, values in (("m", training.m), ("v", training.v)):
        for name, value in zip(step.parameters, values, strict=True):
            if f"{kind}_{name}" in step.input_index:
                np.testing.assert_allclose(final[step.input_index[f"{kind}_{name}"]], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("activation", "loss"), list(itertools.product(ACTIVATIONS, LOSSES)))
def test_the_float64_gradients_agree_with_finite_differences(activation: str, loss: str) -> None:
    step = mlp_step(LAYERS, BATCH, activation=activation, loss=loss)
    inputs = step.initial_inputs(1)
    parameters = [np.float64(inputs[step.input_index[name]]) for name in step.parameters]
    rest = (np.float64(inputs[0]), np.float64(inputs[1]), activation, loss)
    for i, grad in enumerate(grads_of(parameters, *rest)):
        numeric = np.zeros_like(grad)
        for place in np.ndindex(grad.shape):
            values = []
            for sign in (1, -1):
                moved = [np.array(value) for value in parameters]
                moved[i][place] += sign * 1e-6
                values.append(loss_of(moved, *rest))
            numeric[place] = (values[0] - values[1]) / 2e-6
        np.testing.assert_allclose(grad, numeric, atol=1e-8)


@pytest.mark.parametrize(("activation", "loss", "optimizer"), list(itertools.product(ACTIVATIONS, LOSSES, OPTIMIZERS)))
def test_bfloat16_stays_near_float32(activation: str, loss: str, optimizer: str) -> None:
    choice = {"activation": activation, "loss": loss, "optimizer": optimizer}
    wide, narrow = (mlp_step(LAYERS, BATCH, dtype=dtype, **choice) for dtype in DTYPES)
    losses, _ = run_steps(wide, wide.initial_inputs(2), 10)
    narrow_losses, final = run_steps(narrow, narrow.initial_inputs(2), 10)
    np.testing.assert_allclose(narrow_losses, losses, rtol=0.03)
    assert narrow_losses[-1] < narrow_losses[0]
    # Master weights and moments stay float32.
    assert all(final[narrow.input_index[name]].dtype == np.float32 for name in narrow.state)
    products = [item for item in narrow.program.operations if item.op in ("mm", "addmm")]  # type: ignore[union-attr]
    assert {spec.dtype for item in products for spec in item.inputs[-2:]} == {"bfloat16"}  # type: ignore[union-attr]
    assert {item.output.dtype for item in products} == {"float32"}  # type: ignore[union-attr]


@pytest.mark.parametrize("step_number", [1, 2, 10, 1000, 1_000_000])
def test_bias_corrections_are_accurate_at_every_step(step_number: int) -> None:
    # beta2 = 0.999 at step 1: 1 - exp(log(beta2)) in float32 would be wrong in the fifth digit.
    step = mlp_step((2, 2), 1, optimizer="adam", eps=0.0)
    inputs = step.initial_inputs(0, learning_rate=1.0)
    grad_scale = 1.0
    inputs[step.input_index["step"]] = np.float32(step_number)
    for name in ("m_b0", "v_b0"):
        inputs[step.input_index[name]] = np.full(2, grad_scale, np.float32)
    inputs[step.input_index["b0"]] = np.zeros(2, np.float32)
    x = np.float64(inputs[step.input_index["x"]])
    target = np.float64(inputs[step.input_index["target"]])
    grad = (x @ np.float64(inputs[step.input_index["w0"]]) - target)[0]
    outputs = reference.run(step.program, inputs)
    m, v = 0.9 + 0.1 * grad, 0.999 + 0.001 * grad**2
    expected = -(m / (1 - 0.9**step_number)) / np.sqrt(v / (1 - 0.999**step_number))
    np.testing.assert_allclose(outputs[step.output_index["b0"]], expected, rtol=2e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_index_maps(optimizer: str) -> None:
    step = mlp_step(LAYERS, BATCH, optimizer=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0)
    for name, index in step.input_index.items():
        assert step.program.inputs[index].buffer == name
    assert sorted(step.inplace_outputs) == list(range(1, len(step.program.outputs)))
    for name in step.state:
        assert step.inplace_outputs[step.output_index[name]] == step.input_index[name]
        assert step.program.outputs[step.output_index[name]].shape == step.program.inputs[step.input_index[name]].shape
    assert step.program.outputs[step.output_index["loss"]].shape == ()
    assert set(step.initial_state()) == set(step.state)


def test_each_value_is_computed_once() -> None:
    for optimizer, dtype in itertools.product(OPTIMIZERS, DTYPES):
        program = mlp_step(LAYERS, BATCH, loss="cross_entropy", optimizer=optimizer, dtype=dtype).program
        seen = set()
        for item in program.operations:
            key = (item.op, item.inputs, tuple(sorted(item.attrs.items())), item.outputs[0].dtype)  # type: ignore[union-attr]
            assert key not in seen, str(item)
            seen.add(key)


def test_initial_values_are_reproducible_and_bounded() -> None:
    step = mlp_step((100, 50, 10), 4)
    first, second, other = step.initial_state(1), step.initial_state(1), step.initial_state(2)
    assert all(np.array_equal(first[name], second[name]) for name in step.state)
    assert not np.array_equal(first["w0"], other["w0"])
    assert np.abs(first["w0"]).max() == pytest.approx(np.sqrt(6 / 100), rel=0.01)
    assert np.abs(first["w1"]).max() == pytest.approx(np.sqrt(6 / 60), rel=0.01)
    assert not first["b0"].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "gelu"}, "activation must be one of relu, tanh, got 'gelu'"),
        ({"loss": "hinge"}, "loss must be one of"),
        ({"optimizer": "lion"}, "optimizer must be one of"),
        ({"dtype": "float64"}, "dtype must be one of"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, "betas must lie between"),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum is sgd's"),
        ({"layers": (3,)}, "two or more positive ints"),
        ({"layers": (3, 0)}, "two or more positive ints"),
        ({"batch": True}, "two or more positive ints"),
    ],
)
def test_wrong_choices_are_refused(arguments: dict[str, Any], message: str) -> None:
    arguments = {"layers": (3, 2), "batch": 4, **arguments}
    with pytest.raises(ProgramError, match=message):
        mlp_step(**arguments)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("activation", "loss"), [("relu", "cross_entropy"), ("tanh", "mse")])
def test_against_torch(activation: str, loss: str, optimizer: str) -> None:
    torch = pytest.importorskip("torch")
    step = mlp_step(LAYERS, BATCH, activation=activation, loss=loss, optimizer=optimizer)
    inputs = step.initial_inputs(7)
    parameters = [torch.tensor(inputs[step.input_index[name]], requires_grad=True) for name in step.parameters]
    x, target = torch.tensor(inputs[0]), torch.tensor(inputs[1])
    classes = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    torch_optimizer = classes[optimizer](parameters, lr=float(inputs[step.input_index["learning_rate"]]))
    function = torch.nn.functional.mse_loss if loss == "mse" else torch.nn.functional.cross_entropy
    expected = []
    for _ in range(4):
        h = x
        for layer in range(len(LAYERS) - 1):
            z = h @ parameters[2 * layer] + parameters[2 * layer + 1]
            h = z if layer == len(LAYERS) - 2 else getattr(torch, activation)(z)
        value = function(h, target)
        torch_optimizer.zero_grad()
        value.backward()
        torch_optimizer.step()
        expected.append(value.item())
    losses, final = run_steps(step, inputs, 4)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, parameter in zip(step.parameters, parameters, strict=True):
        np.testing.assert_allclose(final[step.input_index[name]], parameter.detach().numpy(), rtol=2e-5, atol=2e-6)
