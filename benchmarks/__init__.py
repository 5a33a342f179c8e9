# SPDX-License-Identifier: Apache-2.0
"""What is measured: each script writes figures under `results` that tests and the README read."""
