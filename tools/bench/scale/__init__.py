"""Scale of one machine: `python -m tools.bench.scale` runs rounds of thousands of devices on one mosquitto, then thousands of idle ones.

Broker, fleet and server are the real commands in processes of their own. In the middle of a round the broker is stopped and restarted, and
one device in ten leaves for good. docs/scale.md quotes the output.
"""
