"""Engines: where and how the steps of simulated clients run. Each is an implementation of `edge_fl_server.training.clients`.

sequential  one client after the other in this process; the reference (`simulated.take_step`)
pool        processes with one thread each (`pool.work`)
vector      many clients as one computation, on a GPU or in this process (`VectorClients._train_chunk`)
ray         the workers of a Ray cluster, sequential or vectorised (`ray.work`)
"""
