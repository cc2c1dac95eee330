"""Our own way to run a rank's legs: scheduler, blocks, KV transfer, engines."""
