"""The report of a run: one file that opens without a network, and says of every number on which line of the JSONL it stands.

facts     what there is to say, from the run's folder alone
page      as one self-contained HTML file, as Markdown, as JSON
"""
