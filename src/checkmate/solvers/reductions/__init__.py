"""Reductions: smaller problems, and the way from their plans back to plans of the original one."""
