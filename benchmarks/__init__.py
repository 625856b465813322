"""What mtpconv costs, as ratios to plain copying and reading: `python -m benchmarks --help`."""
