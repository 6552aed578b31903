"""Reports on plans: their data, and one HTML page that needs no network.

:func:`hidet_dist.report.collect.collect` collects the data from a plan, its graph and its machine. The other modules
need only the data, so that a report is drawn without the model and without hidet.
"""

from hidet_dist.report.data import Report
from hidet_dist.report.html import render

__all__ = ["Report", "render"]
