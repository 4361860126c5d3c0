"""How it is tried: plan, runner, worker, checks, timing, records, command line."""
