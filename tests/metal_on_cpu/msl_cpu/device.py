"""Device: what ``mx.fast.metal_kernel`` is replaced by, so that the callers of kernels are tested as they are."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from .order import Order
from .program import Argument, Counts, KernelError, Kind, Program

_metal_kernel = mx.fast.metal_kernel
_IN_PLACE = re.compile(r"^\s*// written in place: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Generated:
    """What mlx makes of a call: the kernel's name and text, and which shapes and strides it takes for each input."""

    name: str
    source: str
    arguments: str
    infos: list[tuple[bool, bool, bool]]
    row_contiguous: bool


@dataclass(frozen=True)
class Launch:
    """One call of a kernel, for reports. ``arguments`` by name."""

    kernel: str
    template: dict[str, Any]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    counts: Counts
    arguments: dict[str, Argument]


@dataclass
class Device:
    """Runs kernels at once, each in all ``schedules``, whose results must be the same bits.

    ``variant``: "fast", or "check" with every access checked. ``change`` gets (kernel, source, header) and returns
    another source and header: a planted fault. ``launches`` is filled if ``keep_launches``.
    """

    variant: str = "fast"
    schedules: tuple[int, ...] = (0,)
    change: Any = None
    keep_launches: bool = False
    order: Order = field(default_factory=Order)
    launches: list[Launch] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)

    def metal_kernel(
        self, name: str, input_names: Any, output_names: Any, source: str, header: str = "", **more: Any
    ) -> Any:
        """As ``mx.fast.metal_kernel``."""
        if self.change is not None:
            source, header = self.change(name, source, header)
        return _Kernel(self, name, list(input_names), list(output_names), source, header, more)


