"""Baton on a CPU beside other people's engines, in the same run on the same random weights.

    python -m benchmarks.cpu.install [--environments build/cpu-peers]
    python -m benchmarks.cpu.run --json FILE [--environments build/cpu-peers] [--resume] [--smoke] ...

`install` makes an environment for each peer, since what they need excludes each other; transformers is in Baton's own. `run`
starts a child in each peer's environment and has one of them work at a time. What a child is asked is the same for all
(`peers.Engine`); it tells the wall's and its own processors' seconds, and its memory."""
