"""Problem + device -> Plan. Pure Python, no GPU needed, explains itself."""

from tilestream.plan.ask import SCHEDULES, plan
from tilestream.plan.choose import plan_problem
from tilestream.plan.device import DeviceProperties, cpu_properties
from tilestream.plan.floor import Floor
from tilestream.plan.plan import Plan, Refusal
from tilestream.plan.problem import Incoming, Problem, dtype_name
from tilestream.plan.search import search_space

__all__ = [
    "SCHEDULES",
    "DeviceProperties",
    "Floor",
    "Incoming",
    "Plan",
    "Problem",
    "Refusal",
    "cpu_properties",
    "dtype_name",
    "plan",
    "plan_problem",
    "search_space",
]
