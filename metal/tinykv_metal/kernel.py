"""Kernel: one of the package's Metal sources, and how mlx runs it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import mlx.core as mx

Template = Sequence[tuple[str, "int | bool | mx.Dtype"]]


@functools.cache
def source(name: str) -> str:
    """The text of ``name``.metal."""
    return files(__package__).joinpath(f"{name}.metal").read_text(encoding="utf-8")


class Kernel:
    """A kernel with the names of its inputs and outputs, as its source uses them.

    mlx compiles it at the first call, once for each set of template constants, of input types and of inputs that
    arrive as ``constant`` rather than ``device`` because they have fewer than 8 elements; the sources take either.
    """

    def __init__(self, name: str, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.name = name
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    @functools.cached_property
    def _compiled(self) -> Any:
        # Inputs are passed as they are: mlx would copy those that aren't row-contiguous, and a write in place would
        # go into the copy. Sources use the strides of inputs that may have any, and pools are always contiguous.
        return mx.fast.metal_kernel(
            name=f"tinykv_{self.name}",
            input_names=self.inputs,
            output_names=self.outputs,
            source=source(self.name),
            header=source("common"),
            ensure_row_contiguous=False,
        )

    def __call__(
        self,
        *inputs: mx.array,
        template: Template,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        """Run over ``grid`` threads; ``outputs`` are shapes and dtypes."""
        assert len(inputs) == len(self.inputs)
        made: list[mx.array] = self._compiled(
            inputs=list(inputs),
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )
        return made
