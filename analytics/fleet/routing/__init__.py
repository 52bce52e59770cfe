"""Routers as kernels: one implementation for the emulator, which calls them request by request, and for the compiled replay."""
