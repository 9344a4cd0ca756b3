"""Which tests are closest to a module: those of its name, and those that import it.

``closest("tilestream.core.schedule")`` gives test files, the closest first. A test file is the closer to a module

- if it is named after it (``test_schedule.py``; ``test_cdna_plan.py`` of ``plan/policy/cdna.py``);
- if it names the module, as an import or in a string that it patches;
- if a helper of the tests that it imports does (``fake_ranks``, ``interpreted``);
- if it lies in the folder that mirrors the module's.

`ALWAYS` adds what no name tells: kernels' text is run by machines that tests bind it to.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC, TESTS = ROOT / "src", ROOT / "tests"

#: Tests that run in Triton's interpreter.
INTERPRETED = "kernels/portable/"
#: Test files of a module at most.
MOST = 5
#: Folders of tests that need a GPU, or are of something else.
_OTHER = ("gpu", "mutants", "benchmarks", "torch_samples", "native")
#: Tests that any change fails, since they compare machine code; or none, since they look at the tree.
_CHANGE_DETECTORS = (
    "test_machine_code.py", "test_structure.py", "test_packaging.py", "test_docs.py", "test_examples.py"
)  # fmt: skip

#: By the beginning of a module's name: the first row that fits has the test files that come first. A line
#: that begins with a space goes on with the row before.
_ALWAYS = """
core.schedule: core/test_schedule.py core/test_coverage.py core/test_stream_k.py core/test_arrival_order.py
kernels.device.gate: kernels/portable/test_portable_arrival.py
kernels.device.items: kernels/portable/test_portable_order.py kernels/portable/test_portable_arrival.py
kernels.device.schedule: kernels/test_compiled_orders.py kernels/portable/test_portable_order.py
 kernels/portable/test_portable_arrival.py
kernels.device.arrival_order: kernels/portable/test_portable_order.py kernels/portable/test_portable_arrival.py
kernels.device.queues: kernels/portable/test_portable_order.py
kernels.device.copy_items: kernels/portable/test_portable_copy_items.py
kernels.device.clock: kernels/portable/test_portable_arrival.py
kernels.device.trace: kernels/portable/test_portable_trace.py
core.sources: core/test_sources.py ops/test_grouped_sources.py
arrival.by_source: ops/test_grouped_sources.py
arrival.routed: native/test_native_experts.py
arrival.filling: arrival/test_stream.py arrival/test_landing.py arrival/test_experts.py
arrival.flat: arrival/test_device_signals.py ops/test_grouped_sources.py ops/test_op_arrival.py
ops.grouped_sources: ops/test_grouped_sources.py
kernels.device.sources: kernels/portable/test_portable_grouped_sources.py kernels/test_hopper_sources.py
kernels.hopper.grouped_sources: kernels/test_hopper_sources.py
launch.hopper.sources: kernels/test_hopper_sources.py
kernels.portable.grouped_sources: kernels/portable/test_portable_grouped_sources.py
launch.portable.sources: kernels/portable/test_portable_grouped_sources.py
kernels.hopper.attention_strips: kernels/hopper/test_hopper_strips_text.py
kernels.portable.attention_strips: kernels/hopper/test_hopper_strips_text.py
launch.hopper.attention_strips: kernels/hopper/test_hopper_strips_launch.py
launch.hopper.strip_arguments: kernels/hopper/test_hopper_strips_launch.py kernels/hopper/test_hopper_strips_text.py
plan.policy.hopper_strips: plan/test_invariance.py kernels/hopper/test_hopper_strips_launch.py
kernels.hopper.grouped: kernels/test_hopper_grouped.py kernels/test_hopper_experts.py kernels/test_hopper_sources.py
kernels.device.groups: kernels/portable/test_portable_grouped.py ops/test_grouped.py
kernels.device.epilogue: kernels/test_compiled_orders.py kernels/portable/test_portable_gemm.py
 kernels/cdna/test_cdna_numbers.py kernels/portable/test_portable_grouped.py
