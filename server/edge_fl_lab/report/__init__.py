"""The report of a run and the page of a comparison, each as one self-contained file, and their figures.

facts             the report as a value, read from the run's folder; every figure names its lines of round_metrics.jsonl
page              the report as HTML, Markdown and JSON, with its figures; run_plots further figures of a run
comparison_page   the page and the figures of a comparison
plots, style      figures for numbers, and their look
"""
