"""What Triton cannot say of a cluster, written into a kernel's PTX: see `tilestream.kernels.hopper.pair`."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import triton

from tilestream.core.whole_file import write_whole

_REGION = re.compile(r"// multicast begins\n(.*?)// multicast ends\n", re.DOTALL)
_COPY = re.compile(
    r"(?P<when>@!?%p\d+\s+)?(?P<copy>cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\."
    r"mbarrier::complete_tx::bytes)(?P<what> [^;]*);"
)
_ARRIVAL = re.compile(r"(?P<when>@!?%p\d+\s+)?mbarrier\.arrive\.shared(?:::cta)?\.b64 _, \[(?P<at>[^\]]+)\], 2;")
_JUMP = re.compile(r"^\$?\w+:|\bbra\b", re.MULTILINE)
#: A copy to the same place in both CTAs, which counts at the same barrier of both.
_TO_BOTH = "{{ .reg .b16 both; mov.b16 both, 3; {when}{copy}.multicast::cluster{what}, both; }}"
#: An arrival that counts for two: one here, and one at the same barrier of the other CTA.
_AT_BOTH = """{{ .reg .b32 other, there; mov.u32 other, %cluster_ctarank; xor.b32 other, other, 1;
	mov.b32 there, {at}; mapa.shared::cluster.u32 there, there, other;
	{when}mbarrier.arrive.shared::cta.b64 _, [{at}];
	{when}mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }}"""


def for_pairs(ptx: str) -> str:
    """The PTX of a kernel whose CTAs work in pairs.

    Raises
    ------
    NotImplementedError
        If the compiler has written such a kernel otherwise than is known here.
    """

    def to_both(one: re.Match[str]) -> str:
        return _TO_BOTH.format(when=one["when"] or "", copy=one["copy"], what=one["what"])

    def multicast(region: re.Match[str]) -> str:
        text, copies = _COPY.subn(to_both, region[1])
        if not copies or _JUMP.search(text):
            raise NotImplementedError("a copy to both CTAs of a pair is not where Triton 3.6 to 3.9 compile it to")
        return text

    made, regions = _REGION.subn(multicast, ptx)
    made, arrivals = _ARRIVAL.subn(lambda one: _AT_BOTH.format(when=one["when"] or "", at=one["at"]), made)
    if not arrivals or not regions or regions != ptx.count("// multicast begins"):
        raise NotImplementedError(f"{regions} multicasts and {arrivals} arrivals at both CTAs: Triton 3.6 to 3.9 have more")
    return made


def rewritten(kernel: Any) -> dict[str, str]:
    """The option by which Triton assembles the PTX of `for_pairs` in place of a compiled kernel's own."""
    ptx = for_pairs(kernel.asm["ptx"]).encode()
    path = Path(triton.knobs.cache.dir) / "tilestream" / f"{hashlib.sha256(ptx).hexdigest()[:32]}.ptx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, ptx)
    return {"ir_override": str(path)}
