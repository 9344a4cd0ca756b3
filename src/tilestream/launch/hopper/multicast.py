"""What Triton does not compile of a pair of CTAs, written into the kernel's PTX: see `tilestream.kernels.hopper.pair`.

The kernel is compiled twice. The second time Triton takes the rewritten text of the first in place of its own PTX
(``ir_override``), and all else is as ever: its cache, the assembler, the loader.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import triton

from tilestream.core.whole_file import write_whole

_REGION = re.compile(r"// multicast begins\n(.*?)// multicast ends\n", re.DOTALL)
_WHEN = r"(?P<when>@!?%p\d+\s+)?"
_COPY = re.compile(
    rf"{_WHEN}(?P<copy>cp\.async\.bulk\.tensor\.\dd)\.shared::(?:cta|cluster)\.global\.mbarrier::complete_tx::bytes "
    r"(?P<what>[^;]*);"
)
_ARRIVAL = re.compile(rf"{_WHEN}mbarrier\.arrive\.shared(?:::cta)?\.b64 _, \[(?P<at>[^\]]+)\], 2;")
_JUMP = re.compile(r"^\$L__BB\w+:|\bbra\b", re.MULTILINE)
#: A copy to the same place in both CTAs, which counts at the same barrier of both.
_TO_BOTH = (
    "{{ .reg .b16 both; mov.b16 both, 3; {when}{copy}.shared::cluster.global.mbarrier::complete_tx::bytes"
    ".multicast::cluster {what}, both; }}"
)
#: An arrival that counts for two: one here, and one at the same barrier of the other CTA.
_AT_BOTH = """{{ .reg .b32 other, there; mov.u32 other, %cluster_ctarank; xor.b32 other, other, 1;
	mapa.shared::cluster.u32 there, {at}, other;
	{when}mbarrier.arrive.shared::cta.b64 _, [{at}];
	{when}mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }}"""


def for_pairs(ptx: str) -> str:
    """The PTX of a kernel whose CTAs work in pairs.

    Raises
    ------
    NotImplementedError
        If the compiler has written such a kernel otherwise than Triton 3.6, 3.7 and 3.9 do.
    """

    def multicast(region: re.Match[str]) -> str:
        text, copies = _COPY.subn(lambda one: _TO_BOTH.format(**_found(one)), region[1])
        if not copies or _JUMP.search(text):
            raise NotImplementedError(f"a pair's copy to both CTAs: {_OTHERWISE}")
        return f"\n{text}\n"

    made, regions = _REGION.subn(multicast, ptx)
    made, arrivals = _ARRIVAL.subn(lambda one: _AT_BOTH.format(**_found(one)), made)
    if not arrivals or not regions or regions != ptx.count("// multicast begins"):
        raise NotImplementedError(
            f"a pair's {regions} copies to both CTAs and {arrivals} arrivals at both: {_OTHERWISE}"
        )
    return made


_OTHERWISE = "Triton 3.6, 3.7 and 3.9 compile it otherwise; take another variant"


def _found(match: re.Match[str]) -> dict[str, str]:
    return {name: text or "" for name, text in match.groupdict().items()}


def rewritten(kernel: Any) -> dict[str, str]:
    """The option by which Triton assembles the PTX of `for_pairs` in place of a compiled kernel's own."""
    ptx = for_pairs(kernel.asm["ptx"]).encode()
    path = Path(triton.knobs.cache.dir) / "tilestream" / f"{hashlib.sha256(ptx).hexdigest()[:32]}.ptx"
    if not path.is_file() or path.read_bytes() != ptx:  # the name alone does not say that the text is whole
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, ptx)
    return {"ir_override": str(path)}
