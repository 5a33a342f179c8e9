# SPDX-License-Identifier: Apache-2.0
"""What a card measures: `python -m benchmarks CASE --json FILE`. Ratios are between variants of one run."""
