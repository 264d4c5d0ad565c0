"""Secure sums: a server learns the sum of many devices' vectors, and no vector (docs/secure-aggregation.md).

The protocol of Bonawitz et al. (Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017) with double masking,
drop-outs and signatures. `device.SumDevice` and `server.SumServer` are its two sides, without input or output.
"""
