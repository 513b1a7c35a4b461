"""Studies of what a loss that is right is worth in training; docs/records/study_plans.md has their
plans, written before the runs.
"""
