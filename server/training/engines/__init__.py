"""Fleets: the one seam between simulation and deployment. A fleet brings a method to its clients and their updates back.

Where a client's step runs:

    sequential  simulated.take_step     one client after the other, in this process: the reference
    pool        worker.work             take_step, in processes of one thread each
    ray         ray.work                the sequential or the vectorised fleet, in the workers of a Ray cluster
    vector      VectorFleet._chunk      many clients as one computation, on a GPU or in this process
    mqtt        devices.workers.full            on the devices themselves
"""
