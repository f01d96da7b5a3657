"""Package data: the C++ text of the emulator, compiled at first use. Nothing to import."""
