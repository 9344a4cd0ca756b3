"""The reader of AMDGCN assembly, on texts as LLVM writes them."""

from __future__ import annotations

import pytest
from loops import gemm, text

from tilestream_tools.isa import amdgcn
from tilestream_tools.isa.amdgcn import Instruction, Mfma, parse


def one(written: str) -> Instruction:
    mnemonic, _, operands = written.partition(" ")
    return Instruction(mnemonic, operands.strip(), 1)


@pytest.mark.parametrize(
    ("written", "kind", "bits"),
    [
        ("v_mfma_f32_32x32x8_bf16_1k a[0:15], v[2:3], v[4:5], a[0:15]", "mfma", 0),
        ("v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], v20, v21", "mfma", 0),
        ("v_mfma_ld_scale_b32 v1, v2", "valu", 0),
        ("v_accvgpr_read_b32 v1, a3", "accumulator_move", 0),
        ("v_exp_f32_e32 v1, v2", "transcendental", 0),
        ("v_pk_mul_f32 v[0:1], v[2:3], v[4:5]", "valu", 0),
        ("ds_read_b128 v[0:3], v9 offset:512", "lds_read", 128),
        ("ds_read_b64_tr_b16 v[0:1], v9", "lds_read", 64),
        ("ds_read2_b32 v[0:1], v9 offset0:1 offset1:2", "lds_read", 64),
        ("ds_read2st64_b64 v[0:3], v9 offset1:1", "lds_read", 128),
        ("ds_read_u16_d16 v1, v9", "lds_read", 16),
        ("ds_write_b64 v9, v[0:1]", "lds_write", 64),
        ("ds_bpermute_b32 v1, v2, v3", "shuffle", 32),
        ("ds_add_u32 v1, v2", "atomic", 0),
        ("buffer_load_dwordx4 v[0:3], v9, s[0:3], 0 offen", "load", 128),
        ("buffer_load_dword v9, s[0:3], 0 offen lds", "load_to_lds", 32),
        ("buffer_load_dwordx4 v9, s[0:3], 0 offen offset:16 lds", "load_to_lds", 128),
        ("global_load_lds_dwordx4 v[0:1], off", "load_to_lds", 128),
        ("global_load_ushort v1, v[2:3], off", "load", 16),
        ("global_load_short_d16_hi v1, v[2:3], off", "load", 16),
        ("global_store_dwordx2 v[0:1], v[2:3], off", "store", 64),
        ("global_atomic_add_x2 v[0:1], v[2:3], v[4:5], off sc0", "atomic", 0),
        ("flat_load_dwordx3 v[0:2], v[4:5]", "load", 96),
        ("scratch_load_dword v1, off, s32 offset:4", "scratch", 32),
        ("s_waitcnt vmcnt(3) lgkmcnt(0)", "wait", 0),
        ("s_barrier", "barrier", 0),
        ("s_sleep 1", "sleep", 0),
        ("s_cbranch_scc1 .LBB0_1", "branch", 0),
        ("s_load_dwordx2 s[0:1], s[4:5], 0x0", "smem", 0),
        ("s_memrealtime s[0:1]", "smem", 0),
        ("s_add_i32 s1, s2, s3", "salu", 0),
    ],
)
def test_what_an_instruction_is(written, kind, bits):
    assert (one(written).kind, one(written).bits) == (kind, bits)


@pytest.mark.parametrize(
    ("written", "shape", "operations"),
    [
        ("v_mfma_f32_32x32x8_bf16_1k a[0:15], v[2:3], v[4:5], a[0:15]", "32x32x8_bf16_1k", 16384),
        ("v_mfma_f32_16x16x32_bf16 a[0:3], v[2:5], v[6:9], a[0:3]", "16x16x32_bf16", 16384),
        ("v_mfma_f32_32x32x16_fp8_bf8 a[0:15], v[2:3], v[4:5], a[0:15]", "32x32x16_fp8_bf8", 32768),
        ("v_mfma_f32_4x4x4_16b_f16 a[0:3], v[0:1], v[2:3], a[0:3]", "4x4x4_f16", 2048),
        ("v_mfma_f64_16x16x4_f64 a[0:7], v[0:1], v[2:3], a[0:7]", "16x16x4_f64", 2048),
    ],
)
def test_matrix_instructions_have_shapes(written, shape, operations):
    found = one(written).mfma
    assert str(found).removesuffix("_1k") == shape.removesuffix("_1k")
    assert found.operations == operations
    assert one("v_fma_f32 v0, v1, v2, v3").mfma is None


def test_operands_of_fewer_than_8_bits():
    mfma = "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], v[0:3]"
    assert one(f"{mfma} cbsz:4 blgp:4").mfma == Mfma(16, 16, 128, 1, "f8f6f4", narrow=True)
    assert not one(f"{mfma} cbsz:4 blgp:1").mfma.narrow
    assert not one(mfma).mfma.narrow


def test_what_a_wait_leaves_and_where_a_branch_goes():
    assert one("s_waitcnt vmcnt(12) lgkmcnt(0)").waits == {"vmcnt": 12, "lgkmcnt": 0}
    assert one("s_barrier").waits == {}
    assert one("s_cbranch_vccnz .LBB0_7").target == ".LBB0_7"
    assert one("s_add_i32 s0, s1, s2").target == ""


