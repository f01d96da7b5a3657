"""Source to cubin to launch: NVRTC, the on-disk cache, modules, memory, DLPack.

The runtime gets source text, a kernel's name, sizes and pointers; it knows nothing of Programs
and imports only ``trainkernel.errors`` and ``trainkernel.dtypes``. Importing it loads no CUDA
library: ``cuda.bindings`` is imported by the first function that needs it.
"""
