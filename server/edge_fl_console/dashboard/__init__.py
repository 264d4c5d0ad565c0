"""The dashboard: live pages on the registry, and its metrics for Prometheus.

    queries/   the values that each page shows, read from the registry in SQL
    pages/     tables, charts and markup from those values
    live       parts of a page that are updated when their value changes
    serve      the HTTP server: on loopback, or with a token

It writes only the desired state of roll-outs and runs, which the running server applies, also from another process or machine.
"""
