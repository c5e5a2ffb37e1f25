"""PDP-FL: personal privacy budgets, and a global one."""
