"""Launches the CDNA GEMM as the portable kernel, whose operands and words it takes in the same order."""

from __future__ import annotations

from typing import Any

from tilestream.launch.cdna.arguments import Arguments
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.portable.launch import GemmLaunch as PortableLaunch
from tilestream.plan.plan import Plan


class GemmLaunch(PortableLaunch):
    """The CDNA GEMM for one plan, one layout of the operands and one alignment of their addresses.

    Parameters
    ----------
    aligned
        Whether the addresses of the output and of the residual are multiples of 16.
    """

    kernel: Any = Arguments.kernel

    def __init__(self, plan: Plan, layout: Layout, aligned: tuple[bool, bool]) -> None:
        self._aligned = aligned
        super().__init__(plan, layout)

    def arguments(self, probe: bool = False, trace: bool = False) -> Arguments:
        """See `PortableLaunch.arguments`.

        Raises
        ------
        NotImplementedError
            If the launch is to be traced.
        """
        if trace:
            raise NotImplementedError("the CDNA kernel writes no trace; backend='portable' does")
        return Arguments(self.plan, self.layout, self._aligned, probe)
