"""Speed and memory of this project next to its peers: ``python -m benchmarks.bench``."""
