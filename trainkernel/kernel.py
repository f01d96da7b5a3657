"""A compiled Program on its device: on a GPU, in the emulator, as the reference, or for an architecture alone."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainkernel.arguments import ArrayNeed, CheckedArguments, Signature, check_arguments, check_sequence, signature_of
from trainkernel.errors import ArgumentError, CompileError, DeviceError
from trainkernel.ir import Program
from trainkernel.program_cache import CachedProgram
from trainkernel.runtime.build import build_cubin
from trainkernel.runtime.device_array import DeviceArray
from trainkernel.runtime.dlpack import as_numpy, framework_of
from trainkernel.runtime.export import allocate, copy_into, deliver, record_use
from trainkernel.runtime.launch import BoundLaunch, LaunchPlan
from trainkernel.runtime.module import LoadedKernel, ResourceUsage, load
from trainkernel.runtime.parts import TickTimes
from trainkernel.runtime.scalars import find_scalar, scalars_by_key
from trainkernel.runtime.streams import LEGACY_STREAM, current_stream_getter, current_stream_owner, stream_handle

_EMULATED_PARTS = tuple(2**exponent for exponent in range(31))
"""The ticks of the launches of a run with ``max_launch_ms`` in the emulator, which has no time to measure."""


class Kernel:
    """A compiled Program. Make it by ``trainkernel.compile``.

    Attributes
    ----------
    program : Program
    device : str or None
        ``"cuda:0"``, ``"emulator"``, ``"reference"``; None: compiled for an architecture alone.
    arch : str or None
        What the cubin is for.
    tuning : Tuning or None
        What ``tune=True`` measured and took.
    """

    tuning: Any = None

    def __init__(
        self,
        program: Program,
        stats: Any,
        device: str | None,
        arch: str | None,
        cached: CachedProgram | None = None,
    ) -> None:
        """``stats`` is None for a kernel that was found in the cache: it is generated when it is asked for."""
        self.program = program
        self.device = device
        self.arch = arch
        self._stats = stats
        self._cached = CachedProgram(lambda: stats) if cached is None else cached
        self._facts: Any = stats if self._cached.facts is None else self._cached.facts
        self._cubin = self._cached.cubin

    @property
    def stats(self) -> Any:
        """The GeneratedKernel: the source with the counts of what it does.

        Raises
        ------
        VerificationError
            If it is not the kernel that was found in the cache.
        """
        if self._stats is None:
            self._stats = self._cached.generated()
        return self._stats

    @property
    def schedule(self) -> Any:
        """Which task runs in which stage."""
        return self.stats.schedule

    @property
    def plan(self) -> Any:
        """Where each value lies."""
        return self.stats.plan

    @property
    def source(self) -> str:
        """The CUDA source."""
        return str(self.stats.source)

    @property
    def cubin(self) -> bytes:
        """The machine code, from the cache or compiled by NVRTC.

        Raises
        ------
        CompileError
            If there is no architecture to compile for, or NVRTC refuses.
        """
        if self._cubin is None:
            if self.arch is None:
                raise CompileError(f"a kernel on device '{self.device}' has no cubin: compile with arch='sm_90', say")
            self._cubin = build_cubin(self.source, self.arch)
            self._cached.store(self.stats, self._cubin)
        return self._cubin

    def __call__(self, *inputs: Any, stream: Any = None) -> tuple[Any, ...]:
        """Run the program.

        Parameters
        ----------
        *inputs : array or number
            As the program declares them.
        stream : optional
            On a GPU: the stream to launch on, as for ``BoundLaunch.launch``.

        Returns
        -------
        tuple of array
            All outputs, in the framework of the first array given; an output in place is the
            caller's own array, updated. On a GPU they are ready in the order of the stream.

        Raises
        ------
        ArgumentError
            If an input is not what the program declares; nothing has been written then.
        """
        raise DeviceError(self._no_device())

    def bind(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """Check the arguments once, for many launches.

        Parameters
        ----------
        inputs : sequence
            As for a call. Scalars can be changed later by ``bound.set_scalar(name, value)``.
        outputs : sequence
            One dense array for each output; for one in place its input's array, or None.

        Returns
        -------
        BoundLaunch or HostBound
            With ``launch(stream=None)``, ``set_scalar(name_or_index, value)`` and ``check()``.
        """
        raise DeviceError(self._no_device())

    def resource_usage(self) -> ResourceUsage:
        """Registers, memory and resident blocks of the loaded kernel.

        Raises
        ------
        DeviceError
            If the kernel is not on a GPU.
        """
        where = f"on device {self.device!r}" if self.device is not None else f"compiled for arch={self.arch!r} alone"
        raise DeviceError(
            f"a kernel {where} uses no GPU's resources; trainkernel.runtime.nvrtc.resource_statistics"
            "(kernel.source, arch) tells registers and spills without one"
        )

    def _no_device(self) -> str:
        return (
            f"this kernel was compiled for arch='{self.arch}' alone: it has .source and .cubin and cannot be called. "
            "Compile with device='cuda', 'emulator' or 'reference' to run it."
        )

    def __repr__(self) -> str:
        where = f"device={self.device!r}" if self.device is not None else f"arch={self.arch!r}"
        if self.device is not None and self.arch is not None:
            where += f", arch={self.arch!r}"
        facts = self._facts
        return (
            f"Kernel({where}, {len(self.program.inputs)} inputs, {len(self.program.operations)} operations, "
            f"{len(self.program.outputs)} outputs, {facts.grid_barriers} grid barriers, "
            f"{facts.threads_per_block} threads per block, {facts.workspace_bytes:,} bytes of workspace)"
        )


class HostKernel(Kernel):
    """A Kernel that runs on the CPU, in the emulator or as the reference, on host arrays."""

    def __init__(
        self,
        program: Program,
        stats: Any,
        device: str,
        arch: str | None,
        barrier_timeout_ns: int = 0,
        cached: CachedProgram | None = None,
        max_launch_ms: float | None = None,
    ) -> None:
        super().__init__(program, stats, device, arch, cached)
        self._signature = signature_of(program, self._facts.inplace_outputs)
        self._barrier_timeout_ns = barrier_timeout_ns
        self._ticks_per_launch = None if max_launch_ms is None else _EMULATED_PARTS

    def __call__(self, *inputs: Any, stream: Any = None) -> tuple[Any, ...]:
        self._refuse_stream(stream)
        checked = check_arguments(self._signature, inputs, device=("cpu", 0))
        results = self._run(checked, checked.scalars)
        framework, like = _framework_of_first(self._signature, inputs)
        inplace = self._facts.inplace_outputs
        fresh = {
            index: _delivered(framework, like, result, self.program.outputs[index].dtype)
            for index, result in enumerate(results)
            if index not in inplace
        }
        for index, target in inplace.items():  # last, since all before may still fail
            np.copyto(as_numpy(checked.inputs[target]), results[index], casting="no")
        return tuple(
            inputs[inplace[index]] if index in inplace else fresh[index] for index in range(len(self.program.outputs))
        )

    def bind(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> HostBound:
        check_sequence("outputs", outputs)
        return HostBound(self, check_arguments(self._signature, inputs, outputs, device=("cpu", 0)))

    def _run(self, checked: CheckedArguments, scalars: Mapping[int, int | float]) -> Sequence[np.ndarray[Any, Any]]:
        values: list[Any] = [
            scalars[index] if index in scalars else as_numpy(checked.inputs[index])
            for index in range(len(self.program.inputs))
        ]
        if self.device == "reference":
            from trainkernel.reference import evaluate

            return evaluate(self.program, values)
        from trainkernel.emulator import emulate

        outputs: Sequence[np.ndarray[Any, Any]] = emulate(
            self.stats,
            values,
            barrier_timeout_ns=self._barrier_timeout_ns,
            ticks_per_launch=self._ticks_per_launch,
        ).outputs
        return outputs

    def _refuse_stream(self, stream: Any) -> None:
        if stream is not None:
            raise ArgumentError(f"stream: a kernel on device '{self.device}' runs on the host and takes none")


def _delivered(framework: str, like: Any, result: np.ndarray[Any, Any], dtype: str) -> Any:
    """A result on the host as an array of the caller's framework."""
    if framework != "torch":
        return deliver(framework, result, like)
    array = allocate("torch", result.shape, dtype, ("cpu", 0))
    copy_into(array, result)
    return array


