"""The report of a run as one self-contained file, and the plots of runs and comparisons.

facts      the report as a value, read from the run's folder; every figure names its lines of round_metrics.jsonl
page       the report as HTML, Markdown and JSON
plots      figures for numbers; run_plots selects the figures of a run or a comparison
"""
