"""Pure policy: decisions and state machines on the standard library, without clocks, sockets or event loops."""