kernels.device.softmax: kernels/hopper/test_hopper_attention_text.py kernels/cdna/test_attention_numbers.py
kernels.device.attention: kernels/hopper/test_hopper_attention_text.py kernels/cdna/test_attention_numbers.py
kernels.device.varlen: kernels/portable/test_portable_attention.py kernels/cdna/test_attention_numbers.py
kernels.hopper.attention: kernels/hopper/test_hopper_attention_text.py
kernels.hopper: kernels/test_hopper_protocol.py kernels/test_compile_gates.py
kernels.attention_config: kernels/test_attention_arguments.py kernels/cdna/test_attention_numbers.py
kernels.cdna.attention: kernels/cdna/test_attention_numbers.py
kernels.cdna: kernels/cdna/test_cdna_numbers.py kernels/cdna/test_cdna_protocol.py
kernels.portable.attention_merge: kernels/portable/test_attention_merge.py
kernels.portable.attention: kernels/portable/test_portable_attention.py
kernels.portable.add: kernels/portable/test_portable_add.py
kernels.portable.rank_calls: kernels/portable/test_portable_rank_calls.py kernels/test_rank_calls_compiled.py
launch.portable.rank_calls: kernels/portable/test_portable_rank_calls.py
kernels.portable.experts: kernels/portable/test_portable_experts.py kernels/test_experts_compiled.py
kernels.portable.realign: kernels/portable/test_portable_realign.py
kernels.portable.grouped: kernels/portable/test_portable_grouped.py ops/test_grouped.py
kernels.portable.one_tile: kernels/portable/test_one_tile.py kernels/test_cluster_protocol.py
kernels.portable.cluster: kernels/test_cluster_protocol.py kernels/portable/test_cluster.py
plan.policy.one_tile: plan/test_one_tile_plan.py
kernels.portable: kernels/portable/test_portable_gemm.py kernels/portable/test_portable_fp8.py
 kernels/portable/test_portable_grouped.py
launch.gemm_arguments: plan/test_portable_plan.py kernels/portable/test_portable_gemm.py
launch.grouped_arguments: kernels/portable/test_portable_grouped.py plan/test_grouped_plan.py
core.protocols.experts: kernels/portable/test_portable_experts.py tools/verify/test_recorded_sweeps.py
distributed.graph_experts: native/test_native_mixtures.py kernels/portable/test_portable_experts.py
 distributed/test_moe_pushed.py
distributed.moe_plan: distributed/test_moe_plan.py distributed/test_moe.py
distributed.moe_repeats: native/test_native_mixtures.py
launch.portable.experts: kernels/portable/test_portable_experts.py
launch.layout: distributed/test_moe_plan.py
core.protocols.dispatch: distributed/test_protocols.py distributed/test_moe.py
core.protocols: distributed/test_gpu_reduce_scatter.py distributed/test_copy_engines.py
core.attention_structs: kernels/hopper/test_hopper_attention_text.py
core.groups: plan/test_grouped_plan.py ops/test_grouped.py
core.dtypes: plan/test_plan.py ops/test_matmul.py
core.whole_file: core/test_whole_file.py
core.arguments: core/test_arguments.py ops/test_op_errors.py
distributed.graph_calls: distributed/test_graph_calls.py
distributed.environment: distributed/test_dispatch.py
distributed.slots: distributed/test_copy_engines.py distributed/test_graph_calls.py
distributed.exchange: distributed/test_scenarios.py distributed/test_all_gather.py
distributed.async_tp: distributed/test_async_tp.py distributed/test_async_input.py distributed/test_scenarios.py
distributed.gloo: distributed/test_all_gather.py distributed/test_reduce_scatter.py
distributed.api: distributed/test_all_gather.py distributed/test_reduce_scatter.py
distributed.modules: distributed/test_all_gather.py distributed/test_reduce_scatter.py
distributed.library: distributed/test_all_gather.py distributed/test_reduce_scatter.py
plan.api: plan/test_plan.py plan/test_auto.py plan/test_refusals.py plan/test_arrival_order_plan.py
plan.attention_problem: plan/test_attention_plan.py plan/test_refusals.py plan/test_hopper_attention_plan.py
plan.attention_plan: plan/test_attention_plan.py plan/test_attention_groups.py plan/test_hopper_attention_plan.py
plan.policy.hopper_costs: plan/test_hopper_costs.py plan/test_recorded_plans.py plan/test_hopper_plan.py
plan.policy.portable_attention: plan/test_attention_plan.py plan/test_attention_groups.py
plan.policy.portable: plan/test_portable_plan.py plan/test_refusals.py plan/test_plan.py
runtime.device_workspace: runtime/test_workspace.py kernels/test_launch_tables.py
distributed.planner: distributed/test_dispatch.py distributed/test_all_gather.py distributed/test_reduce_scatter.py
launch.cpu.threads: kernels/test_cpu_failures.py kernels/test_cpu_schedules.py
launch.cpu.launch: kernels/test_cpu_failures.py kernels/test_cpu_schedules.py
launch.cpu.workers: kernels/test_cpu_workers.py kernels/test_cpu_failures.py
launch.observe: ops/test_inline.py ops/test_launch_cache.py
launch.native: ops/test_inline.py ops/test_launch_cache.py
launch.pack: kernels/hopper/test_hopper_arguments.py kernels/test_attention_arguments.py
ops.attention_backward: ops/test_transforms.py ops/test_attention_library.py
ops.attention_request: ops/test_attention.py ops/test_attention_errors.py
ops.checks: ops/test_op_errors.py ops/test_op_arrival.py ops/test_attention_errors.py
ops.grouped_library: ops/test_grouped.py arrival/test_experts.py
ops.gated: ops/test_op_arrival.py ops/test_matmul.py
ops.gradients: ops/test_autograd.py ops/test_transforms.py
ops.library: ops/test_library.py ops/test_matmul.py native/test_native_ops.py
ops.native: ops/test_inline.py ops/test_launch_cache.py
ops.operands: ops/test_matmul.py ops/test_op_errors.py ops/test_op_arrival.py
ops.request: ops/test_op_errors.py ops/test_launch_cache.py ops/test_matmul.py
ops.scales: ops/test_fp8.py
ops.sharding: distributed/test_dtensor.py
plan.plan: plan/test_plan.py plan/test_grouped_plan.py
plan.explain: plan/test_plan.py plan/test_refusals.py
plan.hooks: plan/test_tuned.py plan/test_plan.py
plan.raster: plan/test_plan.py plan/test_publishes.py
runtime.driver.base: runtime/test_launcher.py runtime/test_hip.py
runtime.extension: native/test_native_sequence.py native/test_native_calls.py
runtime.producer: native/test_native_producer.py
runtime.sequence: native/test_native_sequence.py
runtime.shutdown: test_exit.py
"""
ALWAYS = {f"tilestream.{name}": tuple(files.split()) for name, files in (
    line.split(": ") for line in _ALWAYS.strip().replace("\n ", " ").splitlines()
)}  # fmt: skip
#: The same, behind what is closest.
ALSO = {
    "tilestream_tools.verify": "mutants/test_checker.py", "tilestream_tools.verify.": "tools/verify/test_checks.py",
    "tilestream.core.protocols": "mutants/test_checker.py",
    "tilestream.plan.policy": "plan/test_refusals.py",
}  # fmt: skip


def module_of(path: Path) -> str:
    """The module of a file of `SRC`."""
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


def path_of(module: str) -> Path:
    """The inverse."""
    return SRC / (module.replace(".", "/") + ".py")


@functools.cache
def _texts() -> dict[Path, str]:
    """The text of every file of the tests."""
    return {path: path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("*.py"))}


@functools.cache
def _test_files() -> tuple[Path, ...]:
    return tuple(
        path
        for path in _texts()
        if path.name.startswith("test_")
        and path.relative_to(TESTS).parts[0] not in _OTHER
        and path.name not in _CHANGE_DETECTORS
    )


def _names(text: str, module: str) -> bool:
    """Whether a file's text imports or names a module."""
    parent, _, name = module.rpartition(".")
    if name not in text or parent not in text:  # a search by expressions takes minutes for all modules
        return False
    imported = rf"from {re.escape(parent)} import [^\n]*\b{name}\b|from {re.escape(parent)} import \([^)]*\b{name}\b"
    return bool(re.search(rf"\b{re.escape(module)}\b(?!\.\w+ import)|{imported}", text))


