"""Federated training: the round loop, cohorts, studies, and the engines that run clients."""
