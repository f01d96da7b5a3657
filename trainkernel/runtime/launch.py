"""Launches with everything prepared: one driver call each.

A launch allocates nothing, waits for nothing and asks the driver nothing but which context is
current, so it can be captured in a CUDA graph. With ``LaunchPlan.times`` a run is several launches,
each of a bounded time (``runtime/parts.py``): the host waits while the time of a stage or step is
not known, and for launches that would be too far behind it. What a captured launch uses must outlive the
graph: keep the ``BoundLaunch``. The order of a graph's replays against other launches of the same
``BoundLaunch`` is the caller's, since they share its workspace.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainkernel.errors import LaunchError
from trainkernel.runtime.driver import (
    check,
    describe_status,
    primary_context,
    relaxed_capture,
    require_driver,
    using_device,
)
from trainkernel.runtime.memory import DeviceMemory, forget_event
from trainkernel.runtime.module import LoadedKernel
from trainkernel.runtime.parts import ALL_TICKS, Part, PartedRuns, Segment, TickTimes
from trainkernel.runtime.scalars import ScalarField, find_scalar, scalars_by_key
from trainkernel.runtime.streams import LEGACY_STREAM, current_stream_getter, current_stream_owner, stream_handle

HEADER_BYTES = 256
_POINTERS_OFFSET = 16
_MAX_PENDING_CALLS = 16


@dataclass(frozen=True)
class LaunchPlan:
    """The sizes of a launch.

    Attributes
    ----------
    name : str
        What messages call the kernel.
    blocks, threads_per_block, dynamic_shared_bytes : int
    workspace_bytes : int
        The 256-byte header, which is zeroed, and the arena, which is not.
    params_bytes : int
        Workspace pointer, timeout, tensor pointers or one pointer to a table of them, scalars.
    num_pointers : int
    uses_table : bool
    scalars : tuple of ScalarField
    barrier_timeout_ns : int
        0: a barrier waits for ever.
    describe_stage : callable
        Names a stage for the message about a barrier that was not passed.
    segments : tuple of Segment
        The ticks of a run, if a launch can run a part of them.
    ticks_offset_bytes : int or None
        Where the parameter block says which ticks a launch runs.
    times : TickTimes or None
        Bounds the time of a launch; shared by all that launch the kernel. None: one launch runs all.
    """

    name: str
    blocks: int
    threads_per_block: int
    dynamic_shared_bytes: int
    workspace_bytes: int
    params_bytes: int
    num_pointers: int
    uses_table: bool = False
    scalars: tuple[ScalarField, ...] = ()
    barrier_timeout_ns: int = 0
    describe_stage: Callable[[int], str] = "stage {}".format
    segments: tuple[Segment, ...] = ()
    ticks_offset_bytes: int | None = None
    times: TickTimes | None = None


class BoundLaunch:
    """A kernel bound to arrays, with a workspace and a parameter block of its own.

    Parameters
    ----------
    kernel : LoadedKernel
    plan : LaunchPlan
    pointers : sequence of int
        One for each tensor slot; 0 for an empty tensor.
    scalars : mapping of int to number
        By input index; every scalar of the plan.
    owners : sequence of object
        Kept alive as long as this object.
    framework : str
        Whose current stream is the default of ``launch``; see ``ArrayView.framework``.
    """

    def __init__(
        self,
        kernel: LoadedKernel,
        plan: LaunchPlan,
        pointers: Sequence[int] | None = None,
        scalars: Mapping[int, Any] | None = None,
        owners: Sequence[Any] = (),
        framework: str = "other",
    ) -> None:
        self._driver = require_driver()
        self._device_index = kernel.facts.index
        self._plan = plan
        self._lock = threading.Lock()
        # Arrays of calls in flight, each with the event that says it is done.
        self._pending: deque[tuple[Any, Any]] = deque()
        self._captured_tables: list[DeviceMemory] = []
        keep = (kernel, tuple(owners), self._pending, self._captured_tables)
        self._workspace = DeviceMemory(self._device_index, max(plan.workspace_bytes, HEADER_BYTES), keep)
        self._workspace.zero(HEADER_BYTES)
        self._table = DeviceMemory(self._device_index, 8 * plan.num_pointers) if plan.uses_table else None
        self._params = ctypes.create_string_buffer(plan.params_bytes)
        self._kernel_params = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._kernel_params_address = ctypes.addressof(self._kernel_params)
        struct.pack_into("<QQ", self._params, 0, self._workspace.pointer, plan.barrier_timeout_ns)
        if plan.ticks_offset_bytes is not None:
            struct.pack_into("<qq", self._params, plan.ticks_offset_bytes, 0, ALL_TICKS)
        self._parts = None if plan.times is None else PartedRuns(self._driver, plan.times, plan.segments)
        self._fields = scalars_by_key(plan.scalars)
        self._pointers: tuple[int, ...] | None = None
        if pointers is not None:
            self._write_pointers(tuple(pointers))
        for index, value in (scalars or {}).items():
            self.set_scalar(index, value)

        self._call = partial(
            self._driver.cuLaunchCooperativeKernel,
            kernel.function,
            plan.blocks,
            1,
            1,
            plan.threads_per_block,
            1,
            1,
            plan.dynamic_shared_bytes,
        )
        self._success = self._driver.CUresult.CUDA_SUCCESS
        self._get_context = self._driver.cuCtxGetCurrent
        self._context = primary_context(self._device_index)[1]
        self._framework = framework
        self._current_stream = current_stream_getter(framework, self._device_index)

        # The stream that needs no ordering before the next launch, as handle and as the object the
        # caller gave; and the stream of the last launch that was not captured. They differ only
        # after a captured launch. Objects are held so that their streams are not destroyed.
        self._ready_handle = -1
        self._ready_object: Any = None
        self._order_handle: int | None = None
        self._order_owner: Any = None
        self._last_handle: int | None = None
        self._stream: Any = None
        self._event: Any = None

    @property
    def device_index(self) -> int:
        return self._device_index

    def __repr__(self) -> str:
        plan = self._plan
        return (
            f"BoundLaunch({plan.name!r} on cuda:{self._device_index}, {plan.blocks} blocks of "
            f"{plan.threads_per_block}, workspace {plan.workspace_bytes:,} bytes)"
        )

    def launch(self, stream: Any = None) -> None:
        """Put one run of the kernel on a stream and return at once.

        A launch on another stream than the last one waits, on the device, for the last one. A kernel
        with ``max_launch_ms`` returns when all but the last few launches of its run are done.

        Parameters
        ----------
        stream : optional
            None: the current stream of the framework whose arrays are bound, else the legacy
            default stream. Or an integer handle, whose stream must live until the next launch, or
            a stream object of torch, CuPy, cuda.core or anyone with ``__cuda_stream__``.

        Raises
        ------
        LaunchError
            If the driver refuses the launch; or if the stream is being captured and a kernel with
            ``max_launch_ms`` has not been measured yet.
        """
        with self._lock:
            context = self._get_context()[1]  # None if the driver refuses, as in a forked process
            if context is not None and int(context) == self._context:
                self._launch(stream)
            else:
                with using_device(self._device_index):
                    self._launch(stream)

    def set_scalar(self, scalar: str | int, value: Any) -> None:
        """Set a scalar input for the launches that follow.

        Parameters
        ----------
        scalar : str or int
            The input's name, or its index among the kernel's inputs.
        value : number
        """
        field = find_scalar(self._fields, scalar)
        struct.pack_into("4s", self._params, field.offset_bytes, field.pack(value))

    def launch_with(
        self, pointers: Sequence[int], scalars: Mapping[int, Any], stream: int, stream_owner: Any, owners: Any
    ) -> bool:
        """Launch on other arrays than the last time. Returns whether the launch was captured, not run.

        Parameters
        ----------
        pointers
            As for the constructor.
        scalars : mapping of int to number
            By input index; as ``ScalarField.check`` returned them.
        stream : int
        stream_owner : object
            Keeps the stream alive.
        owners : object or None
            Kept alive until the launch is done; None if the stream's order is enough.
        """
        with self._lock, using_device(self._device_index) as driver:
            self._drop_done_calls()
            self._set_stream(stream, stream_owner)
            captured = self._ready_handle == -1 or self._is_capturing(stream)
            if tuple(pointers) != self._pointers or captured:
                self._write_pointers(tuple(pointers), stream, captured)
            for index, value in scalars.items():
                field = self._fields[index]
                struct.pack_into("4s", self._params, field.offset_bytes, field.pack_checked(value))
            if self._parts is not None:
                self._submit_parts(self._parts)
            else:
                self._submit()
            if owners is not None and not captured:
                event = check(driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)), "cuEventCreate")
                check(driver.cuEventRecord(event, stream), "cuEventRecord")
                self._pending.append((event, owners))
            return captured

    def read_workspace(self, size_bytes: int, offset_bytes: int = 0) -> bytes:
        """Bytes of the workspace, from an offset on, after the last launch, which is waited for."""
        self.check()
        return self._workspace.read(size_bytes, offset_bytes)

    def check(self) -> None:
        """Wait for the last launch and see whether it got through all its barriers.

        Raises
        ------
        LaunchError
            If a barrier was not passed in the time allowed: the message names its stage. The
            outputs are undefined then; the next launch starts afresh. Also if a kernel failed, or
            while the last stream is being captured.
        """
        with self._lock, using_device(self._device_index) as driver:
            if self._last_handle is None:
                return
            if self._is_capturing(self._last_handle):
                raise LaunchError(f"kernel '{self._plan.name}': check() waits, which a stream being captured cannot")
            check(driver.cuStreamSynchronize(self._last_handle), f"kernel '{self._plan.name}'")
            error = struct.unpack_from("<I", self._workspace.read(8), 4)[0]
            if error == 0:
                return
            self._workspace.zero(HEADER_BYTES)
            milliseconds = self._plan.barrier_timeout_ns / 1e6
            raise LaunchError(
                f"kernel '{self._plan.name}' on device {self._device_index}: the barrier of "
                f"{self._plan.describe_stage(error - 1)} was not passed by all {self._plan.blocks} blocks within "
                f"{milliseconds:g} ms; its outputs are undefined. Raise barrier_timeout_ms if the step takes that long."
            )

    def _launch(self, stream: Any) -> None:
        if stream is None:
            current = self._current_stream
            handle = LEGACY_STREAM if current is None else current()
            if handle != self._ready_handle:
                self._set_stream(handle, current_stream_owner(self._framework, self._device_index))
        elif stream is not self._ready_object:
            handle = stream_handle(stream)
            if handle != self._ready_handle:
                self._set_stream(handle, stream)
        if self._parts is not None:
            self._submit_parts(self._parts)
            return
        result = self._call(self._stream, self._kernel_params_address)
        if result[0] != self._success:
            self._raise_launch_error(result[0])

    def _submit(self) -> None:
        result = self._call(self._stream, self._kernel_params_address)
        if result[0] != self._success:
            self._raise_launch_error(result[0])

    def _submit_parts(self, runs: PartedRuns) -> None:
        """Submit a run as launches of a bounded time."""
        handle = self._last_handle
        assert handle is not None
        if self._is_capturing(handle):
            runs.capture(self._lengths(), self._submit_part)
        else:
            runs.launch(self._lengths(), self._stream, self._submit_part)

    def _submit_part(self, part: Part) -> None:
        assert self._plan.ticks_offset_bytes is not None
        struct.pack_into("<qq", self._params, self._plan.ticks_offset_bytes, part.first, part.end)
        self._submit()

    def _lengths(self) -> dict[int, int]:
        """The integer scalars of the next launch, by input index."""
        integers = (field for field in self._plan.scalars if field.dtype == "int32")
        return {field.index: struct.unpack_from("<i", self._params, field.offset_bytes)[0] for field in integers}

    def _set_stream(self, handle: int, owner: Any) -> None:
        """Make ``handle`` the stream of the next launch, ordered after the last one."""
        if handle == self._ready_handle:
            return
        driver = self._driver
        self._stream = driver.CUstream(handle)
        self._last_handle = handle
        if self._is_capturing(handle):
            # A captured stream cannot wait for work outside the capture; the caller orders the replays.
            # Not remembered as ready, so that the first launch after the capture is ordered again.
            self._ready_handle = -1
            self._ready_object = None
            return
        if self._order_handle is not None and self._order_handle != handle:
            if self._is_capturing(self._order_handle):
                raise LaunchError(
                    f"kernel '{self._plan.name}' was launched on stream {self._order_handle:#x}, which is being "
                    f"captured now, so stream {handle:#x} cannot wait for it. Launch on the captured stream, or after "
                    "the capture."
                )
            if self._event is None:
                flags = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
                self._event = check(driver.cuEventCreate(flags), "cuEventCreate")
                weakref.finalize(self, forget_event, self._event).atexit = False
            check(driver.cuEventRecord(self._event, self._order_handle), "cuEventRecord")
            check(driver.cuStreamWaitEvent(self._stream, self._event, 0), "cuStreamWaitEvent")
        self._ready_handle = self._order_handle = handle
        self._ready_object = self._order_owner = owner

    def _is_capturing(self, handle: int) -> bool:
        if handle == LEGACY_STREAM:  # it cannot be captured, and asking is an error while others are
            return False
        status = check(self._driver.cuStreamIsCapturing(handle), f"stream {handle:#x}: cuStreamIsCapturing")
        return int(status) != 0

    def _write_pointers(self, pointers: tuple[int, ...], stream: int | None = None, captured: bool = False) -> None:
        if len(pointers) != self._plan.num_pointers:
            raise LaunchError(
                f"kernel '{self._plan.name}' needs {self._plan.num_pointers} pointers, got {len(pointers)}"
            )
        packed = struct.pack(f"<{len(pointers)}Q", *pointers)
        if self._table is None:
            struct.pack_into(f"{len(packed)}s", self._params, _POINTERS_OFFSET, packed)
        else:
            table = self._table
            if captured:  # a graph reads its table at every replay, so it gets one that nobody changes
                table = DeviceMemory(self._device_index, len(packed))
                self._captured_tables.append(table)
            if stream is None or captured:
                table.write(packed)
            else:  # after the launches before it on this stream, which read the old pointers
                check(self._driver.cuMemcpyHtoDAsync(table.pointer, packed, len(packed), stream), "cuMemcpyHtoDAsync")
            struct.pack_into("<Q", self._params, _POINTERS_OFFSET, table.pointer)
        self._pointers = None if captured else pointers

    def _drop_done_calls(self) -> None:
        """Let go of the arrays of calls that are done; wait for the oldest if there are too many."""
        if not self._pending:
            return
        driver = self._driver
        with relaxed_capture(driver):
            while self._pending:
                event = self._pending[0][0]
                if len(self._pending) > _MAX_PENDING_CALLS:
                    driver.cuEventSynchronize(event)
                elif driver.cuEventQuery(event)[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
                    return
                self._pending.popleft()
                driver.cuEventDestroy(event)

    def _raise_launch_error(self, status: Any) -> None:
        plan = self._plan
        self._reset_header()
        advice = ""
        if getattr(status, "name", "") == "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE":
            advice = (
                " The stream's context has fewer SMs than the device, or another limit. "
                f"Pass max_blocks below {plan.blocks}."
            )
        raise LaunchError(
            f"kernel '{plan.name}' was not launched on device {self._device_index} with {plan.blocks} blocks of "
            f"{plan.threads_per_block} threads and {plan.dynamic_shared_bytes:,} bytes of dynamic shared memory: "
            f"{describe_status(status)}.{advice}"
        )

    def _reset_header(self) -> None:
        """Zero the header again after a failed launch, once earlier launches are done with it."""
        try:
            if self._order_handle is not None and not self._is_capturing(self._order_handle):
                check(self._driver.cuStreamSynchronize(self._order_handle), "cuStreamSynchronize")
                self._workspace.zero(HEADER_BYTES)
        except LaunchError:  # the context itself failed; the launch's own error says more
            pass
