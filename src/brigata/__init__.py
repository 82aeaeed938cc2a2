"""Brigata plans, simulates and runs hybrid-parallel training of large language models.

Importing the package is cheap: nothing here imports torch. The Python entry points are in ``brigata.api``.
"""

__version__ = "0.1.0"
