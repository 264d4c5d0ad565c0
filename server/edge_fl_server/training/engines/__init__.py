"""Engines: where and how the steps of simulated clients run. Each is a fleet (`edge_fl_server.training.fleet`).

sequential  one client after the other in this process; the reference (`simulated.take_step`)
pool        processes with one thread each (`worker.work`)
vector      many clients as one computation, on a GPU or in this process (`VectorFleet._train_chunk`)
ray         the workers of a Ray cluster, sequential or vectorised (`ray.work`)
"""
