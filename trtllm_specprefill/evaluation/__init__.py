"""What pruning costs in quality: tasks, baselines, reports."""
