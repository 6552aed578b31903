"""Reports: what is known of a plan as data, and as one HTML page that needs no network.

:func:`hidet_dist.report.collect.collect` gathers the data from a plan, its graph and its machine. The other modules
need the data alone, so that a report is drawn without the model, and without hidet.
"""

from hidet_dist.report.data import Report
from hidet_dist.report.html import render

__all__ = ["Report", "render"]
