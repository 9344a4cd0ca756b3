"""Assembly made up for the purpose: the main loop of a GEMM whose loads, reads and products are spread evenly."""

from __future__ import annotations

HEAD = """\
\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
\t.text
\t.type\tgemm,@function
gemm:                                   ; @gemm
; %bb.0:
\ts_load_dwordx2 s[0:1], s[4:5], 0x0
\tv_mov_b32_e32 v0, 0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
"""
TAIL = """\
\ts_add_i32 s6, s6, -1
\ts_cmp_lg_u32 s6, 0
\ts_cbranch_scc1 .LBB0_1
; %bb.2:
\ts_endpgm
.Lfunc_end0:
\t.section\t.rodata,"a",@progbits
\t.amdhsa_kernel gemm
\t\t.amdhsa_group_segment_fixed_size {lds}
\t\t.amdhsa_next_free_vgpr {vgprs}
\t.end_amdhsa_kernel
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     {agprs}
    .group_segment_fixed_size: {lds}
    .max_flat_workgroup_size: {threads}
    .name:           gemm
    .private_segment_fixed_size: 0
    .sgpr_count:     40
    .sgpr_spill_count: 0
    .vgpr_count:     {vgprs}
    .vgpr_spill_count: 0
...
\t.end_amdgpu_metadata
"""


def text(
    body: list[str], arch: str = "gfx950", vgprs: int = 512, agprs: int = 256, lds: int = 131072, threads: int = 256
) -> str:
    """A kernel that loops over ``body``."""
    tail = TAIL.format(lds=lds, vgprs=vgprs, agprs=agprs, threads=threads)
    return HEAD.format(arch=arch) + "".join(f"\t{line}\n" for line in body) + tail


def gemm(block_m: int, block_n: int, stages: int = 3) -> list[str]:
    """A K step of 64 of float16 for gfx950: four waves in 2 x 2, copies straight to LDS, ``stages`` of them ahead."""
    products = block_m * block_n * 64 // (16 * 16 * 32 * 4)
    loads = (block_m + block_n) * 64 * 2 // (4 * 1024)
    reads = (block_m + block_n) // 2 * 64 * 2 // 1024
    lines = [f"s_waitcnt vmcnt({loads * (stages - 2)})", "s_barrier"]
    for i in range(products):
        # What is read is for the step after: nothing waits for it here.
        lines += [
            f"ds_read_b128 v[{4 * number}:{4 * number + 3}], v250 offset:{16 * number}"
            for number in range(i * reads // products, (i + 1) * reads // products)
        ]
        lines += [
            f"buffer_load_dwordx4 v249, s[8:11], 0 offen offset:{16 * number} lds"
            for number in range(i * loads // products, (i + 1) * loads // products)
        ]
        at = 4 * (i % 64)
        lines.append(f"v_mfma_f32_16x16x32_f16 a[{at}:{at + 3}], v[240:243], v[244:247], a[{at}:{at + 3}]")
    return [*lines, "s_waitcnt lgkmcnt(0)"]