class HostBound:
    """Host arrays bound to a kernel: the same interface as ``BoundLaunch``."""

    def __init__(self, kernel: HostKernel, checked: CheckedArguments) -> None:
        self._kernel = kernel
        self._checked = checked
        self._scalars = dict(checked.scalars)
        self._fields = scalars_by_key(kernel._signature.scalars)

    def launch(self, stream: Any = None) -> None:
        """Run once on what the bound arrays hold now; done on return."""
        self._kernel._refuse_stream(stream)
        results = self._kernel._run(self._checked, self._scalars)
        for index, result in enumerate(results):
            np.copyto(as_numpy(self._checked.outputs[index]), result, casting="no")

    def set_scalar(self, scalar: str | int, value: Any) -> None:
        """Set a scalar input, by name or input index, for the launches that follow."""
        field = find_scalar(self._fields, scalar)
        self._scalars[field.index] = field.check(value)

    def check(self) -> None:
        """Nothing to wait for: a launch here is done when it returns."""

    def __repr__(self) -> str:
        return f"HostBound({self._kernel!r})"


class GpuKernel(Kernel):
    """A Kernel loaded on a GPU, on arrays in its memory."""

    def __init__(
        self,
        program: Program,
        stats: Any,
        index: int,
        arch: str,
        barrier_timeout_ns: int,
        cached: CachedProgram | None = None,
        max_launch_ms: float | None = None,
    ) -> None:
        super().__init__(program, stats, f"cuda:{index}", arch, cached)
        facts = self._facts
        self._index = index
        alignments = {
            (slot.kind, slot.index): slot.alignment_bytes
            for slot in facts.slots
            if getattr(slot, "alignment_bytes", None)
        }
        offsets = {scalar.index: scalar.offset_bytes for scalar in facts.scalars}
        self._signature = signature_of(program, facts.inplace_outputs, alignments, offsets)
        self._loaded: LoadedKernel = load(
            self.cubin,
            facts.entry,
            index,
            threads_per_block=facts.threads_per_block,
            dynamic_shared_bytes=facts.shared_bytes,
            params_bytes=facts.params_bytes,
            arch=arch,
        )
        self._launch_plan = LaunchPlan(
            name=facts.entry,
            blocks=self._loaded.grid_blocks(facts.blocks_per_sm, facts.max_work_blocks, facts.max_blocks),
            threads_per_block=facts.threads_per_block,
            dynamic_shared_bytes=facts.shared_bytes,
            workspace_bytes=facts.workspace_bytes,
            params_bytes=facts.params_bytes,
            num_pointers=len(facts.slots),
            uses_table=facts.uses_tensor_table,
            scalars=self._signature.scalars,
            barrier_timeout_ns=barrier_timeout_ns,
            describe_stage=lambda stage: describe_stage(facts, stage),
            segments=facts.segments,
            ticks_offset_bytes=facts.ticks_offset_bytes,
            times=None if max_launch_ms is None else TickTimes(max_launch_ms, facts.entry),
        )
        self._launcher: BoundLaunch | None = None
        self._launcher_lock = threading.Lock()

    def __call__(self, *inputs: Any, stream: Any = None) -> tuple[Any, ...]:
        framework, like = _framework_of_first(self._signature, inputs)
        handle, owner = self._resolve_stream(stream, framework)
        checked = check_arguments(self._signature, inputs, device=("cuda", self._index), stream=handle)
        inplace = self._facts.inplace_outputs
        outputs: dict[int, Any] = {}
        for index, spec in enumerate(self.program.outputs):
            if index not in inplace:
                outputs[index] = allocate(framework, spec.shape, spec.dtype, ("cuda", self._index), handle)
        pointers = self._pointers(checked, {index: _pointer_of(array) for index, array in outputs.items()})
        held = self._held(checked, outputs, handle)
        launcher = self._shared_launcher()
        captured = launcher.launch_with(pointers, checked.scalars, handle, owner, held)
        if self._launch_plan.barrier_timeout_ns and not captured:
            launcher.check()
        for target in inplace.values():
            if isinstance(inputs[target], DeviceArray):
                inputs[target].written_on(handle, owner)
        return tuple(
            inputs[inplace[index]]
            if index in inplace
            else self._deliver(framework, outputs[index], like, handle, owner)
            for index in range(len(self.program.outputs))
        )

    def bind(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> BoundLaunch:
        check_sequence("inputs", inputs)
        check_sequence("outputs", outputs)
        framework, _ = _framework_of_first(self._signature, inputs, outputs)
        handle, _ = self._resolve_stream(None, framework)
        checked = check_arguments(self._signature, inputs, outputs, device=("cuda", self._index), stream=handle)
        given = {index: array.pointer if array.num_elements else 0 for index, array in checked.outputs.items()}
        owners = [array.owner for array in (*checked.inputs.values(), *checked.outputs.values())]
        pointers = self._pointers(checked, given)
        return BoundLaunch(self._loaded, self._launch_plan, pointers, checked.scalars, owners, framework)

    def resource_usage(self) -> ResourceUsage:
        return self._loaded.usage

    def _resolve_stream(self, stream: Any, framework: str) -> tuple[int, Any]:
        if stream is not None:
            return stream_handle(stream), stream
        current = current_stream_getter(framework, self._index)
        if current is None:
            return LEGACY_STREAM, None
        return current(), current_stream_owner(framework, self._index)

    def _pointers(self, checked: CheckedArguments, outputs: Mapping[int, int]) -> list[int]:
        pointers = []
        for slot in self._facts.slots:
            if slot.kind == "input":
                need = self._signature.inputs[slot.index]
                assert isinstance(need, ArrayNeed)
                pointers.append(checked.inputs[slot.index].pointer if need.span_bytes else 0)
            else:
                pointers.append(outputs[slot.index])
        return pointers

    def _held(self, checked: CheckedArguments, outputs: Mapping[int, Any], handle: int) -> list[Any] | None:
        """What must be held until the launch is done; torch's allocator is told instead."""
        held: list[Any] = [array for array in outputs.values() if framework_of(array) != "torch"]
        current: int | None = None
        for array in checked.inputs.values():
            if array.framework != "torch":
                held.append(array.owner)
                continue
            if current is None:
                getter = current_stream_getter("torch", self._index)
                current = LEGACY_STREAM if getter is None else getter()
            if current != handle:
                record_use(array.owner, handle, self._index)
        return held or None

    def _shared_launcher(self) -> BoundLaunch:
        with self._launcher_lock:
            if self._launcher is None:
                self._launcher = BoundLaunch(self._loaded, self._launch_plan)
            return self._launcher

    def _deliver(self, framework: str, array: Any, like: Any, handle: int, owner: Any) -> Any:
        if isinstance(array, DeviceArray):
            array.written_on(handle, owner)
        return deliver(framework, array, like)


def _pointer_of(array: Any) -> int:
    """The address of an array that ``allocate`` made; 0 if it is empty."""
    if isinstance(array, DeviceArray):
        return array.pointer
    if framework_of(array) == "torch":
        return int(array.data_ptr())
    return int(array.data.ptr) if array.size else 0


def describe_stage(facts: Any, stage: int) -> str:
    """A stage's number and the names of its tasks."""
    names = ", ".join(task.name for task in facts.tasks if task.stage == stage)
    return f"stage {stage} ({names})" if names else f"stage {stage}"


def _framework_of_first(signature: Signature, inputs: Sequence[Any], outputs: Sequence[Any] = ()) -> tuple[str, Any]:
    """The framework of the first array of a known one, and that array; else of the first array given."""
    inputs_given = zip(signature.inputs, inputs, strict=False)
    arrays = [value for need, value in inputs_given if value is not None and isinstance(need, ArrayNeed)]
    arrays += [value for value in outputs if value is not None]
    for value in arrays:
        framework = framework_of(value)
        if framework != "other":
            return framework, value
    return "other", arrays[0] if arrays else None
