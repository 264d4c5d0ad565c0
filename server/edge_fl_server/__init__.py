"""The server: rounds, fleets, evaluation, releases and what it shows of them."""
