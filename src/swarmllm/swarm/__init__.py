"""Pure decisions about a swarm: routes, placement, retries. No I/O, no clock, no torch; time is an argument."""
