"""Draw the pictures of the pages as SVG: `python docs/pictures/draw.py [FOLDER]`; the folder is this one if none is given."""

import sys
from pathlib import Path

from canvas import Canvas


def overview() -> Canvas:
    c = Canvas(920, 420, "Baton: an ingress, a scheduler, a prefill pool and a decode pool")
    c.box(20, 170, 110, 70, "OpenAI clients", "HTTP, SSE")
    c.box(
        200,
        150,
        160,
        110,
        "Ingress",
        "API, tokenizer,",
        "order of tokens,",
        "retries",
        kind="ingress",
        stack=2,
    )
    c.box(200, 20, 160, 70, "Scheduler", "queue, fleet, placement", kind="scheduler", stack=2)
    c.box(
        670,
        40,
        200,
        110,
        "Prefill instance",
        "computes prompts,",
        "samples the first token",
        kind="prefill",
        stack=3,
    )
    c.box(
        670,
        270,
        200,
        110,
        "Decode instance",
        "owns the KV blocks,",
        "generates the rest",
        kind="decode",
        stack=3,
    )
    c.arrow((130, 195), (200, 195))
    c.arrow((200, 220), (130, 220))
    c.arrow((255, 150), (255, 90), label="PlaceRequest", at=(205, 128))
    c.arrow((310, 90), (310, 145), label="PlaceReply", at=(350, 128))
    c.arrow((670, 60), (372, 60), label="load reports of all instances", kind="weak")
    c.arrow((670, 125), (480, 125), (480, 180), (368, 180), label="first token", at=(575, 119))
    c.arrow((360, 205), (520, 205), (520, 300), (670, 300), label="Submit", at=(575, 294))
    c.arrow((670, 350), (280, 350), (280, 262), label="Tokens: one message for each step", at=(475, 344))
    c.arrow((715, 258), (715, 154), label="StartPrefill, with a grant", at=(705, 222), anchor="end")
    c.arrow((775, 150), (775, 250), label="KV, layer by layer", at=(787, 190), kind="kv", anchor="start")
    c.text(787, 208, "then Commit", "start")
    return c


def hand_over() -> Canvas:
    c = Canvas(920, 560, "One request: messages between ingress, scheduler, decode and prefill")
    lanes = {"ingress": 110, "scheduler": 330, "decode": 560, "prefill": 800}
    for name, x in lanes.items():
        c.arrow((x, 60), (x, 545), kind="life")
        c.box(x - 75, 20, 150, 40, name.capitalize(), kind=name)
    words = [
        ("ingress", "scheduler", "PlaceRequest", "mail"),
        ("scheduler", "ingress", "PlaceReply: route", "mail"),
        ("ingress", "decode", "Submit", "mail"),
        ("decode", "prefill", "StartPrefill: request, grant", "mail"),
        ("prefill", "decode", "KV of layer 0, 1, 2 ... of each chunk", "kv"),
        ("prefill", "decode", "ChunkDone", "mail"),
        ("prefill", "ingress", "Tokens: the first token", "mail"),
        ("prefill", "decode", "Commit: bytes, first token", "mail"),
        ("prefill", "decode", "the last layers, still on their way", "kv"),
        ("decode", "ingress", "HandedOver: times", "mail"),
        ("decode", "ingress", "Tokens: the first token again, then one message for each step", "mail"),
        ("ingress", "scheduler", "Finished", "mail"),
    ]
    for number, (source, target, label, kind) in enumerate(words):
        y = 95 + 38 * number
        x0, x1 = lanes[source], lanes[target]
        gap = 6 if x1 > x0 else -6
        c.arrow((x0, y), (x1 - (gap if kind == "kv" else 0), y), kind=kind)
        c.text((x0 + x1) / 2, y - 7, label)
    c.text(568, 184, "reserves blocks, opens a grant", "start")
    return c


