"""A comparison from Python: several methods and seeds, one table, one report."""

from .report import Conclusion, conclude
from .run import Plan, execute, plan

__all__ = ["Conclusion", "Plan", "conclude", "execute", "plan"]
