"""The gfx950 emulator, and its driver for Python: see `README.md` and `driver.py`."""
