"""Makes a `Plan` from a problem and a device, in pure Python and without a GPU. `Plan.explain` gives the reasons."""

from tilestream.core.device import DeviceProperties, cpu_properties
from tilestream.plan.api import SCHEDULES, plan
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.attention_planner import attention_plan, plan_attention
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.candidate import Refusal
from tilestream.plan.grouped import grouped_plan, plan_groups
from tilestream.plan.plan import Plan
from tilestream.plan.planner import plan_problem, search_space
from tilestream.plan.problem import GroupedProblem, Incoming, Problem, dtype_name
from tilestream.plan.roofline import Floor

__all__ = [
    "SCHEDULES", "AttentionPlan", "AttentionProblem", "DeviceProperties", "Floor", "GroupedProblem", "Incoming", "Plan",
    "Problem", "Refusal", "attention_plan", "cpu_properties", "dtype_name", "grouped_plan", "plan", "plan_attention",
    "plan_groups", "plan_problem", "search_space",
]  # fmt: skip