@functools.cache
def _helpers_that_name(module: str) -> frozenset[str]:
    return frozenset(
        path.stem
        for path, text in _texts().items()
        if not path.name.startswith("test_") and path.stem not in ("__init__", "conftest") and _names(text, module)
    )


def _closeness(path: Path, module: str) -> tuple[int, ...]:
    text, parts = _texts()[path], module.split(".")
    words, own = path.stem.removeprefix("test_").split("_"), parts[-1].split("_")
    folders = path.relative_to(TESTS).parts[:-1]
    is_named = 3 * (words == own) or 2 * (set(own) <= set(words) and set(words) <= {*own, *parts, "plan", "model"})
    if (folders[:1] == ("tools",)) != (parts[0] == "tilestream_tools"):
        is_named = 0
    helper = any(one in text and re.search(rf"\b(from|import) {one}\b", text) for one in _helpers_that_name(module))
    mirrored = 1 if folders and all(part in parts or part == "tools" for part in folders) else 0
    score = is_named + 3 * _names(text, module) + 2 * helper
    return (score + mirrored if score else 0, mirrored, -text.count("\nfrom tilestream"), -len(text))


@functools.cache
def closest(module: str) -> tuple[str, ...]:
    """Test files, from `TESTS`, the closest first."""
    first = next((files for name, files in ALWAYS.items() if module.startswith(name)), ())
    ranked = sorted(((_closeness(path, module), path) for path in _test_files()), reverse=True)
    found = [path.relative_to(TESTS).as_posix() for (score, *_), path in ranked if score > 0]
    chosen = list(dict.fromkeys([*first, *found]))[: max(MOST, len(first))]
    return (*chosen[:2], *(file for name, file in ALSO.items() if module.startswith(name)), *chosen[2:])
