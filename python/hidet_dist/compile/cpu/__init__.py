"""What the CPU target compiles in its own way. Nothing here is active for another target."""
