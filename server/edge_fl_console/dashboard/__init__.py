"""The dashboard: live pages on the registry, and its metrics for Prometheus.

    pages/     a module per page: its values, read from the registry in SQL, and the tables, charts and markup from them
    live       parts of a page that are updated when their value changes
    serve      the HTTP server: on loopback, or with a token

It writes only the desired state of roll-outs and runs, which the running server applies, also from another process or machine.
"""
