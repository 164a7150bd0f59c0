"""Instances by where they stand: on a host, in an NVLink domain, in a rack.

Invariant: a group is known while an instance of it is."""

from cluster.scheduler.fleet.bucket_queue import BucketQueue
from cluster.scheduler.fleet.member import Member


class NeighbourGroup:
    """The instances of one group, in the queues from which a shortlist takes them."""

    __slots__ = ("batches", "num_members", "prompts")

    def __init__(self) -> None:
        self.num_members = 0
        self.prompts, self.batches = BucketQueue(), BucketQueue()


class Neighbours:
    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], NeighbourGroup] = {}

    def join(self, member: Member) -> tuple[NeighbourGroup, ...]:
        """Add a member, and return its groups, smallest first."""
        groups = tuple([self._groups.setdefault(name, NeighbourGroup()) for name in member.spot.groups])
        for group in groups:
            group.num_members += 1
        return groups

    def leave(self, member: Member) -> None:
        """Remove a member that has joined before."""
        for name in member.spot.groups:
            group = self._groups[name]
            group.num_members -= 1
            if not group.num_members:
                del self._groups[name]
