"""Programs for those who develop edge-fl: benchmarks, studies, the supply-chain dossier, the documentation site and mutation tests."""
