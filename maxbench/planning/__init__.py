"""Plans of a run without GPUs: memory, step time, search over layouts, budget, drawings."""
