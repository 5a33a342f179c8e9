# SPDX-License-Identifier: Apache-2.0
"""Decisions about rows, commits and memory: the decode loop and everything it needs, on the device."""