def scheduler() -> Canvas:
    c = Canvas(920, 430, "The scheduler: events in, decisions out")
    c.box(
        20,
        120,
        130,
        190,
        "Events",
        "PlaceRequest, Finished",
        "Register, Leaving",
        "LoadReport",
        "NeedPrefill",
        "peers' messages",
        "lost peers, ticks",
    )
    c.frame(190, 20, 520, 300, "GlobalScheduler", "scheduler")
    c.box(
        215,
        60,
        210,
        90,
        "queue: admission",
        "would it wait too long?",
        "Retry-After by drain rate",
        kind="scheduler",
    )
    c.box(
        215,
        190,
        210,
        110,
        "queue: waiting queue",
        "by tenant's share; each tenant:",
        "in time, then deferred,",
        "then late",
        kind="scheduler",
    )
    c.box(
        475,
        190,
        210,
        110,
        "fleet",
        "candidates: all up to 32, else a",
        "shortlist; headroom; prefixes;",
        "what peers have placed",
        kind="scheduler",
    )
    c.box(
        475, 60, 210, 90, "placement", "policy: cost or targets;", "promise what it takes", kind="scheduler"
    )
    c.box(475, 345, 210, 60, "scaling", "autoscaler, in the leader only", kind="scheduler")
    c.box(
        750,
        50,
        150,
        110,
        "Decisions",
        "PlaceReply, Rejected",
        "PrefillAssigned",
        "Buddy, PlacedByPeer",
        "ReleasedByPeer",
    )
    c.box(750, 345, 150, 60, "Ray Serve", "number of replicas")
    c.arrow((150, 135), (215, 105))
    c.arrow((150, 235), (172, 235), (172, 310), (520, 310), (520, 300), kind="weak")
    c.arrow((320, 150), (320, 190))
    c.arrow((425, 245), (475, 245))
    c.arrow((580, 190), (580, 150))
    c.arrow((685, 105), (750, 105))
    c.arrow((425, 75), (455, 75), (455, 40), (825, 40), (825, 50), label="429", at=(640, 34))
    c.arrow((580, 300), (580, 345), kind="weak")
    c.arrow((685, 375), (750, 375))
    return c


def failure() -> Canvas:
    c = Canvas(920, 430, "States of a hand-over on the decode side")
    states = {
        "RESERVING": (20, 60, "plain"),
        "GRANTED": (210, 60, "prefill"),
        "ACTIVE": (760, 60, "decode"),
        "FENCING": (390, 170, "prefill"),
        "ASKING": (580, 170, "plain"),
        "LOCAL": (760, 170, "decode"),
        "RECALLING": (210, 170, "prefill"),
        "REVOKING": (210, 290, "prefill"),
        "CLOSING": (480, 290, "prefill"),
        "RELEASED": (760, 290, "plain"),
    }
    for name, (x, y, kind) in states.items():
        c.box(x, y, 140, 44, name, kind=kind)
    c.arrow((160, 82), (210, 82))
    c.text(185, 50, "blocks reserved")
    c.arrow((350, 75), (760, 75), label="every byte is here", at=(560, 68))
    c.arrow(
        (650, 170),
        (650, 125),
        (300, 125),
        (300, 104),
        label="another prefill instance: next epoch",
        at=(535, 119),
    )
    c.arrow((350, 95), (420, 95), (420, 170), label="writer lost", at=(428, 158), anchor="start")
    c.arrow((260, 104), (260, 170), label="too long, or damaged", at=(268, 148), anchor="start")
    c.arrow((350, 192), (390, 192))
    c.arrow((530, 192), (580, 192), label="fenced", at=(555, 232))
    c.arrow((720, 192), (760, 192), label="nobody", at=(740, 232))
    c.arrow(
        (460, 214),
        (520, 290),
        label="fence takes over 0.5 s: the client goes elsewhere",
        at=(500, 255),
        anchor="start",
    )
    c.arrow((210, 90), (190, 90), (190, 312), (210, 312), label="cancelled", at=(182, 250), anchor="end")
    c.arrow((350, 312), (480, 312), label="writer lost, or too long", at=(405, 282))
    c.arrow((620, 312), (760, 312), label="fenced", at=(690, 304))
    c.arrow((280, 334), (280, 375), (830, 375), (830, 334), label="drained", at=(555, 369))
    c.box(20, 392, 18, 18, "", kind="prefill")
    c.text(46, 406, "somebody else may write the blocks: they are given to nobody", "start")
    c.box(520, 392, 18, 18, "", kind="decode")
    c.text(546, 406, "this instance computes on", "start")
    return c


def engine() -> Canvas:
    c = Canvas(920, 420, "The engine: one step runs, the next is planned")
    c.box(
        20, 150, 140, 100, "Workers", "prefill, decode:", "add, reserve,", "activate, release", kind="ingress"
    )
    c.frame(200, 20, 330, 380, "engine/planning, engine/cache: pure", "scheduler")
    c.box(
        225,
        60,
        280,
        90,
        "step scheduler",
        "tokens computed, tokens known;",
        "budgets, deadlines, preemption",
        kind="scheduler",
    )
    c.box(225, 180, 280, 70, "block ledger", "which sequence has which blocks", kind="scheduler")
    c.box(225, 290, 130, 90, "block pool", "free, referenced,", "cached", kind="scheduler")
    c.box(375, 290, 130, 90, "prefix tree", "runs of blocks,", "eviction", kind="scheduler")
    c.box(590, 60, 150, 90, "loop", "one step runs,", "one is planned", kind="plain")
    c.box(780, 40, 120, 130, "ranks", "batch, model,", "sampler,", "KV pool", kind="decode", stack=3)
    c.box(590, 290, 150, 90, "tiers", "host memory, disk,", "copies at a buddy", kind="plain")
    c.box(780, 290, 120, 90, "pusher", "after each layer,", "to the holder", kind="prefill")
    c.arrow((160, 180), (225, 120))
    c.arrow((505, 90), (590, 90), label="StepPlan", at=(556, 84))
    c.arrow((740, 90), (780, 90))
    c.arrow((780, 130), (740, 130))
    c.arrow((590, 130), (505, 130), label="StepResult", at=(556, 149))
    c.arrow((365, 150), (365, 180))
    c.arrow((290, 250), (290, 290))
    c.arrow((440, 250), (440, 290))
    c.arrow((665, 60), (665, 12), (90, 12), (90, 150), label="tokens of a step", at=(675, 38), anchor="start")
    c.arrow((505, 335), (590, 335), kind="weak")
    c.arrow((840, 170), (840, 288), label="KV", at=(856, 235), kind="kv", anchor="start")
    return c


