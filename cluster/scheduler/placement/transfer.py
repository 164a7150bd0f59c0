"""Predicts when a prompt's KV would be on another instance: by the speed of the link, and by what is reserved to go first.

Other receivers' bytes leave at the pace of the sender's fastest link, because a slow receiver does not hold the others up
(`kvtransfer/linkqueue.py`)."""

from cluster.scheduler.fleet.link_model import LinkModel, bytes_per_s, locality
from cluster.scheduler.fleet.member import Member
from core.scheduler_tuning import SchedulerTuning


def transfer_s(
    model: LinkModel, sender: Member, receiver: Member, num_bytes: float, tuning: SchedulerTuning
) -> tuple[float, float]:
    """Return (seconds until the link is free, seconds that the bytes take then)."""
    out = sender.out_links
    learns = out.is_known and tuning.learns_links
    known = out.speed(receiver.address, locality(sender.spot, receiver.spot)) if learns else None
    if known is None:
        rate, latency_s = bytes_per_s(model, sender.spot, receiver.spot), 0.0
    else:
        rate, latency_s = known.bytes_per_s, known.latency_s
    move_s = latency_s + num_bytes / rate
    if not out.total_bytes or not tuning.reserves_links:
        return 0.0, move_s
    before = out.bytes_to(receiver.address)
    others_s = (out.total_bytes - before) / max(rate, out.fastest_bytes_per_s)
    return before / rate + others_s, move_s