class _Kernel:
    def __init__(
        self, device: Device, name: str, inputs: list[str], outputs: list[str], source: str, header: str, more: Any
    ) -> None:
        self._device = device
        self._name = name
        self._inputs, self._outputs = inputs, outputs
        found = _IN_PLACE.search(source)
        self._in_place = [part.strip() for part in found.group(1).split(",")] if found else []
        self._kernel = _metal_kernel(
            name=name, input_names=inputs, output_names=outputs, source=source, header=header, **more
        )
        self._programs: dict[str, Program] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] = (),
    ) -> list[mx.array]:
        device = self._device
        generated = generate(
            self._kernel, inputs=list(inputs), output_shapes=output_shapes, output_dtypes=output_dtypes, grid=grid,
            threadgroup=threadgroup, template=template,
        )  # fmt: skip
        program = self._programs.get(generated.source)
        if program is None:
            program = Program(generated.source, generated.name, generated.arguments, device.variant)
            self._programs[generated.source] = program
            device.sources[generated.name] = generated.source
        mx.eval(list(inputs))
        views = [_memory(array) for array in inputs]
        addresses = {name: view.ctypes.data for name, view in zip(self._inputs, views, strict=True)}
        dispatch = device.order.begin(self._name, addresses, self._in_place)
        results: list[list[Argument]] = []
        counts = Counts(0, 0, 0)
        for schedule in device.schedules:
            arguments = self._arguments(generated, views)
            made = [
                Argument(_unwritten(shape, dtype), Kind.OUTPUT)
                for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
            ]
            counts = program.run([*arguments, *made], grid, threadgroup, schedule)
            results.append([*(one for one in arguments if one.kind == Kind.IN_PLACE), *made])
            if device.keep_launches and schedule == device.schedules[-1]:
                names = [*self._names(generated, inputs), *self._outputs]
                launch = Launch(self._name, dict(template), grid, threadgroup, counts,
                                dict(zip(names, [*arguments, *made], strict=True)))  # fmt: skip
                device.launches.append(launch)
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                if _bytes(a) != _bytes(b):
                    raise KernelError(f"SCHEDULE: what {self._name} computes depends on the order of its threads")
        for name, array, view in zip(self._inputs, inputs, views, strict=True):
            if name in self._in_place:
                changed = results[0].pop(0).data
                assert changed is not None
                ctypes.memmove(view.ctypes.data, changed.ctypes.data, view.nbytes)
                device.order.keep(array)
        outputs = [_array(argument.data, dtype) for argument, dtype in zip(results[0], output_dtypes, strict=True)]
        mx.eval(outputs)
        device.order.end(dispatch, [(_memory(array).ctypes.data, array.nbytes, array) for array in outputs])
        return outputs

    def _arguments(self, generated: Generated, views: Sequence[np.ndarray[Any, Any]]) -> list[Argument]:
        """Each input, and after it the shape, strides and number of axes that the source asks for."""
        made: list[Argument] = []
        copies: dict[int, np.ndarray[Any, Any]] = {}  # a pool may be given twice
        for name, view, (shape, strides, axes) in zip(self._inputs, views, generated.infos, strict=True):
            steps = [step // view.itemsize for step in view.strides]
            contiguous = view.flags.c_contiguous
            if not contiguous and generated.row_contiguous:
                raise KernelError(f"COPY: mlx would copy '{name}', which is not row-contiguous")
            if not contiguous and not strides:
                raise KernelError(f"STRIDES: '{name}' is not row-contiguous, and {self._name} doesn't use its strides")
            flat, kind = _flat(view), Kind.INPUT
            if name in self._in_place:
                kind = Kind.IN_PLACE
                flat = copies.setdefault(view.ctypes.data, flat.copy())
            made.append(Argument(flat, kind))
            if view.ndim:
                made += [Argument(np.array(view.shape, np.int32))] * shape
                made += [Argument(np.array(steps, np.int64))] * strides
                made += [Argument(np.array(view.ndim, np.int32))] * axes
        return made

    def _names(self, generated: Generated, inputs: Sequence[mx.array]) -> list[str]:
        names = []
        for name, array, infos in zip(self._inputs, inputs, generated.infos, strict=True):
            names.append(name)
            if array.ndim:
                names += [
                    f"{name}_{kind}" for kind, used in zip(("shape", "strides", "ndim"), infos, strict=True) if used
                ]
        return names


def generate(kernel: Any, inputs: Sequence[mx.array], **call: Any) -> Generated:
    """What mlx would hand to the Metal compiler: it can be had where there is no Metal, by exporting the call."""
    found: list[dict[str, Any]] = []

    def note(event: dict[str, Any]) -> None:
        if event.get("name") == "CustomKernel":
            found.append(event)

    mx.export_function(note, lambda *arrays: kernel(inputs=list(arrays), **call), *inputs)
    (event,) = found
    name, source, *numbers, infos, row_contiguous = event["arguments"][:10]
    assert isinstance(source, str) and f" {name}(" in source, "the order of a CustomKernel's arguments has changed"
    assert numbers == [*call["grid"], *call["threadgroup"]]
    assert len(infos) == len(inputs) and isinstance(row_contiguous, bool)
    arguments = re.search(rf"decltype\({name}<(.*)>\) ", source)
    return Generated(name, source, arguments.group(1) if arguments else "", infos, row_contiguous)


def _memory(array: mx.array) -> np.ndarray[Any, Any]:
    """The array's own memory, as integers for types that numpy doesn't have."""
    return np.asarray(memoryview(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array))


def _flat(view: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """All elements from the first to the last that an index can reach, without a copy."""
    if not view.size:
        return np.zeros(1, view.dtype)
    reach = 1 + sum((size - 1) * step // view.itemsize for size, step in zip(view.shape, view.strides, strict=True))
    return np.lib.stride_tricks.as_strided(view, (reach,), (view.itemsize,))


def _unwritten(shape: Sequence[int], dtype: mx.Dtype) -> np.ndarray[Any, Any]:
    """Memory as nobody wrote it: NaN where it is read as floats."""
    memory = _memory(mx.zeros(shape, dtype)).copy()
    memory.reshape(-1).view(np.uint8)[:] = 0xFF
    return memory


def _bytes(argument: Argument) -> bytes:
    assert argument.data is not None
    return argument.data.tobytes()


def _array(data: np.ndarray[Any, Any] | None, dtype: mx.Dtype) -> mx.array:
    made = mx.array(data)
    return made.view(mx.bfloat16) if dtype == mx.bfloat16 else made