def parallel() -> Canvas:
    c = Canvas(920, 400, "An instance of many ranks, on two hosts")
    c.frame(20, 20, 560, 360, "first host", "decode")
    c.frame(620, 20, 280, 360, "further host", "decode")
    c.box(
        45,
        55,
        180,
        110,
        "instance process",
        "plans, grants, inbox,",
        "pusher; computes",
        "nothing",
        kind="scheduler",
    )
    for number, x in enumerate((270, 420)):
        c.box(x, 55, 130, 60, f"rank {number}", f"stage 0, tp {number}", kind="decode")
        c.box(640 + 130 * number, 55, 115, 60, f"rank {number + 2}", f"stage 1, tp {number}", kind="decode")
    c.box(
        45,
        250,
        505,
        90,
        "one memory of the instance",
        "the KV pools of ranks 0 and 1, behind one another",
        kind="plain",
    )
    c.box(640, 250, 245, 90, "a memory of its own", "the KV pools of ranks 2 and 3", kind="plain")
    c.box(660, 155, 205, 50, "memory server", "receivers and senders here", kind="scheduler")
    c.arrow((225, 75), (270, 75), label="plan", at=(247, 69))
    c.arrow((270, 100), (225, 100), label="result", at=(247, 117))
    c.arrow((400, 85), (420, 85))
    c.arrow((420, 85), (400, 85))
    c.arrow((550, 70), (640, 70), label="hidden states", at=(598, 92))
    c.arrow((225, 145), (600, 145), (600, 180), (660, 180), label="admit, refuse, fence", at=(440, 139))
    c.arrow((335, 115), (335, 250), kind="weak")
    c.arrow((485, 115), (485, 250), kind="weak")
    c.arrow((135, 165), (135, 250), kind="weak")
    c.arrow((650, 115), (650, 250), kind="weak")
    c.arrow((875, 115), (875, 250), kind="weak")
    c.arrow((760, 205), (760, 250), kind="weak")
    c.arrow((300, 385), (300, 345), kind="kv")
    c.arrow((760, 385), (760, 345), kind="kv")
    c.text(312, 370, "KV from the ranks of another instance", "start")
    return c


def simulator() -> Canvas:
    c = Canvas(920, 400, "Two simulators, one production scheduler")
    c.box(
        250,
        20,
        420,
        70,
        "production scheduler",
        "cluster/scheduler: the same objects, the same events",
        kind="scheduler",
    )
    c.frame(20, 120, 420, 240, "sim/simulated_cluster.py: whole requests", "ingress")
    c.box(40, 155, 180, 85, "production", "frontend, workers,", "hand-over, engine", kind="decode")
    c.box(240, 155, 180, 85, "modelled", "step time, one link out,", "message latency", kind="modelled")
    c.box(40, 260, 380, 80, "event loop whose clock jumps", "sim/virtual_loop.py; about 60 requests/s")
    c.frame(480, 120, 420, 240, "sim/coarse: fleets and hours", "ingress")
    c.box(500, 155, 180, 85, "production", "block pool, prefix tree,", "ledger, step policies", kind="decode")
    c.box(
        700, 155, 180, 85, "modelled", "how steps are composed,", "equal steps are one event", kind="modelled"
    )
    c.box(500, 260, 380, 80, "heap of events", "sim/coarse/world.py; thousands of requests/s")
    c.arrow((230, 120), (340, 90))
    c.arrow((690, 120), (580, 90))
    c.arrow((440, 240), (480, 240))
    c.arrow((480, 240), (440, 240))
    c.text(460, 383, "tests compare the two on random workloads")
    return c


PICTURES = {
    "overview": overview,
    "hand-over": hand_over,
    "scheduler": scheduler,
    "failure": failure,
    "engine": engine,
    "parallel": parallel,
    "simulator": simulator,
}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg())
