"""Instances by where they stand: the least loaded on a host, in an NVLink domain, in a rack. Pure."""

from cluster.draws import Draws
from cluster.fleet import Member
from cluster.shelves import Shelves
from core.reports import Register

Group = tuple[str, ...]


class Neighbours:
    def __init__(self) -> None:
        self._shelves: dict[Group, Shelves] = {}
        self._groups: dict[str, tuple[Group, ...]] = {}

    def put(self, member: Member, shelf: int) -> None:
        groups = self._groups.get(member.info.address)
        if groups is None:
            groups = self._groups[member.info.address] = _groups(member.info)
        for group in groups:
            shelves = self._shelves.get(group)
            if shelves is None:
                shelves = self._shelves[group] = Shelves()
            shelves.put(member, shelf)

    def take(self, address: str) -> None:
        for group in self._groups.pop(address, ()):
            self._shelves[group].take(address)
            if not len(self._shelves[group]):
                del self._shelves[group]

    def nearest(self, info: Register, draws: Draws) -> Member | None:
        """The least loaded of the smallest group in which there is one; None where nothing is near."""
        for group in self._groups.get(info.address) or _groups(info):
            if (shelves := self._shelves.get(group)) is not None:
                return shelves.one_low(draws)
        return None


def _groups(info: Register) -> tuple[Group, ...]:
    """Smallest first."""
    site = info.site
    groups: list[Group] = [("host", info.host)]
    if site.nvlink_domain:
        groups.append(("nvlink", site.nvlink_domain))
    if site.rack:
        groups.append(("rack", site.zone, site.rack))
    return tuple(groups)
