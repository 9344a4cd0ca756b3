"""Problem + device -> Plan. Pure Python, no GPU needed, explains itself."""

from tilestream.plan.ask import SCHEDULES, plan
from tilestream.plan.attention import AttentionProblem
from tilestream.plan.attention_choose import attention_plan, plan_attention
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.choose import plan_problem
from tilestream.plan.device import DeviceProperties, cpu_properties
from tilestream.plan.floor import Floor
from tilestream.plan.plan import Plan, Refusal
from tilestream.plan.problem import Incoming, Problem, dtype_name
from tilestream.plan.search import search_space

__all__ = [
    "SCHEDULES",
    "AttentionPlan",
    "AttentionProblem",
    "DeviceProperties",
    "Floor",
    "Incoming",
    "Plan",
    "Problem",
    "Refusal",
    "attention_plan",
    "cpu_properties",
    "dtype_name",
    "plan",
    "plan_attention",
    "plan_problem",
    "search_space",
]
