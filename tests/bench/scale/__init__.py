"""How far one machine goes: `python -m tests.bench.scale` runs rounds of thousands of devices through one mosquitto, then thousands idle.

Broker, fleet and server are the real commands in processes of their own. In the middle of a round the broker goes down and comes back, and
one device in ten leaves for good. What is printed is what docs/scale.md quotes.
"""
