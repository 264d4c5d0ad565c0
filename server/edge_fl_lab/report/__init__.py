"""The report of a run and the page of a comparison, each as one self-contained file, and their figures.

facts, gains, sent   the report as a value, read from the run's folder; every figure names its lines of round_metrics.jsonl
page                 the report as HTML, Markdown and JSON; comparison_page the page of a comparison
plots                figures for numbers; figures, run_plots and comparison_plots select those of a report, a run and a comparison
"""
