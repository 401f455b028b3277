"""The kernels' C interfaces through ctypes, for tests and benchmarks that call kernels themselves."""
