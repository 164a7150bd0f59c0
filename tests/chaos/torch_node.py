"""A chaos node (`tests/chaos/node.py`) with the transports that need torch, which takes a second or two to import."""

import torch

from cluster.instance.pull_media import MEDIA
from tests.chaos.node import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(MEDIA)