def test_registers_that_are_read_and_written():
    mfma = one("v_mfma_f32_16x16x16_f16 a[0:3], v[8:9], v[10:11], a[0:3]")
    assert mfma.writes == {("a", i) for i in range(4)}
    assert mfma.reads == {("v", i) for i in range(8, 12)} | mfma.writes
    write = one("ds_write_b64 v9, v[0:1] offset:16")
    assert (write.writes, write.reads) == (frozenset(), {("v", 9), ("v", 0), ("v", 1)})
    assert one("ds_read_b32 v1, v9").writes == {("v", 1)}
    assert one("v_add_u32_e32 v1, s2, v3").reads == {("v", 3)}, "scalars are not followed"


def test_a_kernel_is_read():
    kernel = parse(text(gemm(128, 128), vgprs=200, agprs=64, lds=65536))
    assert (kernel.name, kernel.arch) == ("gemm", "gfx950")
    assert (kernel.vgprs, kernel.agprs, kernel.sgprs) == (200, 64, 40)
    assert kernel.spilled == {"vgpr_spill_count": 0, "private_segment_fixed_size": 0}
    assert kernel.fields["group_segment_fixed_size"] == 65536
    assert [block.label for block in kernel.blocks] == ["", ".LBB0_1", ""]
    assert [block.successors for block in kernel.blocks] == [(1,), (1, 2), ()]
    loop = kernel.main_loop
    assert loop.counts["mfma"] == sum(loop.mfma.values()) == loop.mfma["16x16x32_f16"] == 32
    assert (loop.counts["load_to_lds 128"], loop.counts["lds_read 128"], loop.counts["barrier"]) == (8, 16, 1)
    assert loop.waits == [{"vmcnt": 8}, {"lgkmcnt": 0}]
    assert loop.instructions[0].line == 9


def test_of_several_kernels_the_first_is_read_with_its_own_metadata():
    first, second = text(products := ["v_mov_b32 v1, v2"], vgprs=10), text(products, vgprs=99).replace("gemm", "other")
    head, _, entry = first.partition("amdhsa.kernels:\n")
    _, _, other = second.partition("amdhsa.kernels:\n")
    code = second.partition("\t.amdgpu_metadata")[0]
    kernel = parse(head.replace("\t.amdgpu_metadata\n---\n", code + "\t.amdgpu_metadata\n---\n") + "amdhsa.kernels:\n"
                   + entry.replace("...\n\t.end_amdgpu_metadata\n", "") + other)  # fmt: skip
    assert (kernel.name, kernel.vgprs, kernel.fields["next_free_vgpr"]) == ("gemm", 10, 10)


def test_spills_are_seen():
    made = text(["v_mov_b32 v1, v2"])
    made = made.replace(".vgpr_spill_count: 0", ".vgpr_spill_count: 7").replace(
        "segment_fixed_size: 0", "segment_fixed_size: 28"
    )
    assert parse(made).spilled == {"vgpr_spill_count": 7, "private_segment_fixed_size": 28}


def test_the_main_loop_is_the_innermost_that_multiplies():
    """Outer loop over tiles; inside it one over K with a branch, and one that only copies."""
    mfma = "v_mfma_f32_16x16x16_f16 a[0:3], v[8:9], v[10:11], a[0:3]"
    kernel = parse(
        text(
            [
                "s_nop 0", ".LBB0_2:", mfma, "s_cbranch_scc0 .LBB0_3", "ds_read_b128 v[0:3], v9", ".LBB0_3:", mfma,
                "s_cbranch_scc1 .LBB0_2", ".LBB0_4:", "global_store_dword v[0:1], v2, off", "s_cbranch_scc1 .LBB0_4",
                mfma,
            ]
        ).replace("\t.LBB", ".LBB")
    )  # fmt: skip
    assert len(kernel.loops) == 3
    outer, main = kernel.loops[0], kernel.main_loop
    assert main.body < outer.body
    assert (main.counts["mfma"], main.counts["lds_read 128"], outer.counts["mfma"]) == (2, 1, 3)
    assert not any(loop.counts["store 32"] and loop.counts["mfma"] for loop in kernel.loops[1:])
    assert parse(text(["s_nop 0"])).main_loop is None


def test_a_jump_into_the_middle_makes_no_loop():
    """Two blocks that jump to each other, entered at both: no head, so no natural loop."""
    kernel = parse(
        text(
            ["s_cbranch_scc1 .LBB0_3", ".LBB0_2:", "s_nop 0", ".LBB0_3:", "s_nop 1", "s_cbranch_scc0 .LBB0_2"]
        ).replace("\t.LBB", ".LBB")
    )
    assert [len(loop.body) for loop in kernel.loops] == [len(kernel.blocks) - 2], "that of the whole body only"


def test_what_is_no_kernel():
    with pytest.raises(ValueError, match=r"no AMDGCN kernel: the text has no \.amdhsa_kernel"):
        parse(".version 8.0\n.target sm_90a")
    with pytest.raises(ValueError, match="gemm is described, but its label is missing"):
        parse(text([]).replace("gemm: ", "other: "))
    assert amdgcn.WAVE == 64
