# SPDX-License-Identifier: Apache-2.0
"""Shows what was generated: counts and floors for the report, graphs as Python that runs, drawings, one page.

Reads graphs and programs and changes none. `report.py` and `OptimizedModel.dump_graphs` are the ways in.
"""
