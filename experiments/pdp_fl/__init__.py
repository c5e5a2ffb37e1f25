"""PDP-FL, with personal privacy budgets and a global one."""
