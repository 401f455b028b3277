"""`python -m mxfp8_moe.selftest`: checks that a device computes what this package promises, and prints how fast."""
