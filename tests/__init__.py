# SPDX-License-Identifier: Apache-2.0
"""Tests: the folders mirror the package; `gpu` runs on a card."""
