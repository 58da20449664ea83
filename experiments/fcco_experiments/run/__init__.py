"""From a plan to saved runs: in this process, in worker processes, on a Ray cluster."""
