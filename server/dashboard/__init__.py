"""The dashboard: a live page on the registry, for whoever runs a fleet.

    queries/   what each page shows, as values, read from the registry in SQL
    pages/     those values as HTML, pure functions
    live       parts of a page that are drawn again when their value changes
    serve      the server: loopback, or a token

It reads the registry and writes only what is *wanted* of a roll-out or a run; the running server does the rest, so that the dashboard may
run in a process of its own, on another machine, or not at all.
"""
