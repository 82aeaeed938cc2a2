"""The networks: ordinary modules that run alone in one process and know nothing of parallelism."""
