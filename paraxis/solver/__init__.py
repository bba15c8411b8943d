"""Choosing a placement for every tensor: the program, the candidate layouts, the cost and the search."""

from .account import Account, account
from .constrained import Wanted, solve
from .constraints import Constraint, ConstraintError
from .cost import CostModel
from .machine import PRESETS, Link, Machine, machine_of
from .program import Program, Step, Value
from .search import search
from .solution import Solution, Unsatisfiable, on_one_rank
from .structure import Candidates

__all__ = [
    "PRESETS",
    "Account",
    "Candidates",
    "Constraint",
    "ConstraintError",
    "CostModel",
    "Link",
    "Machine",
    "Program",
    "Solution",
    "Step",
    "Unsatisfiable",
    "Value",
    "Wanted",
    "account",
    "machine_of",
    "on_one_rank",
    "search",
    "solve",
]
