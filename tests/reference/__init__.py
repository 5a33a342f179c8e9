# SPDX-License-Identifier: Apache-2.0
"""Slow programs that are right by inspection; they share no code with the package's runtime."""
