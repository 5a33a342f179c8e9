# SPDX-License-Identifier: Apache-2.0
"""Finds the layer of the stack that changes an answer: `bisect` compares each with the one below it.

The user's eager model is the ground. Above it lie the capture, each pass, each program pass by pass, the decode loop,
caches, compiled code, FP8, Triton kernels, CUDA graphs; and last what changes answers by design.
"""
