"""Pointwise tasks and copies: each element in one thread, all loads of a thread before its stores."""

from __future__ import annotations

from trainkernel.access import operand_index
from trainkernel.codegen.bodies import TaskBody
from trainkernel.codegen.conversions import register_type, store
from trainkernel.codegen.text import block
from trainkernel.codegen.values import ValueScope
from trainkernel.indexing import delinearize, variable
from trainkernel.ops import literal
from trainkernel.ops.domains import domain_of_dtype
from trainkernel.placement import MAX_ELEMENTS_PER_THREAD, elements_per_thread, is_light
from trainkernel.product_plans import ceil_div


class _ElementwiseBody(TaskBody):
    def _elementwise(self, lines: list[str], stores: list[tuple[str, str]], types: list[str]) -> list[str]:
        """The loop of one thread over its elements; all loads come before all stores.

        ``stores`` are pairs of a statement with a gap and the value for it, ``types`` the values' C types.
        """
        total = self.task.num_elements
        if self.region is not None:
            return self._elements_of_piece(lines, stores, types, self.region.split.pieces)
        unroll = elements_per_thread(total, self.threads, self.frame.schedule.target, is_light(self.task))
        first = f"piece * {self.threads * unroll} + (tk_index)threadIdx.x"
        guard = total % (self.threads * unroll) != 0
        if unroll == 1:
            body = lines + [text.format(value) for text, value in stores]
            head = [f"const tk_index i = (tk_index){first};"]
            return head + (block(f"if (i < {total})", body) if guard else body)
        result = [f"const tk_index first = (tk_index){first};"]
        return result + self._unrolled(lines, stores, types, unroll, str(total) if guard else None)

    def _elements_of_piece(
        self, lines: list[str], stores: list[tuple[str, str]], types: list[str], pieces: int
    ) -> list[str]:
        own = self.task.num_elements // pieces
        unroll = min(MAX_ELEMENTS_PER_THREAD, ceil_div(own, self.threads))
        begin = f"(tk_index)piece * {own}" if pieces > 1 else "(tk_index)0"
        head = [f"const tk_index begin = {begin}, end = begin + {own};"]
        step = self.threads * unroll
        if unroll == 1:
            body = lines + [text.format(value) for text, value in stores]
            head.append("const tk_index i = begin + (tk_index)threadIdx.x;")
            return head + (block("if (i < end)", body) if own != self.threads else body)
        inner = self._unrolled(lines, stores, types, unroll, "end" if own % step else None)
        loop = block(f"for (tk_index first = begin + (tk_index)threadIdx.x; first < end; first += {step})", inner)
        return [*head, "#pragma unroll 1", *loop]

    def _unrolled(
        self, lines: list[str], stores: list[tuple[str, str]], types: list[str], unroll: int, end: str | None
    ) -> list[str]:
        """``unroll`` elements from ``first`` on, a block apart; all loads come before all stores."""
        names = [f"o_{number}" for number in range(len(stores))]
        keep = [f"{name}[u] = {value};" for name, (_, value) in zip(names, stores, strict=True)]
        write = [text.format(f"{name}[u]") for name, (text, _) in zip(names, stores, strict=True)]
        result = []
        for c_type in dict.fromkeys(types):
            own = [name for name, other in zip(names, types, strict=True) if other == c_type]
            result.append(f"{c_type} {', '.join(f'{name}[{unroll}]' for name in own)};")
        for body in (lines + keep, write):
            inner = [f"const tk_index i = first + u * {self.threads};"]
            inner += block(f"if (i < {end})", body) if end is not None else body
            result += ["#pragma unroll"] + block(f"for (int u = 0; u < {unroll}; ++u)", inner)
        return result


class PointwiseBody(_ElementwiseBody):
    """The body of a pointwise task."""

    def lines(self) -> list[str]:
        element = variable("i", self.task.num_elements)
        registers: dict[str, str] = {}
        lines = self._members(registers, element)
        stores = [(self._store(name, "{}", element), registers[name]) for name in self.task.stores]
        return self._elementwise(lines, stores, [self._register_type(name) for name in self.task.stores])


class CopyBody(_ElementwiseBody):
    """The body of a copy."""

    def lines(self) -> list[str]:
        copy = self.task.copy
        assert copy is not None
        element = variable("i", self.task.num_elements)
        destination = self.frame.destination(copy.destination, copy.dtype)
        pointer = self.scope.pointer("destination", destination, const=False)
        self.scope.inlined = {}  # the source is stored, even if others evaluate it for themselves
        values = ValueScope(self.scope, {}, element)
        if copy.source is None:
            value = literal(0, domain_of_dtype(destination.dtype))
        else:
            # An output may be of another dtype than its buffer.
            own = domain_of_dtype(self.scope.dtype(copy.source.buffer))
            index = operand_index(copy.source, delinearize(element, copy.shape))
            value = values.element(copy.source.buffer, index)
            if own != domain_of_dtype(destination.dtype):
                value = self.scope.rounded(value, own, destination.dtype)
        stores = [(store(pointer, element, "{}", destination.dtype), value)]
        return self._elementwise(values.lines, stores, [register_type(destination.dtype)])
